"""Define all messages besides tensors: requests, timings, errors, and a server's description of itself."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from upriver.errors import BadSample, CodeFailed, Overloaded, ProtocolError, UpriverError
from upriver.protocol.caps import MAX_INTEGER, MAX_MICRO_BATCH, VERSION, Caps
from upriver.store.names import MAX_NAME_BYTES
from upriver.text import last_lines, printable, said
from upriver.types import DONE, MOST_BYTES, MOST_FACTOR, MOST_SECONDS, RAW, START, Timings

PROCESS_HEADER = "Upriver-Process"
"""Header of every answer, except refusals by HTTP's limits and of malformed HTTP.

It names the answering process by a word drawn at its start. Another process may answer at the same address
next time, with other low bits."""

DIGEST_PATTERN = r"^[0-9a-f]{64}$"
"""A sha256 in hex: the only way to name a program or a dataset."""

STORE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""Names of stores. Only the operator's configuration maps a name to a URI."""

_TO_THE_END = ("$", r"\Z")
"""Replacement of ``$``, which in Python also matches before a final newline."""

Digest = Annotated[str, msgspec.Meta(pattern=DIGEST_PATTERN.replace(*_TO_THE_END))]
StoreName = Annotated[str, msgspec.Meta(pattern=STORE_PATTERN.replace(*_TO_THE_END))]
Index = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]
Position = Annotated[int, msgspec.Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

Label = Annotated[str, msgspec.Meta(max_length=256, pattern=r"^[ -~]*\Z")]
"""A peer's name for something, safe to print: without characters that control a terminal."""

MAX_LARGER = 8
"""Larger programs in a request: eight doublings."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]
Bytes = Annotated[float, msgspec.Meta(ge=0, le=MOST_BYTES)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Factor = Annotated[float, msgspec.Meta(ge=1, le=MOST_FACTOR)]

_T = TypeVar("_T")


class DatasetRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A dataset in one of the server's stores; the operator decides its place in the store.

    Attributes:
        store: Name of the store in the server's configuration.
        digest: SHA-256 of the dataset, in hex.
    """

    store: StoreName
    digest: Digest


_NAME_PATTERN = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"

CODE_PATTERN = f"^{_NAME_PATTERN}:{_NAME_PATTERN}$"
"""``package.module:callable``."""

CodeName = Annotated[str, msgspec.Meta(pattern=CODE_PATTERN.replace(*_TO_THE_END), max_length=512)]

MAX_ARGUMENT_BYTES = 64 << 10
"""Bytes of the arguments of a dataset's code, as JSON."""

BY_DEFAULT = "default"
"""Name of PyTorch's own way to collate."""

CollateName = Annotated[
    str, msgspec.Meta(pattern=rf"^({BY_DEFAULT}|{_NAME_PATTERN}:{_NAME_PATTERN})\Z", max_length=512)
]


class Collate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rule that makes batches of samples.

    Attributes:
        name: ``package.module:callable``, or ``default`` for PyTorch's own collating.
        batches: Number of each batch in its epoch, one for each entry of ``micro_batches``.
    """

    name: CollateName
    batches: tuple[Index, ...]


class CodeRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A dataset that is code, installed on the worker and allowed there by name. No code is sent.

    Attributes:
        name: Callable that makes the dataset, ``package.module:callable``.
        arguments: Its keyword arguments: at most 64 KiB as JSON.
        collate: Makes each micro-batch a batch of its own; None leaves samples uncollated.
    """

    name: CodeName
    arguments: dict[str, Any] = {}
    collate: Collate | None = None


class Larger(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request's program captured for more samples at once.

    Attributes:
        program: Digest of that program.
        micro_batch: A multiple of the request's micro-batch.
    """

    program: Digest
    micro_batch: Annotated[int, msgspec.Meta(ge=1, le=MAX_MICRO_BATCH)]


class RunRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Run stages [start, stop) of a chain on these inputs.

    With a ``dataset`` the inputs are its samples, and ``start`` is the start of its chain. Without one,
    ``start`` is at least 0. The body then continues after this frame with one data frame for each entry of
    ``micro_batches``, with the same ids, at position ``start``. The same holds for a dataset whose samples
    are ``given``: these stand before the end of its chain, with one tensor each. In all cases the answer has
    one data frame and one stats frame for each entry, in order.

    Attributes:
        program: Digest of the program; required when ``stop`` or ``start`` is above 0.
        micro_batches: Sample ids, at most ``micro_batch`` in each.
        start: Position of the inputs.
        stop: Position of the answers.
        micro_batch: Largest number of samples in a micro-batch.
        dataset: Dataset in a store of the server.
        seed: Seed of random input stages.
        epoch: Epoch of random input stages, from 0.
        given: Whether samples of the dataset are sent along instead of read by the server.
        on_bad_sample: ``fail`` ends the answer with an error; ``skip`` pads the row and lists the id as
            skipped, but not for code.
        deadline_s: Seconds after which the server breaks off the answer. The server may have a shorter limit
            of its own.
        code: Dataset made by a worker's own code, instead of one in a store. ``start`` is then -2 (`START`)
            where the code also reads its samples, or -1 (`RAW`) where the read samples are sent along, one
            tree for each micro-batch. ``stop`` is 0. Answers are trees.
        larger: Programs that the server may use instead, to run several micro-batches at once. The answer is
            the same except for low bits, and is still divided by ``micro_batch``.
        keep: Whether the server may keep the rows of the answer in the tenant's folder of the store, and
            answer from rows that it kept before.
        protocol: Version of the protocol; another one is refused.
    """

    micro_batches: tuple[tuple[Index, ...], ...]
    start: Position
    stop: Position
    micro_batch: Annotated[int, msgspec.Meta(ge=1, le=MAX_MICRO_BATCH)]
    program: Digest | None = None
    dataset: DatasetRef | None = None
    seed: Seed = 0
    epoch: Seed = 0
    on_bad_sample: Literal["fail", "skip"] = "fail"
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=86400)] | None = None
    larger: Annotated[tuple[Larger, ...], msgspec.Meta(max_length=MAX_LARGER)] = ()
    code: CodeRef | None = None
    given: bool = False
    keep: bool = False
    protocol: int = VERSION

    @property
    def sent(self) -> bool:
        """Return whether the inputs are sent along with the request."""
        return self.given or (self.dataset is None and (self.code is None or self.start == RAW))

    def check(self, caps: Caps) -> None:
        """Check the fields against each other.

        Raises:
            ProtocolError: If the fields contradict each other or exceed ``caps``.
        """
        check_version(self.protocol)
        if self.stop < self.start:
            raise ProtocolError(f"stop must be at least start, got [{self.start}, {self.stop})")
        if self.code is not None:
            self._check_code(self.code)
        elif self.given and (self.dataset is None or self.start >= 0):
            raise ProtocolError(
                f"given samples belong to a dataset, before the end of its chain; got start {self.start}"
                + ("" if self.dataset is not None else " and no dataset")
            )
        elif self.dataset is None and self.start < 0:
            raise ProtocolError(f"start must be at least 0 without a dataset, got {self.start}")
        if self.program is None and self.stop > 0 and self.stop > self.start:
            raise ProtocolError(f"stages up to {self.stop} need a program, got none")
        if not 1 <= len(self.micro_batches) <= caps.micro_batches:
            raise ProtocolError(
                f"a request has 1 to {caps.micro_batches} micro-batches, got {len(self.micro_batches)}"
            )
        for ids in self.micro_batches:
            if not 1 <= len(ids) <= self.micro_batch:
                raise ProtocolError(f"a micro-batch has 1 to {self.micro_batch} samples, got {len(ids)}")
        if self.code is None and self.micro_batch > caps.tensors:  # before the model, each sample is a tensor
            raise ProtocolError(f"micro_batch must be at most {caps.tensors}, got {self.micro_batch}")
        if self.keep and self.stop == self.start:
            raise ProtocolError(f"rows are kept after a stage, got keep with stop at start {self.start}")
        if self.keep and (self.dataset is None or self.given or self.larger):
            raise ProtocolError(
                "only rows of samples that the server reads are kept, without larger programs; got keep with "
                + (
                    "no dataset"
                    if self.dataset is None
                    else "given samples"
                    if self.given
                    else "larger programs"
                )
            )
        self._check_larger()
        total = sum(len(ids) for ids in self.micro_batches)
        if total > caps.samples:
            raise ProtocolError(f"a request has at most {caps.samples} samples, got {total}")

    def _check_code(self, code: CodeRef) -> None:
        if self.dataset is not None or self.program is not None or self.given:
            raise ProtocolError("a request names code, or a dataset in a store and a program, not both")
        if self.larger or self.on_bad_sample != "fail":
            raise ProtocolError(
                "code has no larger programs, and a sample that it cannot make is never skipped"
            )
        if self.start not in (START, RAW) or self.stop != DONE:
            raise ProtocolError(
                f"code runs from {START}, or {RAW} where what was read is sent along, to {DONE}; "
                f"got [{self.start}, {self.stop})"
            )
        if len(msgspec.json.encode(code.arguments)) > MAX_ARGUMENT_BYTES:
            raise ProtocolError(f"the arguments of code have at most {MAX_ARGUMENT_BYTES} bytes as JSON")
        if code.collate is not None and len(code.collate.batches) != len(self.micro_batches):
            raise ProtocolError(
                f"each of {len(self.micro_batches)} batches has a number, got {len(code.collate.batches)}"
            )

    def _check_larger(self) -> None:
        sizes = [self.micro_batch, *(larger.micro_batch for larger in self.larger)]
        if any(size % self.micro_batch for size in sizes) or sorted(set(sizes)) != sizes:
            raise ProtocolError(
                f"larger programs take ascending multiples of micro_batch {self.micro_batch}, got {sizes[1:]}"
            )


class FeaturesFound(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer to a question about kept rows (``POST /v1/features``).

    Attributes:
        ids: Samples whose rows the server kept, in the order of the request.
        why_not: Reason why the server keeps no further rows now; empty while it does.
        protocol: Version of the protocol.
    """

    ids: tuple[Index, ...]
    why_not: str = ""
    protocol: int = VERSION


class Info(msgspec.Struct, frozen=True, kw_only=True):
    """A server's description of itself (``GET /v1/info``).

    Attributes:
        version: Version of the package.
        fingerprint: Facts that decide the server's low bits.
        stores: Names of its stores; never their URIs.
        micro_batch: Suggested size for a job that has measured nothing.
        caps: Limits of its frames and requests.
        device: Its device; the first of several.
        devices: Number of its devices.
        workers: Number of workers on all devices.
        threads: Threads with which each worker computes.
        worker_network: True if workers could not be cut off from the network, or need not be.
        allow: Names of packages, modules and callables on the server that clients may run.
        admits: Requests of the asking tenant that may compute at once.
        protocol: Version of the protocol.
    """

    version: Label
    fingerprint: dict[Label, Label]
    stores: tuple[Label, ...]
    micro_batch: int
    caps: Caps
    device: Label
    workers: int
    threads: int
    devices: int = 1
    worker_network: bool = False
    allow: tuple[str, ...] = ()
    admits: int = 8
    protocol: int = VERSION


KEPT = "kept"
"""Phase of a micro-batch that was answered from kept rows, with nothing computed."""


class StatsHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Header of a stats frame: the `Timings` of one micro-batch.

    Attributes:
        phases: Seconds of each phase, by its name.
        stages: Seconds of each stage, by the position at which it ends.
        expected_wait_s: Seconds that one more micro-batch of the tenant would wait.
        k: Present slowdown of stages relative to their best times.
    """

    phases: dict[Label, float]
    stages: dict[int, float]
    expected_wait_s: Seconds = 0.0
    k: Factor = 1.0

    def timings(self) -> Timings:
        """Return the header as `Timings`.

        Raises:
            ProtocolError: If a time is negative or implausibly large, or a number is not finite.
        """
        for name, seconds in [*self.phases.items(), *self.stages.items()]:
            if not 0 <= seconds <= MOST_SECONDS:
                raise ProtocolError(f"seconds of {name!r} must be in 0..{MOST_SECONDS}, got {seconds}")
        for name, value in (("expected_wait_s", self.expected_wait_s), ("k", self.k)):
            if not math.isfinite(value):
                raise ProtocolError(f"{name} must be finite, got {value}")
        return Timings(phases=self.phases, stages=self.stages, expected_wait_s=self.expected_wait_s, k=self.k)


# ------------------------------------------------------------------------- what a server measures


MAX_REPEATS = 9
"""Counted runs of each program in one profile: the median of nine survives four disturbed ones."""

MAX_SIZES = 4
"""Programs in one profile: two separate fixed costs from those per sample, two more show whether a line
fits."""


class ProfileRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measure model stages [0, stop) on the server that answers (``POST /v1/profile``).

    Attributes:
        programs: Digests of one network captured at different sizes of micro-batch. A program runs at one
            size; a single size shows no fixed costs.
        stop: Stage to stop at; the end of the programs if None.
        repeats: Counted runs of each program, after warm-up runs.
        protocol: Version of the protocol; another one is refused.
    """

    programs: Annotated[tuple[Digest, ...], msgspec.Meta(min_length=1, max_length=MAX_SIZES)]
    stop: Index | None = None
    repeats: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPEATS)] = 5
    protocol: int = VERSION


class StageCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cost of one model stage on a server.

    Attributes:
        position: End of the stage.
        seconds: Seconds (fixed per call, per sample); the first is 0 where one size was measured.
        peak_bytes: Bytes of activations alive at once, per sample, as the program states; None where it does
            not.
    """

    position: Index
    seconds: tuple[Seconds, Seconds]
    peak_bytes: Bytes | None = None


class StageCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer to a `ProfileRequest`.

    Attributes:
        device: Device that was measured.
        threads: Threads of the worker that computed.
        micro_batches: Measured sizes in samples, one for each program.
        repeats: Counted runs of each program: fewer than requested where time ran out.
        version: Version of the package on the server.
        fingerprint: Facts that decide the server's low bits, versions included.
        stages: Cost of each stage, in order.
        protocol: Version of the protocol.
    """

    device: Label
    threads: int
    version: Label
    fingerprint: dict[Label, Label]
    micro_batches: tuple[int, ...]
    repeats: int
    stages: tuple[StageCost, ...]
    protocol: int = VERSION


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Load of a server over the last seconds (``GET /v1/load``).

    Attributes:
        window_s: Length of the window in seconds.
        utilisation: Share of the workers' time spent on jobs, 0 to 1.
        running: Requests in progress.
        queue: Micro-batches that wait for a worker.
        expected_wait_s: Seconds that one more micro-batch of the asking tenant would wait for a worker.
        k: Present slowdown of stages relative to their best times; at least 1.
        workers: The same factor for each worker.
        waiting: Requests that wait for memory.
        waiting_bytes: Bytes of memory that those requests need.
        reserved_bytes: Bytes of memory that are reserved.
        budget_bytes: Bytes of memory that can be reserved.
        draining: Whether the server accepts no further requests.
        machine: Busy share of the server's cores or accelerators over the last seconds, by all processes
            together; 0 where unknown.
        protocol: Version of the protocol.
    """

    window_s: Seconds
    utilisation: Share
    running: Index
    queue: Index
    expected_wait_s: Seconds
    k: Factor
    workers: tuple[Factor, ...]
    waiting: Index = 0
    waiting_bytes: Index = 0
    reserved_bytes: Index = 0
    budget_bytes: Index = 0
    draining: bool = False
    machine: Share = 0.0
    protocol: int = VERSION


class Uploaded(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a probe of the link to the server (``POST /v1/probe``).

    Attributes:
        bytes: Size of the body in bytes.
        seconds: Seconds from its first byte to its last as they arrived; 0 where all arrived at once.
    """

    bytes: Index
    seconds: Seconds


# ------------------------------------------------------------------------------------------ reading


def check_version(got: int) -> None:
    """Refuse another protocol version with a message that names both.

    Raises:
        ProtocolError: If ``got`` is not ours.
    """
    if got != VERSION:
        raise ProtocolError(
            f"this side speaks protocol version {VERSION}, the other side {got}: upgrade the older one"
        )


def decode_json(data: bytes | memoryview, kind: type[_T], what: str) -> _T:
    """Decode JSON as an object of type ``kind``.

    Raises:
        ProtocolError: If ``data`` is not JSON, or not of that form.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{what}: {said(str(error))}") from None


def decode_info(data: bytes) -> Info:
    """Decode a server's ``/v1/info`` answer.

    Raises:
        ProtocolError: If it has another version (checked first, as the rest may have another form) or is
            malformed.
    """
    return decode_versioned(data, Info, "info")


def decode_versioned(data: bytes, kind: type[_T], what: str) -> _T:
    """Decode an answer. Its version is checked before the rest, which may have another form.

    Raises:
        ProtocolError: If it has another version, or is malformed.
    """
    check_version(decode_json(data, _Versioned, what).protocol)
    return decode_json(data, kind, what)


class _Versioned(msgspec.Struct):
    protocol: int


# ------------------------------------------------------------------------------------------- errors


def error_body(error: UpriverError) -> dict[str, dict[str, Any]]:
    """Return the JSON form of an error: ``{"error": {"code", "message", ...}}``."""
    body: dict[str, Any] = {"code": error.code, "message": str(error)}
    if isinstance(error, BadSample):
        body |= {"sample": error.sample, "object": error.object_name, "reason": error.reason}
    if isinstance(error, CodeFailed) and error.trace:
        body["traceback"] = error.trace
    if isinstance(error, Overloaded):
        body["retry_after_s"] = error.retry_after_s
    return {"error": body}


def error_from(body: Mapping[str, Any]) -> UpriverError:
    """Return the error that `error_body` described, as an instance of its own class.

    An unknown code gives an `UpriverError` with that code. A body of another form gives a `ProtocolError`.
    """
    try:
        fields = msgspec.convert(body, _ErrorBody).error
    except msgspec.ValidationError as unknown:
        return ProtocolError(f"an error of unknown form: {said(str(unknown))}")
    message, code = said(fields.message, MESSAGE_CHARS), printable(fields.code, CODE_CHARS)
    if code == BadSample.code:
        name = printable(fields.object, MAX_NAME_BYTES)
        return BadSample(sample=fields.sample, object_name=name, reason=said(fields.reason))
    if code == CodeFailed.code:
        return CodeFailed(message, trace=last_lines(fields.traceback, TRACE_CHARS))
    known = {
        kind.code: kind for kind in reversed([*_kinds(UpriverError)])
    }  # of kinds with one code, the widest
    found = known.get(code, UpriverError)
    if issubclass(found, Overloaded):
        return found(message, retry_after_s=fields.retry_after_s)
    error = found(message)
    error.code = code
    return error


MESSAGE_CHARS = 2000
"""Longest message kept of another side's error: one that names an object of up to 1024 bytes, and says
more."""

TRACE_CHARS = 8000
"""Longest traceback of a user's own code, some 50 frames: the outer, calling frames are dropped."""

CODE_CHARS = 64
"""Longest code kept: our codes have at most 20 characters."""


class _ErrorFields(msgspec.Struct):
    code: str
    message: str
    sample: int = -1
    object: str = ""
    reason: str = ""
    traceback: str = ""
    retry_after_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 1.0


class _ErrorBody(msgspec.Struct):
    error: _ErrorFields


def _kinds(root: type[UpriverError]) -> Iterator[type[UpriverError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _kinds(kind)


def valid_digest(text: str) -> bool:
    """Return whether ``text`` is a sha256 in hex."""
    return re.fullmatch(DIGEST_PATTERN.strip("^$"), text) is not None


def valid_store_name(text: str) -> bool:
    """Return whether ``text`` may name a store."""
    return re.fullmatch(STORE_PATTERN.strip("^$"), text) is not None
