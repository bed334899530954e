"""What the front and a worker say to each other: both of one version, so no part of the protocol."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from upriver.protocol import Caps

Runs: TypeAlias = tuple[tuple[int, int], ...]


class _Message(msgspec.Struct, kw_only=True, tag=True, forbid_unknown_fields=True):
    pass


# ------------------------------------------------------------------------------- from the front


class Setup(_Message):
    """First of all.

    Attributes:
        memory_bytes: What may be admitted at once: nothing that a program declares may take more.
        allow: Which code of its own it may run; none if empty.
    """

    threads: int
    device: str
    caps: Caps
    memory_bytes: int
    allow: tuple[str, ...] = ()


class MapSlot(_Message):
    """Map the memory that comes with this message."""

    slot: int
    nbytes: int


class Forget(_Message):
    """Unmap slots, unload programs."""

    slots: tuple[int, ...] = ()
    programs: tuple[str, ...] = ()


class LoadProgram(_Message):
    """Load the graph and the weights that come with this message; answered by `Loaded` or `Failed`.

    It is ``key`` from then on: whoever has another key has another program, be it of the same digest.

    Attributes:
        coming: Whether weights are still being filled in behind their header: `NeedWeights` asks for some.
    """

    key: str
    digest: str
    graph_nbytes: int
    weights_nbytes: int
    coming: bool = False


class Run(_Message):
    """Take one micro-batch from ``start`` to ``stop``.

    Its input lies in ``slot``: the stored bytes of each sample at ``blobs`` (offset, size), or the payload of
    a data frame with that ``header``. Answered by a `NeedRoom` for each image that is larger than all before
    it, one `NeedSlot` for each frame that `Done` has no room for and then `Done`, or by `Failed`.

    Attributes:
        program: Key of a program that was loaded.
        rows: Rows of each data frame of the answer; ``micro_batch`` is a multiple of it.
    """

    program: str | None
    micro_batch: int
    rows: int
    start: int
    stop: int
    ids: tuple[int, ...]
    slot: int
    chain: bytes = b""
    object_names: tuple[str, ...] = ()
    blobs: tuple[tuple[int, int], ...] = ()
    header: bytes = b""
    payload_nbytes: int = 0
    seed: int = 0
    epoch: int = 0
    on_bad_sample: Literal["fail", "skip"] = "fail"

    @property
    def frames(self) -> int:
        """Data frames of the answer, at most."""
        return max(1, -(-len(self.ids) // self.rows))


class RunCode(_Message):
    """Make the samples of one micro-batch with the user's own code, which is here.

    What was read of them lies in ``slot`` where ``start`` says so: the payload of a data frame with that
    ``header``. Answered by `NeedSlot` and then `Done`, or by `Failed`.

    Attributes:
        name: What makes the dataset, ``package.module:callable``.
        arguments: Its keyword arguments, as JSON.
        collate: What makes a batch of the samples; empty where they stay apart.
        batch: Number of the batch in its epoch.
    """

    name: str
    arguments: bytes
    start: int
    ids: tuple[int, ...]
    slot: int
    header: bytes = b""
    payload_nbytes: int = 0
    seed: int = 0
    epoch: int = 0
    collate: str = ""
    batch: int = 0

    @property
    def frames(self) -> int:
        """Data frames of the answer."""
        return 1


class Measure(_Message):
    """Run model stages [0, stop) once on made-up inputs; answered by `StageMeasurements` or `Failed`."""

    program: str
    stop: int | None


class Describe(_Message):
    """Say what is to lie beside a loaded program's weights; answered by `Described` or `Failed`."""

    program: str


class Weigh(_Message):
    """Work out what stages [start, stop) take, from the graph that comes with this message alone.

    Answered by `Weighed` or `Failed`.
    """

    key: str
    graph_nbytes: int
    start: int
    stop: int


NO_SLOT = 0
"""In place of a slot's number: there is no memory for the answer now."""


class UseSlot(_Message):
    """Write the answer here; `NO_SLOT` refuses it."""

    slot: int


class Room(_Message):
    """Whether there is memory for what `NeedRoom` named."""

    granted: bool


class Here(_Message):
    """What `NeedWeights` named is there, or will not be.

    Attributes:
        whole: Whether all of the program's weights are there.
        error: An `upriver.protocol.error_body`; empty where there is none.
    """

    whole: bool
    error: dict[str, Any] = msgspec.field(default_factory=dict)


FromFront = (
    Setup
    | MapSlot
    | Forget
    | LoadProgram
    | Run
    | RunCode
    | Measure
    | Describe
    | Weigh
    | UseSlot
    | Room
    | Here
)

# ----------------------------------------------------------------------------------- from a worker


class Hello(_Message):
    """Ready for work.

    Attributes:
        network: True where it could not be cut off.
        sandbox: What it is shut in by.
        resident_bytes: What the process takes before it has done anything but warm up.
    """

    fingerprint: dict[str, str]
    network: bool
    sandbox: str = "none"
    resident_bytes: int = 0


class Loaded(_Message):
    """The program is there."""


class NeedSlot(_Message):
    """The answer takes so many bytes: where to?"""

    nbytes: int


class NeedRoom(_Message):
    """Ask for the bytes that its next image takes beyond `footprint.DECODING_BYTES`."""

    nbytes: int


class NeedWeights(_Message):
    """The next stage reads these of its program's weights, by their numbers in the graph: are they there?

    Asked while a `Run` or a `Measure` is under way.
    """

    weights: tuple[int, ...]


SMALL_BYTES = 64 << 10
"""Payloads of so many bytes in all travel with `Done`: to ask for a slot takes longer than a copy."""


class Done(_Message):
    """The answer is data frames, a head and a payload each; None for a payload that lies in the next slot."""

    frames: tuple[tuple[bytes, bytes | None], ...]
    phases: dict[str, float]
    stages: dict[int, float]


class Described(_Message):
    """Hold a manifest of `upriver.coldstart.format.manifest` without its ETag; empty if there can be none."""

    manifest: bytes


class StageMeasurements(_Message):
    """Seconds and peak bytes per sample of each stage, in order."""

    micro_batch: int
    names: tuple[str, ...]
    seconds: tuple[float, ...]
    peak_bytes: tuple[float, ...]


class Weighed(_Message):
    """What a stretch takes, for one micro-batch.

    Attributes:
        peak_bytes: While it runs, with what it is given and what it gives.
        out_bytes: What it gives.
        constant_bytes: What loading the program makes, in each worker, beside its weights.
        rows: Whether everything that crosses at its end has a row for each sample.
        weights: That it reads, by their numbers in the graph: runs, each from the first to the one behind it.
        first: Those that its first stage reads.
        to_end: Whether it goes to the program's end.
    """

    peak_bytes: int
    out_bytes: int
    constant_bytes: int
    rows: bool
    weights: Runs = ()
    first: Runs = ()
    to_end: bool = False


class Failed(_Message):
    """An `upriver.protocol.error_body`."""

    body: dict[str, Any]


FromWorker = (
    Hello
    | Loaded
    | NeedSlot
    | NeedRoom
    | NeedWeights
    | Done
    | StageMeasurements
    | Described
    | Weighed
    | Failed
)
