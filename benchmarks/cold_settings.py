"""What `cold_start.py` runs: models, links, cores, and everybody's ways to a first answer."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from cold_models import MODELS, SMALL

PLAIN = " plain"
"""Ends the name of a way whose model is built as its constructor does it, weights filled."""

GBIT = 1e9 / 8

PARTS, PARTS_REPEATS = "parts", 5
"""Stands for what the bound is made of among a turn's runs, and in how many turns that is measured."""


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
        plain: Those that also run with a model that is built as its constructor does it.
        timed: Whether seconds count; if not, it is for its memory alone.
    """

    model: str
    batch: int = 1
    gbit: float | None = None
    cores: int = 1
    repeats: int = 10
    ways: tuple[str, ...] = tuple(WAYS)
    plain: tuple[str, ...] = tuple(WAYS)
    timed: bool = True

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"model must be one of {', '.join(MODELS)}, got {self.model!r}")
        if not 1 <= self.batch <= 1024:
            raise ValueError(f"batch must lie in 1..1024, got {self.batch}")
        if self.cores not in (1, 2):
            raise ValueError(f"cores must be 1 or 2, got {self.cores}")
        for name in ("ways", "plain"):
            if wrong := [way for way in getattr(self, name) if way not in WAYS]:
                raise ValueError(f"{name} must be among {', '.join(WAYS)}, got {wrong[0]!r}")

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
        both = ((way, way + PLAIN) if way in self.plain else (way,) for way in self.ways)
        return tuple(run for runs in both for run in runs)

    def turn(self, number: int) -> list[str]:
        """All runs of one turn, and the parts of the bound in the first ones.

        They are in an order that is drawn for the turn, so that nobody always comes early, or always after
        the same neighbour.
        """
        order = [*self.runs, *([PARTS] if self.timed and number < PARTS_REPEATS else [])]
        random.Random(f"{self.key} {number}").shuffle(order)
        return order


def way_of(run: str) -> str:
    """The way of a run's name."""
    return run.removesuffix(PLAIN)


MAIN = ("gpt2", "resnet50", "bert", "regnet", "vgg19", "wav2vec2", "whisper")

CROSSED = ("gpt2", "resnet50", *SMALL)
"""Models with which everybody runs with and without our construction on both links. With the others it is
left out where it says nothing new: at 1 Gbit/s, where a download takes longer and constructing what it always
does, and with the groupings that are ours but for their groups."""

UNCROSSED = tuple(way for way in WAYS if way not in ("pisel", "layers"))


def _one_sample(model: str, gbit: float | None) -> Setting:
    """Of one sample and one core."""
    if model in CROSSED:
        return Setting(model=model, gbit=gbit)
    return Setting(model=model, gbit=gbit, plain=UNCROSSED if gbit is None else ())


XL = Setting(
    model="gpt2-xl",
    repeats=2,
    ways=(OURS, "sequential", "boto3-safetensors", "runai"),
    plain=(),
    timed=False,
)
"""Once, for its memory: three times its 6 GB, which the bound's parts would take, need not be there."""

SETTINGS: tuple[Setting, ...] = (
    _one_sample("gpt2", 1.0),
    _one_sample("gpt2", None),
    *(_one_sample(model, gbit) for model in (*MAIN[1:], *SMALL) for gbit in (1.0, None)),
    *(Setting(model=model, gbit=0.1, repeats=3, plain=()) for model in ("resnet50", "regnet")),
    *(Setting(model=model, batch=8, gbit=1.0, plain=()) for model in ("resnet50", "gpt2", "wav2vec2")),
    *(
        Setting(model=model, batch=32, gbit=gbit, plain=())
        for model in ("resnet50", "gpt2", "bert")
        for gbit in (1.0, None)
    ),
    Setting(model="gpt2", gbit=1.0, cores=2, plain=()),
    Setting(model="resnet50", cores=2, plain=()),
    XL,
)
"""In the order in which each turn goes through them."""

SWEPT_MODEL, SWEPT_SMALL = "gpt2", "mobilenet"
"""On which everybody's knob is found, a link at a time; for small models by themselves."""

SWEEPS, SWEEP_NEAR = 3, 1.2
"""Runs of each value, in turns, of which the shortest counts; after the first, those only that were so near
to the shortest."""

SWEEP_EVEN = 1.01
"""Of values that are so near to the shortest, which chance decides among, the lowest is taken: more requests
at once take more memory."""

SWEPT_AT: Mapping[float | None, float] = MappingProxyType({0.1: 1.0})
"""Where a sweep would take too long, another rate, whose values are taken."""


def swept(setting: Setting) -> Setting:
    """Where the knobs that a setting takes are found: at one sample, and on one core."""
    gbit = SWEPT_AT.get(setting.gbit, setting.gbit)
    model = SWEPT_SMALL if setting.model in SMALL else SWEPT_MODEL
    return replace(setting, model=model, batch=1, gbit=gbit, cores=1)


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
