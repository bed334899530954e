"""Define the settings of `cold_start`: models, links, cores, and each way to a first answer."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from benchmarks.cold_start.models import MODELS, SMALL

PLAIN = " plain"
"""Suffix of a way whose model is built by its constructor, with weights filled."""

GBIT = 1e9 / 8

PARTS, PARTS_REPEATS = "parts", 5
"""Name of the bound's parts among a turn's runs, and the number of turns that measure them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way of a process to its first answer.

    Attributes:
        title: Name in the report.
        knobs: Numbers of concurrent requests to try, or their equivalent. The best one is used.
        what: The knob's name.
        needs: Packages of the peers' environment.
        assigns: Whether tensors may also be assigned to the model instead of copied.
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
    """The options of a way.

    Attributes:
        knob: See `Way.knobs`.
        assign: Whether tensors are assigned to the model instead of copied.
    """

    knob: int
    assign: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One cell of the benchmark.

    Attributes:
        model: One of ``models.MODELS``.
        batch: Samples of the call.
        gbit: Rate of the link, in Gbit/s; None for no limit.
        cores: Cores of the answering process. The store has the other core, or shares both.
        repeats: Turns of all ways.
        ways: Ways that take part.
        plain: Ways that also run with a model that its constructor builds.
        timed: Whether seconds count. Otherwise only memory counts.
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
        """Return a short key of everything that a run depends on."""
        return f"{self.model}-b{self.batch}-{self.link}"

    @property
    def link(self) -> str:
        """Return the link between process and store, and the number of cores."""
        rate = "unshaped" if self.gbit is None else f"{self.gbit:g}Gbit"
        return f"{rate}-{self.cores}core"

    @property
    def rate(self) -> float | None:
        """Return the rate of the link, in bytes per second on the wire; None for no limit."""
        return None if self.gbit is None else self.gbit * GBIT

    @property
    def one_core(self) -> bool:
        """Return whether loading and executing share a core."""
        return self.cores == 1

    @property
    def runs(self) -> tuple[str, ...]:
        """Return the names of all runs that take turns."""
        both = ((way, way + PLAIN) if way in self.plain else (way,) for way in self.ways)
        return tuple(run for runs in both for run in runs)

    def turn(self, number: int) -> list[str]:
        """Return all runs of one turn, with the parts of the bound in the first turns.

        Their order is drawn for each turn, so that no run is always early or always follows the same run.
        """
        order = [*self.runs, *([PARTS] if self.timed and number < PARTS_REPEATS else [])]
        random.Random(f"{self.key} {number}").shuffle(order)
        return order


def way_of(run: str) -> str:
    """Return the way of a run's name."""
    return run.removesuffix(PLAIN)


MAIN = ("gpt2", "resnet50", "bert", "regnet", "vgg19", "wav2vec2", "whisper")

CROSSED = ("gpt2", "resnet50", *SMALL)
"""Models that all ways run with and without our construction on both links. Other models leave it out where
the result is known: at 1 Gbit/s, where a download takes longer and constructing takes the same time, and for
our ways that differ only in their groups."""

UNCROSSED = tuple(way for way in WAYS if way not in ("pisel", "layers"))


def _one_sample(model: str, gbit: float | None) -> Setting:
    """Return a setting of one sample and one core."""
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
"""Run once, for its memory. The bound's parts would need three times its 6 GB, so they are left out."""

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
"""Settings in the order in which each turn runs them."""

SWEPT_MODEL, SWEPT_SMALL = "gpt2", "mobilenet"
"""Models that give each way's knob, a link at a time. Small models have their own."""

SWEEPS, SWEEP_NEAR = 3, 1.2
"""Runs of each value, in turns, of which the shortest counts. After the first round, only values this near to
the shortest go on."""

SWEEP_EVEN = 1.01
"""Values this near to the shortest differ by chance, so the lowest one is used: more concurrent requests need
more memory."""

SWEPT_AT: Mapping[float | None, float] = MappingProxyType({0.1: 1.0})
"""Rates whose sweep would last too long, and the rate whose values they use."""


def swept(setting: Setting) -> Setting:
    """Return the setting that gives a setting's knobs: with one sample, and on one core."""
    gbit = SWEPT_AT.get(setting.gbit, setting.gbit)
    model = SWEPT_SMALL if setting.model in SMALL else SWEPT_MODEL
    return replace(setting, model=model, batch=1, gbit=gbit, cores=1)


QUICK: tuple[Setting, ...] = (Setting(model="squeezenet", repeats=1, ways=(OURS,), plain=()),)
QUICK_KNOB = 4


def forms_of(setting: Setting) -> tuple[str, ...]:
    """Return the kinds of stored file that a setting's ways read."""
    return tuple(dict.fromkeys(FORMS[way] for way in setting.ways))


FORMS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys((*STREAMED, "sequential"), "upriver.safetensors"),
        **dict.fromkeys(("boto3-safetensors", "runai"), "plain.safetensors"),
        **dict.fromkeys(("boto3-torch", "s3torchconnector"), "model.pt"),
        "tensorizer": "model.tensors",
    }
)
"""The stored file of each way."""
