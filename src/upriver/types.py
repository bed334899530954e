"""Define the shared types: frozen, keyword-only, with units in their names, validated once.

Sizes are bytes, times seconds, rates bytes per second. A *position* is a place in the chain. The stored bytes
of a dataset with ``m`` input stages are at ``-m``, and the model's input is at 0. Position ``k`` lies right
after model stage ``k`` (counted from 1). A *cut* is the position at which intermediate results cross to the
next tier.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Real
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    NamedTuple,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from upriver.errors import ConfigError
from upriver.text import aligned, bytes_text, printable, seconds_text, shortened, wrapped

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")

DEFAULT_MICRO_BATCH = 16
"""Samples that a frozen stage sees at once by default (HAPI 2025, section 4.4)."""

DEFAULT_POLICY = "upriver"

START, RAW, DONE = -2, -1, 0
"""Positions of a sample of the user's own dataset: its index alone, the value that was read, the element of a
batch."""

PIXEL_CEILING = 178_956_970
"""Upper limit on any cap: Pillow refuses larger images, of 0.5 GB as RGB."""

STREAMS = ("micro_batch", "request", "synchronous")
"""Granularities at which responses may leave the storage tier."""


class Tier(StrEnum):
    """Kind of machine that can run a stretch of the chain."""

    STORAGE = "storage"
    WORKER = "worker"
    COMPUTE = "compute"
    DEVICE = "device"


def require_finite(
    name: str, value: float, *, at_least: float = 0.0, at_most: float = math.inf, positive: bool = False
) -> None:
    """Check a number once, at the public border.

    Raises:
        ConfigError: If ``value`` is NaN, infinite, too small or too large; the message names the field.
    """
    given: object = value  # any object, despite its type
    try:
        finite = not isinstance(given, bool) and isinstance(given, Real) and math.isfinite(value)
    except OverflowError:  # a whole number beyond the range of floats
        finite = False
    if not finite or not at_least <= value <= at_most or (positive and value <= 0):
        bound = "> 0" if positive else f">= {at_least:g}"
        bound += f" and <= {at_most:g}" if at_most < math.inf else ""
        raise ConfigError(f"{name} must be a finite number {bound}, got {printable(repr(value), 40)}")


def require_type(name: str, value: object, kind: type[_T], example: str) -> _T:
    """Check the type of an argument once, at the public border.

    Args:
        example: Expression that gives such a value, for the message.

    Raises:
        ConfigError: If ``value`` has another type; the message names both.
    """
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(
            f"{name} must be a {kind.__name__} ({example}), got {printable(repr(value), 60)} of type "
            f"{type(value).__name__}"
        )
    return value


# ---------------------------------------------------------------------------- limits of numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of a number, as part of a field's type; `_check_numbers` checks them.

    Attributes:
        most: Upper bound: above any real value, and small enough that sums and products stay far within the
            range of floats.
        or_infinite: True if it may be infinite, which means that the amount is unknown.
    """

    most: float
    least: float = 0.0
    positive: bool = False
    or_infinite: bool = False

    def check(self, name: str, value: float) -> None:
        """Check one number with `require_finite`."""
        if not (self.or_infinite and value == math.inf):
            require_finite(name, value, at_least=self.least, at_most=self.most, positive=self.positive)


MOST_BYTES, MOST_SECONDS, MOST_FACTOR = 10**18, 10**9, 10**9
BANDWIDTH = Limits(most=10**15, positive=True)
"""Limits of a link's bandwidth, in bytes per second."""

Bytes: TypeAlias = Annotated[float, Limits(most=MOST_BYTES)]
Memory: TypeAlias = Annotated[float, Limits(most=MOST_BYTES, or_infinite=True)]
Bandwidth: TypeAlias = Annotated[float, BANDWIDTH]
Seconds: TypeAlias = Annotated[float, Limits(most=MOST_SECONDS)]
Flops: TypeAlias = Annotated[float, Limits(most=10**24)]
Count: TypeAlias = Annotated[int, Limits(least=1, most=10**9)]
Factor: TypeAlias = Annotated[float, Limits(most=MOST_FACTOR, positive=True)]


class _Limited(NamedTuple):
    """Field with limits.

    Attributes:
        inside: Containers of the numbers, outermost first: mappings, tuples or nothing.
    """

    name: str
    limits: Limits
    optional: bool
    inside: tuple[Any, ...]


def _check_numbers(name: str, noun: Any) -> None:
    """Check every field of an object whose type has `Limits`.

    Args:
        name: Name of the object in its file, the prefix of its fields' names.
    """
    for each in _limited(noun.__class__):
        value = getattr(noun, each.name)
        if value is not None or not each.optional:
            _check_within(f"{name}.{each.name}" if name else each.name, value, each.limits, each.inside)


def _check_within(name: str, value: Any, limits: Limits, inside: tuple[Any, ...]) -> None:
    """Check every number of a field. The name of a mapping's value includes its key."""
    if not inside:
        limits.check(name, value)
    elif inside[0] is Mapping:
        for key, held in value.items():
            _check_within(f"{name}.{key}", held, limits, inside[1:])
    else:
        for held in value:
            _check_within(name, held, limits, inside[1:])


@functools.cache
def _limited(noun: type[Any]) -> tuple[_Limited, ...]:
    found = []
    for name, hint in get_type_hints(noun, include_extras=True).items():
        inside: list[Any] = []
        while (origin := get_origin(hint)) in (Mapping, tuple):
            inside.append(origin)
            hint = get_args(hint)[-1]
        optional = NoneType in get_args(hint)
        of_number = get_args(hint)[0] if optional else hint
        for limits in getattr(of_number, "__metadata__", ()):
            found.append(_Limited(name, limits, optional, tuple(inside)))
    return tuple(found)


# --------------------------------------------------------------------------------- data in flight


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """Some samples of an epoch, at one position of the chain.

    Attributes:
        ids: Rows of the dataset's index, in the order of the epoch; at most the job's micro-batch.
        position: Position of ``tensors`` in the chain.
        tensors: At positions >= 0 the tensors live across that cut, each made for a full micro-batch: sample
            ``i`` is ``ids[i]``, samples past ``len(ids)`` are padding. Samples lie in dimension 0 of the
            model's input, and further on in the model's own dimension, if a tensor has samples at all. At
            positions < 0 there is one tensor for each sample (stored bytes as uint8 of shape ``(n,)``, or
            pixels as uint8 ``(height, width, 3)``).
        skipped: Members of ``ids`` that could not be read; their samples are padding too.
        tree: Structure that holds ``tensors``, if samples are a user's own: numbers, words and lists
            (`upriver.protocol.tree`), a list with one entry for each of ``ids``, or a whole batch; None
            elsewhere.
    """

    ids: tuple[int, ...]
    position: int
    tensors: tuple[torch.Tensor, ...]
    skipped: tuple[int, ...] = ()
    tree: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """Seconds of one micro-batch, by phase and by stage.

    Attributes:
        phases: ``receive``, ``queue``, ``read``, ``input``, ``weights``, ``forward``, ``encode`` to seconds.
            ``weights`` is a stage's wait for weights in flight. ``receive`` is the time from the first byte
            of a request to its last. It counts with the request's first micro-batch, if its inputs are sent
            along, and keeps no worker busy. Micro-batches that were computed together share their times.
        stages: Position after a stage to the seconds of that stage (input stages have positions <= 0).
        expected_wait_s: Seconds that another micro-batch of the same tenant would wait there for other
            requests.
        k: Factor by which stages are slower there now than at best; at least 1.
    """

    phases: Mapping[str, float] = field(default_factory=dict)
    stages: Mapping[int, float] = field(default_factory=dict)
    expected_wait_s: float = 0.0
    k: float = 1.0


# ------------------------------------------------------------------------------------ profiles


@dataclass(frozen=True, kw_only=True, slots=True)
class StageProfile:
    """Cost of one stage.

    Attributes:
        out_bytes: Bytes per sample that cross a cut right after this stage.
        param_bytes: Parameters and buffers that the stage reads.
        flops: Floating-point operations per sample.
        seconds: Resource (``storage``, ``compute``) to (fixed per call, per sample).
        peak_bytes: Activations alive at once while the stage runs, per sample.
    """

    name: str
    kind: str
    out_bytes: Bytes
    param_bytes: Bytes = 0.0
    flops: Flops = 0.0
    seconds: Mapping[str, tuple[Seconds, Seconds]] = field(default_factory=dict)
    peak_bytes: Bytes = 0.0

    def __post_init__(self) -> None:
        _check_numbers(f"stages[{self.name}]", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class InputProfile:
    """Sizes of one sample before the first model stage: as stored, and as the model's input tensor."""

    stored_bytes: Bytes
    tensor_bytes: Bytes

    def __post_init__(self) -> None:
        _check_numbers("input", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class TailProfile:
    """Cost of the trainable rest: forward, backward and optimizer step on the compute tier.

    Attributes:
        seconds: (fixed per training batch, per sample).
        peak_bytes: Saved activations and workspace, per sample.
    """

    seconds: tuple[Seconds, Seconds] = (0.0, 0.0)
    param_bytes: Bytes = 0.0
    peak_bytes: Bytes = 0.0

    def __post_init__(self) -> None:
        _check_numbers("tail", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Profile of a chain: its stages and their costs on each tier.

    Attributes:
        stages: Model stages; ``stages[k - 1]`` is stage ``k``.
        freeze: The freeze point, the largest cut that training allows.
        input_stages: Stages before the model; ``input_stages[-1]`` ends at position 0.
        model_load_s: Tier to the seconds of loading the model there.
    """

    model: str
    freeze: int
    input: InputProfile
    stages: tuple[StageProfile, ...]
    tail: TailProfile = field(default_factory=TailProfile)
    input_stages: tuple[StageProfile, ...] = ()
    model_load_s: Mapping[str, Seconds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_numbers("", self)
        if not 0 <= self.freeze <= len(self.stages):
            raise ConfigError(f"freeze must lie in 0..{len(self.stages)}, got {self.freeze}")

    @property
    def unsplit(self) -> int:
        """Smallest cut: the stored bytes cross, and nothing is pushed down."""
        return -len(self.input_stages)

    def stage(self, position: int) -> StageProfile:
        """Return the stage that ends at ``position`` (input stages end at positions <= 0)."""
        if position > 0:
            return self.stages[position - 1]
        return self.input_stages[len(self.input_stages) - 1 + position]

    def cut_bytes(self, cut: int) -> float:
        """Return the bytes per sample that cross ``cut``."""
        return self.input.stored_bytes if cut == self.unsplit else self.stage(cut).out_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Network path between the storage tier and the compute tier.

    Attributes:
        bandwidth_bytes_per_s: Bandwidth in the direction of samples: to the compute tier in training, up from
            a device in inference.
        download_bytes_per_s: Bandwidth down to such a device; None if the download is free.
    """

    bandwidth_bytes_per_s: Bandwidth
    rtt_s: Seconds = 0.0
    download_bytes_per_s: Bandwidth | None = None

    def __post_init__(self) -> None:
        _check_numbers("link", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageTier:
    """The near-data servers as one resource.

    Attributes:
        concurrency: Requests that run at once.
        load: Factor on compute seconds, 1.0 when idle.
        seconds_per_byte: Phase (``read``, ``move``, ``encode``, ``decode``) to seconds per byte.
        reuse_model: True if a model stays loaded between requests.
        request_samples: Samples of a request (128: HAPI 2025, section 5.1).
        wait_s: Seconds that a single request would wait there for others.
    """

    memory_bytes: Memory = math.inf
    concurrency: Count = 1
    micro_batch: Count = DEFAULT_MICRO_BATCH
    load: Factor = 1.0
    seconds_per_byte: Mapping[str, Seconds] = field(default_factory=dict)
    reuse_model: bool = True
    request_samples: Count = 128
    wait_s: Seconds = 0.0

    def __post_init__(self) -> None:
        _check_numbers("storage", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeTier:
    """The training node, or the device that sends inference requests.

    Attributes:
        micro_batch: Samples that the frozen stages see at once here. With None the training batch determines
            the memory, as in the papers.
        concurrency: Micro-batches whose input stages run at once, each on a core.
        seconds_per_byte: Phase (``decode``, ``move``, ``encode``) to seconds per byte.
    """

    memory_bytes: Memory = math.inf
    micro_batch: Count | None = None
    concurrency: Count = 1
    seconds_per_byte: Mapping[str, Seconds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_numbers("compute", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Link and both tiers, with memory, concurrency and load.

    Attributes:
        stream: Time at which a response leaves the storage tier. ``micro_batch``: each micro-batch as soon as
            it is ready. ``request``: after the whole request, as in HAPI. ``synchronous``: after the whole
            training batch, with no other work meanwhile.
    """

    link: Link
    storage: StorageTier = field(default_factory=StorageTier)
    compute: ComputeTier = field(default_factory=ComputeTier)
    stream: str = "micro_batch"

    def __post_init__(self) -> None:
        if self.stream not in STREAMS:
            raise ConfigError(f"stream must be one of {', '.join(STREAMS)}, got {self.stream!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Work of a job: training batch and samples an epoch."""

    batch_size: int
    num_samples: int

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_samples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


# ------------------------------------------------------------------------------------ decisions


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Stages [start, stop) of the chain, as positions, on one tier."""

    tier: Tier
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Stretches of the chain and their tiers, for a share of the samples."""

    segments: tuple[Segment, ...]
    share: float = 1.0

    @property
    def cut(self) -> int:
        """Position at which samples change tiers; their start if one tier runs the whole chain."""
        first = self.segments[0]
        alone = len(self.segments) == 1
        return first.start if alone and first.tier is not Tier.STORAGE else first.stop


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Predicted seconds and bytes of one epoch, by resource.

    Attributes:
        epoch_s: The whole epoch; less than the sum of the three, since they overlap.
        storage_s: Seconds for which the storage tier is busy.
        network_s: Seconds for which the link is busy.
        compute_s: Seconds for which the compute tier is busy.
        bytes: Bytes that cross the link.
    """

    epoch_s: float
    storage_s: float
    network_s: float
    compute_s: float
    bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CutRow:
    """Row of a plan's table: the cost of an epoch at one cut.

    Attributes:
        name: Stage right before the cut.
        bytes_per_sample: Bytes that cross the link for one sample.
        cost: Predicted for every cut, even one that does not fit, so that a table shows the gain from more
            memory.
        feasible: True if it fits both tiers' memory and may be used.
        why_not: Reason if infeasible; else empty.
    """

    cut: int
    name: str
    feasible: bool
    why_not: str
    bytes_per_sample: float
    cost: Cost


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A decision, as data. Later layers do not decide again.

    Attributes:
        policy: Name of the deciding policy.
        feasible: False if the policy's choice does not fit; ``why`` then says which memory is short.
        predicted: Cost of the plan under the shared cost model; None if infeasible.
        table: All considered cuts.
        why: A sentence or two that a person can check against the table.
        unit: Unit of the times: an ``epoch``, or one ``request``.
    """

    policy: str
    feasible: bool
    routes: tuple[Route, ...]
    predicted: Cost | None
    table: Sequence[CutRow]
    why: str
    unit: str = "epoch"

    @property
    def cut(self) -> int:
        """Cut of the route with the largest share."""
        return max(self.routes, key=lambda route: route.share).cut

    def __str__(self) -> str:
        """Format the table of cuts with a ``>`` at the choice, then the misfits and the reason."""
        header = ["", "cut", "after", "B/sample", f"B/{self.unit}"]
        header += ["storage s", "network s", "compute s", f"{self.unit} s"]
        table = aligned(header, [self._cells(row) for row in self.table], left=frozenset({0, 2}))
        misfits = [f"x cut {row.cut}: {row.why_not}" for row in self.table if not row.feasible]
        notes = "\n".join(wrapped(note) for note in (*misfits, f"{self.policy}: {self.why}"))
        return f"{table}\n\n{notes}" if self.table else notes

    def _cells(self, row: CutRow) -> list[str]:
        mark = ">" if self.feasible and row.cut in {route.cut for route in self.routes} else ""
        sizes = (row.bytes_per_sample, row.cost.bytes)
        times = (row.cost.storage_s, row.cost.network_s, row.cost.compute_s, row.cost.epoch_s)
        cells = [mark if row.feasible else "x", str(row.cut), shortened(row.name, 22)]
        return [*cells, *map(bytes_text, sizes), *map(seconds_text, times)]
