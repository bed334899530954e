"""What the front and a worker say to each other: both of one version, so no part of the protocol."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from upriver.protocol import Caps


class _Message(msgspec.Struct, kw_only=True, tag=True, forbid_unknown_fields=True):
    pass


# ------------------------------------------------------------------------------- from the front


class Setup(_Message):
    """First of all."""

    threads: int
    device: str
    caps: Caps


class MapSlot(_Message):
    """Map the memory that comes with this message."""

    slot: int
    nbytes: int


class Forget(_Message):
    """Unmap slots, unload programs."""

    slots: tuple[int, ...] = ()
    programs: tuple[str, ...] = ()


class LoadProgram(_Message):
    """Load the graph and the weights that come with this message; answered by `Loaded` or `Failed`."""

    digest: str
    graph_nbytes: int
    weights_nbytes: int


class Run(_Message):
    """Take one micro-batch from ``start`` to ``stop``.

    Its input lies in ``slot``: the stored bytes of each sample at ``blobs`` (offset, size), or the payload of
    a data frame with that ``header``. Answered by `NeedSlot` and then `Done`, by `Done` alone where there is
    no payload, or by `Failed`.
    """

    program: str | None
    micro_batch: int
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


class Measure(_Message):
    """Run model stages [0, stop) once on made-up inputs; answered by `Measured` or `Failed`."""

    program: str
    stop: int | None


class UseSlot(_Message):
    """Write the answer here."""

    slot: int


FromFront = Setup | MapSlot | Forget | LoadProgram | Run | Measure | UseSlot

# ----------------------------------------------------------------------------------- from a worker


class Hello(_Message):
    """Ready for work; ``network`` is True where it could not be cut off."""

    fingerprint: dict[str, str]
    network: bool


class Loaded(_Message):
    """The program is there."""


class NeedSlot(_Message):
    """The answer takes so many bytes: where to?"""

    nbytes: int


class Done(_Message):
    """The answer is a data frame: ``head``, then the payload in the slot."""

    head: bytes
    phases: dict[str, float]
    stages: dict[int, float]


class Measured(_Message):
    """Seconds and peak bytes per sample of each stage, in order."""

    micro_batch: int
    names: tuple[str, ...]
    seconds: tuple[float, ...]
    peak_bytes: tuple[float, ...]


class Failed(_Message):
    """An `upriver.protocol.error_body`."""

    body: dict[str, Any]


FromWorker = Hello | Loaded | NeedSlot | Done | Measured | Failed
