"""Define the messages between the front and a worker; both have one version, so these are not protocol."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from upriver.protocol import Caps
from upriver.protocol.messages import Bytes, Index, Seconds

Runs: TypeAlias = tuple[tuple[int, int], ...]


class FromFront(msgspec.Struct, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A message from the front; each subclass is one that a worker accepts."""


class FromWorker(msgspec.Struct, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A message from a worker; each subclass is one that the front accepts."""


# ------------------------------------------------------------------------------- from the front


class Setup(FromFront):
    """Configure a worker; the first message of all.

    Attributes:
        memory_bytes: Memory for all requests. No declaration of a program may exceed it.
        allow: Installed code that it may run; none if empty.
    """

    threads: int
    device: str
    caps: Caps
    memory_bytes: int
    allow: tuple[str, ...] = ()


class MapSlot(FromFront):
    """Map the memory that comes with this message."""

    slot: int
    nbytes: int


class Forget(FromFront):
    """Unmap slots and unload programs."""

    slots: tuple[int, ...] = ()
    programs: tuple[str, ...] = ()


class LatencyModels(FromFront):
    """Predict the stages of each program that is loaded later; has no answer.

    Attributes:
        text: Latency models of this device, as JSON.
    """

    text: bytes


class LoadProgram(FromFront):
    """Load the graph and the weights that come with this message; answered by `Loaded` or `Failed`.

    The program is ``key`` from then on. Another key is another program, even with the same digest.

    Attributes:
        coming: Whether weights still arrive behind their header: `NeedWeights` asks for some.
    """

    key: str
    digest: str
    graph_nbytes: int
    weights_nbytes: int
    coming: bool = False


class Run(FromFront):
    """Take one micro-batch from ``start`` to ``stop``.

    Its input lies in ``slot``: the stored bytes of each sample at ``blobs`` (offset, size), or the payload of
    a data frame with that ``header``. The worker answers with a `NeedRoom` for each image that is larger than
    all before it, one `NeedSlot` for each frame that `Done` has no room for, and then `Done`; or with
    `Failed`.

    Attributes:
        program: Key of a loaded program.
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
        """Most data frames of the answer."""
        return max(1, -(-len(self.ids) // self.rows))


class RunCode(FromFront):
    """Make the samples of one micro-batch with the user's own code, which is installed here.

    If ``start`` says so, their stored values lie in ``slot``: the payload of a data frame with that
    ``header``. The worker answers with `NeedSlot` and then `Done`, or with `Failed`.

    Attributes:
        name: Callable that makes the dataset, ``package.module:callable``.
        arguments: Its keyword arguments, as JSON.
        collate: Callable that makes a batch of the samples; empty if they stay apart.
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


class Measure(FromFront):
    """Run model stages [0, stop) once on made-up inputs; answered by `StageMeasurements` or `Failed`."""

    program: str
    stop: int | None


class Describe(FromFront):
    """Ask for the manifest of a loaded program's weights; answered by `Described` or `Failed`."""

    program: str


class Weigh(FromFront):
    """Compute the footprint of stages [start, stop) from the graph that comes with this message alone.

    Answered by `Weighed` or `Failed`.
    """

    key: str
    graph_nbytes: int
    start: int
    stop: int


NO_SLOT = 0
"""Replaces a slot's number if there is no memory for the answer now."""


class UseSlot(FromFront):
    """Write the answer to this slot; `NO_SLOT` refuses it."""

    slot: int


class Room(FromFront):
    """Grant or refuse the memory that `NeedRoom` asked for."""

    granted: bool


class Here(FromFront):
    """Report that the weights of `NeedWeights` are here, or will not be.

    Attributes:
        whole: Whether all of the program's weights are here.
        error: An `upriver.protocol.error_body`; empty without an error.
    """

    whole: bool
    error: dict[str, Any] = msgspec.field(default_factory=dict)


# ----------------------------------------------------------------------------------- from a worker


class Hello(FromWorker):
    """Report that the worker is ready.

    Attributes:
        network: True if the network could not be cut off.
        sandbox: Sandbox that the worker runs in.
        resident_bytes: Bytes of the process after its warm-up, before any job.
    """

    fingerprint: dict[str, str]
    network: bool
    sandbox: str = "none"
    resident_bytes: int = 0


class Loaded(FromWorker):
    """Report that the program is loaded.

    Attributes:
        predicted_s: Seconds of each stage on the idle device; empty where there are no models.
        micro_batch: Micro-batch for which they hold.
    """

    predicted_s: tuple[Seconds, ...] = ()
    micro_batch: int = 0


class NeedSlot(FromWorker):
    """Ask for a slot for an answer of this many bytes."""

    nbytes: int


class NeedRoom(FromWorker):
    """Ask for the bytes that the next image needs beyond `footprint.DECODING_BYTES`."""

    nbytes: int


class NeedWeights(FromWorker):
    """Ask for the weights that the next stage reads, by their numbers in the program's graph.

    Sent during a `Run` or a `Measure`.
    """

    weights: tuple[int, ...]


SMALL_BYTES = 64 << 10
"""Most bytes of payloads that travel with `Done`: asking for a slot takes longer than a copy."""


class Done(FromWorker):
    """Answer with data frames, a head and a payload each; None for a payload that lies in the next slot."""

    frames: tuple[tuple[bytes, bytes | None], ...]
    phases: dict[str, Seconds]
    stages: dict[int, Seconds]


class Described(FromWorker):
    """Hold a manifest of `upriver.coldstart.format.manifest` without its ETag; empty if there can be none."""

    manifest: bytes


class StageMeasurements(FromWorker):
    """Report the seconds and peak bytes per sample of each stage, in order."""

    micro_batch: int
    names: tuple[str, ...]
    seconds: tuple[Seconds, ...]
    peak_bytes: tuple[Bytes, ...]


class Weighed(FromWorker):
    """Report the footprint of a stage range for one micro-batch.

    Attributes:
        peak_bytes: Bytes while it runs, with its inputs and outputs.
        out_bytes: Bytes of its outputs.
        constant_bytes: Bytes that loading the program makes in each worker besides its weights.
        rows: Whether each tensor that crosses at its end has a row for each sample.
        weights: Numbers of the weights that it reads, as runs: the first number, and one past the last.
        first: The same for its first stage.
        to_end: Whether it goes to the program's end.
    """

    peak_bytes: Index
    out_bytes: Index
    constant_bytes: Index
    rows: bool
    weights: Runs = ()
    first: Runs = ()
    to_end: bool = False


class Failed(FromWorker):
    """Report an `upriver.protocol.error_body`."""

    body: dict[str, Any]
