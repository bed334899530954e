"""What `cold_start.py` runs: models, links, cores, and everybody's ways to a first answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from cold_models import MODELS, SMALL

PLAIN = " plain"
"""Ends the name of a way whose model is built as its constructor does it, weights filled."""

GBIT = 1e9 / 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How a process comes by its first answer.

    Attributes:
        title: As the report calls it.
        knobs: Requests under way that are tried, or what stands for them; the best one is taken.
        what: The knob's name.
        needs: Packages of the peers' environment.
        assigns: Whether tensors may also be put into the model as they came, instead of copied.
    """

    title: str
    knobs: tuple[int, ...] = (1, 4, 16)
    what: str = "requests under way"
    needs: tuple[str, ...] = ()
    assigns: bool = False


OURS = "upriver"

WAYS: Mapping[str, Way] = MappingProxyType(
    {
        OURS: Way(title="upriver"),
        "pisel": Way(title="PISeL's groups"),
        "layers": Way(title="layer by layer"),
        "sequential": Way(title="sequential", assigns=True),
        "boto3-safetensors": Way(
            title="boto3, file, safetensors", what="max_concurrency", needs=("boto3",), assigns=True
        ),
        "boto3-torch": Way(
            title="boto3, file, torch.load", what="max_concurrency", needs=("boto3",), assigns=True
        ),
        "runai": Way(
            title="runai-model-streamer",
            what="RUNAI_STREAMER_CONCURRENCY",
            needs=("runai-model-streamer", "runai-model-streamer-s3"),
        ),
        "tensorizer": Way(title="tensorizer", what="num_readers", needs=("tensorizer", "boto3")),
        "s3torchconnector": Way(
            title="s3torchconnector",
            knobs=(1, 10, 50),
            what="throughput_target_gbps",
            needs=("s3torchconnector",),
            assigns=True,
        ),
    }
)

STREAMED = (OURS, "pisel", "layers")
"""Ways that answer while weights arrive: ours, with three groupings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """How a way is set.

    Attributes:
        knob: See `Way.knobs`.
        assign: Whether tensors are put into the model as they came.
    """

    knob: int
    assign: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One cell of the benchmark.

    Attributes:
        model: One of ``cold_models.MODELS``.
        batch: Samples of the call.
        gbit: Rate of the link, in Gbit/s; None for no limit.
        cores: Of the process that answers. The store has the other core, or shares both.
        repeats: Turns of all ways.
        ways: That take part.
        plain: Whether each also runs with a model that is built as its constructor does it.
    """

    model: str
    batch: int = 1
    gbit: float | None = None
    cores: int = 1
    repeats: int = 10
    ways: tuple[str, ...] = tuple(WAYS)
    plain: bool = True

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"model must be one of {', '.join(MODELS)}, got {self.model!r}")
        if not 1 <= self.batch <= 1024:
            raise ValueError(f"batch must lie in 1..1024, got {self.batch}")
        if self.cores not in (1, 2):
            raise ValueError(f"cores must be 1 or 2, got {self.cores}")
        if wrong := [way for way in self.ways if way not in WAYS]:
            raise ValueError(f"ways must be among {', '.join(WAYS)}, got {wrong[0]!r}")

    @property
    def key(self) -> str:
        """Everything that a run depends on, short."""
        return f"{self.model}-b{self.batch}-{self.link}"

    @property
    def link(self) -> str:
        """What lies between the process and the store, and how many cores it has."""
        rate = "unshaped" if self.gbit is None else f"{self.gbit:g}Gbit"
        return f"{rate}-{self.cores}core"

    @property
    def rate(self) -> float | None:
        """Of the link, in bytes per second on the wire; None for no limit."""
        return None if self.gbit is None else self.gbit * GBIT

    @property
    def one_core(self) -> bool:
        """Whether loading and executing share a core."""
        return self.cores == 1

    @property
    def runs(self) -> tuple[str, ...]:
        """Names of all that take turns."""
        endings = ("", PLAIN) if self.plain else ("",)
        return tuple(way + ending for way, ending in itertools.product(self.ways, endings))

    def turns(self, number: int) -> Iterator[str]:
        """All runs of one turn; each turn begins with another one."""
        first = number % len(self.runs)
        return iter((*self.runs[first:], *self.runs[:first]))


def way_of(run: str) -> str:
    """The way of a run's name."""
    return run.removesuffix(PLAIN)


LINKS: tuple[float | None, ...] = (1.0, None)
MAIN = ("gpt2", "resnet50", "bert", "regnet", "vgg19", "wav2vec2", "whisper")
BATCHES = (("resnet50", 8), ("resnet50", 32), ("gpt2", 8), ("gpt2", 32), ("bert", 32), ("wav2vec2", 8))
XL = Setting(
    model="gpt2-xl",
    repeats=2,
    ways=(OURS, "sequential", "boto3-safetensors", "runai"),
    plain=False,
)
"""Once, for its memory."""

SETTINGS: tuple[Setting, ...] = (
    *(Setting(model=model, gbit=gbit) for model in MAIN for gbit in LINKS),
    *(Setting(model=model, gbit=gbit) for model in SMALL for gbit in LINKS),
    *(Setting(model=model, gbit=0.1, repeats=3) for model in ("resnet50", "regnet")),
    *(
        Setting(model=model, batch=batch, gbit=gbit, plain=False)
        for model, batch in BATCHES
        for gbit in LINKS
    ),
    *(
        Setting(model=model, gbit=gbit, cores=2, plain=False)
        for model in ("gpt2", "resnet50")
        for gbit in LINKS
    ),
    XL,
)

SWEPT_MODEL = "gpt2"
"""On which everybody's knob is found, a link at a time."""

SWEEPS = 2
"""Runs of each value; the shortest counts."""

SWEPT_AT: Mapping[float | None, float] = MappingProxyType({0.1: 1.0})
"""Where a sweep would take too long, another rate, whose values are taken."""


def swept(setting: Setting) -> Setting:
    """Where the knobs that a setting takes are found."""
    gbit = SWEPT_AT.get(setting.gbit, setting.gbit)
    return replace(setting, model=SWEPT_MODEL, batch=1, gbit=gbit)


QUICK: tuple[Setting, ...] = (Setting(model="squeezenet", repeats=1, ways=(OURS, "sequential")),)
QUICK_KNOB = 4


def forms_of(setting: Setting) -> tuple[str, ...]:
    """Kinds of stored file that a setting's ways read."""
    return tuple(dict.fromkeys(FORMS[way] for way in setting.ways))


FORMS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys((*STREAMED, "sequential"), "upriver.safetensors"),
        **dict.fromkeys(("boto3-safetensors", "runai"), "plain.safetensors"),
        **dict.fromkeys(("boto3-torch", "s3torchconnector"), "model.pt"),
        "tensorizer": "model.tensors",
    }
)
"""What each way reads."""
