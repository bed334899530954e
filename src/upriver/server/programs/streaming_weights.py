"""Stream weights into the memory that workers map, while programs run and wait for them.

A program runs before all of its weights arrived, stage by stage, as in PISeL (CIKM 2024); see
:mod:`upriver.coldstart.load_program`. Here the front reads, as workers have no network. Each tensor goes
straight to its place in the file, and a worker asks before a stage whose weights it has not seen.

Chunks are checked against the manifest before a worker reads them. The whole file is checked, as it arrives,
against the digest that the graph names. If only stages before a cut are requested, the second check never
completes.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from upriver._threads.background import BackgroundThread
from upriver.coldstart.fetch.stream_limits import StreamLimits
from upriver.coldstart.model.arrivals import Arrivals
from upriver.errors import Cancelled, ProgramError, UpriverError
from upriver.server.ipc.shared_memory import FillingFile
from upriver.text import error_text

if TYPE_CHECKING:
    from upriver.coldstart.fetch.strategy import Groupings
    from upriver.coldstart.fetch.weight_stream import WeightStream
    from upriver.coldstart.format.manifest import Manifest
    from upriver.coldstart.load_program import FoundWeights

log = logging.getLogger(__name__)

TENSOR_BYTES, CHECKSUM_BYTES, CHARACTER_BYTES = 1600, 96, 4
"""Bytes that a process keeps for a requested tensor, each of its checksums, each character of its name. They
cover its stored form, its place, its request and its history."""


GROUPING = "upriver"
"""Grouping of tensors that are requested together, from `upriver.coldstart.grouping.groups.GROUPINGS`."""


class ColdFile:
    """Hold a weights file that is partly here and partly requested.

    All methods belong to the event loop's thread unless a section below says otherwise. Methods that wait
    raise an `UpriverError` if tensors do not arrive, or if the file's digest is wrong.

    Args:
        limits: Bounds on its use of the link.
        device: Device on which programs with these weights run.
        on_forged: Called if each chunk matches the manifest but the whole file has another digest.

    Attributes:
        fd: Descriptor of the memory, which holds the file's header from the start.
        numbers: Number of each tensor in the file, by key.

    Raises:
        OSError: If this kind of memory is not available.
    """

    def __init__(
        self,
        found: FoundWeights,
        digest: str,
        limits: StreamLimits,
        *,
        device: str,
        on_forged: Callable[[], object],
    ) -> None:
        self._found, self._digest, self._limits, self._device = found, digest, limits, device
        self._tensors = found.manifest.tensors
        self._memory = FillingFile(found.manifest.nbytes)
        head = found.manifest.head()
        self._memory.room(0, len(head))[:] = head
        self.fd, self.nbytes = self._memory.fd, self._memory.nbytes
        self.numbers = {tensor.name: number for number, tensor in enumerate(self._tensors)}
        self._on_forged = on_forged
        # The last arrival is the check of the file's digest.
        self._arrivals = Arrivals(len(self._tensors) + 1)
        self._asked: set[int] = set()
        self._wanted: deque[Collection[int]] = deque()
        self._to_end = False
        self._part: _Part | None = None
        self._checking: threading.Thread | None = None
        self._groupings: Groupings = {}
        self._at_once: WeightStream | None = None
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()

    # --------------------------------------------------------------------------- from any thread

    @property
    def whole(self) -> bool:
        """Return whether all of the file is here, and its digest is right."""
        return self._arrivals.complete

    @property
    def error(self) -> UpriverError | None:
        """Return the error for which missing tensors will not arrive; a new one each time."""
        return self._arrivals.error

    def wait(self, numbers: Collection[int], *, timeout_s: float) -> bool:
        """Wait until these tensors are here, outside the event loop's thread; False after a timeout."""
        if not self._asked.issuperset(numbers):
            self._tell(lambda: self.ask(numbers))
        return self._arrivals.wait(numbers, self._hurry, timeout_s=timeout_s)

    # ------------------------------------------------------------------------- in the loop's thread

    @property
    def coming(self) -> bool:
        """Return whether requested tensors, or the check of the digest, are in progress."""
        return not self._arrivals.over and (self._part is not None or self._checking is not None)

    def ask(self, numbers: Iterable[int], *, to_end: bool = False) -> None:
        """Request these tensors.

        Args:
            to_end: Whether all others follow, so that the file can be checked against its digest.
        """
        self._wanted.append(set(numbers) - self._asked)
        self._to_end |= to_end
        if self._part is None:
            self._next()
        if self._to_end and self._checking is None:
            checking = BackgroundThread(self._check, name="cold-digest")
            try:
                checking.start()
            except UpriverError as error:
                self._give_up(UpriverError(f"{self._found.source.path} cannot be checked: {error}"))
            else:
                self._checking = checking

    async def ready(self, first: Collection[int], others: Collection[int], *, within_s: float) -> None:
        """Wait until ``first`` is here, and ``others`` will be within ``within_s`` at the link's rate.

        A request that begins now and works that long ends no later than one that began earlier, and waits
        less in between. A worker that waits for weights is not available to other requests.
        """
        for number in first:
            self._hurry(number)
        missing = list(others)
        while True:
            news = self._news
            missing = [number for number in missing if not self._arrivals.here([number])]
            left = sum(self._tensors[number].stop - self._tensors[number].start for number in missing)
            if self._arrivals.here(first) and left <= within_s * self._bytes_per_s():
                return
            await news.wait()

    async def over(self) -> None:
        """Wait until nothing is in progress."""
        while self.coming:
            await self._news.wait()
        self._arrivals.check()

    async def checked(self) -> None:
        """Wait until the digest is checked, if all of the file was requested."""
        while self._to_end and not self._arrivals.over:
            await self._news.wait()
        self._arrivals.check()

    def cancel(self) -> None:
        """Stop reading; waiting callers get an error."""
        self._give_up(Cancelled(f"the load of {self._found.source.path!r} was cancelled"))

    def join(self) -> None:
        """Wait until all its threads have ended, after `cancel`."""
        if self._part is not None:
            self._part.join()
        if self._checking is not None:
            self._checking.join()

    def _next(self) -> None:
        """Request the next wanted tensors, if any."""
        self._part = None
        numbers: set[int] = set()
        while self._wanted and not numbers:
            numbers = set(self._wanted.popleft()) - self._asked
        if not numbers and self._to_end:
            numbers = set(range(len(self._tensors))) - self._asked
        if numbers and not self._arrivals.over:
            self._asked |= numbers
            self._part = _Part(self, sorted(numbers))
            self._part.start()

    def _give_up(self, error: UpriverError) -> None:
        self.failed(error)
        if self._part is not None:
            self._part.cancel()

    def _part_is_here(self) -> None:
        self._next()
        self._wake()

    def _wake(self) -> None:
        """Wake all waiting coroutines, which check their condition again."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _bytes_per_s(self) -> float:
        stream = self._part.stream if self._part is not None else None
        link = self._found.link if stream is None else stream.measured
        return link.bandwidth_bytes_per_s

    # -------------------------------------------------------------------- in threads of its own

    def room(self, number: int) -> memoryview:
        """Return the memory of a tensor."""
        return self._memory.room(self._tensors[number].start, self._tensors[number].stop)

    def stream_of(self, numbers: Sequence[int], sink: _Part) -> WeightStream:
        """Return a stream of these tensors. Choosing their groups can take tenths of a second."""
        import torch

        from upriver.coldstart.fetch.strategy import plan_requests

        some, known = self._found.source, self._found.known
        if len(numbers) < len(self._tensors):
            some, known = replace(some, tensors=tuple(some.tensors[number] for number in numbers)), {}
        device = torch.device(self._device)
        plan = plan_requests(some, self._found.link, GROUPING, self._limits, device, known)
        stream = plan.stream(sink)
        if some is self._found.source:
            self._at_once, self._groupings = stream, plan.groupings
        return stream

    def came(self, number: int, *, last: bool) -> None:
        """Record that a tensor is here.

        Args:
            last: Whether it is the last one of its part.

        Raises:
            ProgramError: If its values are invalid for its type. A worker's own check runs before
                the values arrive.
        """
        tensor = self._tensors[number]
        room = self.room(number) if tensor.dtype == "bool" else memoryview(b"")
        if len(room) and np.frombuffer(room, np.uint8).max() > 1:
            raise ProgramError(f"weight {tensor.name!r}: a bool holds 0 or 1 only")
        self._arrivals.filled(number)
        self._tell(self._part_is_here if last else self._wake)

    def unreadable(self, error: Exception) -> None:
        """Fail because the file cannot be requested."""
        self.failed(UpriverError(f"{self._found.source.path} cannot be read: {error_text(error)}"))

    def failed(self, error: UpriverError) -> None:
        """Record that the missing tensors will not arrive."""
        self._arrivals.failed(error)
        self._tell(self._wake)

    def _hurry(self, number: int) -> None:
        if (part := self._part) is not None:
            part.hurry(number)

    def _tell(self, what: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed: no coroutine waits any more
            self._loop.call_soon_threadsafe(what)

    def _check(self) -> None:
        """Check the file's digest as it arrives, at a lower priority than threads that run stages."""
        from upriver.coldstart.incoming_weights import step_back
        from upriver.coldstart.load_handle import remember

        path = self._found.source.path
        try:
            step_back()
            found = self._folded()
            if found != self._digest:
                self._tell(self._on_forged)
                raise ProgramError(f"{path} has digest {found}, the graph names {self._digest}")
        except UpriverError as error:
            self.failed(error.with_traceback(None))
        except Exception as raised:
            log.exception("a weights file was not compared with its digest")
            self.failed(UpriverError(f"{path} was not compared with its digest: {error_text(raised)}"))
        else:
            self._memory.close()
            self._arrivals.filled(len(self._tensors))
            self._tell(self._wake)
            stream, self._at_once = self._at_once, None
            if stream is not None:
                remember(self._found.source, stream, self._groupings)

    def _folded(self) -> str:
        """Return the digest of the file, once all of it is here."""
        folded, end = hashlib.sha256(), 0
        with self._memory.room(0, self.nbytes) as data:
            for number, tensor in enumerate(self._tensors):
                self._arrivals.wait([number], _no_hurry)
                folded.update(data[end : tensor.stop])
                end = tensor.stop
            folded.update(data[end:])
        return folded.hexdigest()


def kept_bytes(manifest: Manifest) -> int:
    """Return the most bytes that the front keeps of a weights file besides its contents."""
    return sum(
        TENSOR_BYTES + CHECKSUM_BYTES * len(tensor.crc32c) + CHARACTER_BYTES * len(tensor.name)
        for tensor in manifest.tensors
    )


class _Part:
    """Receive tensors of one stream, as its :class:`~upriver.coldstart.fetch.weight_stream.Sink`.

    A thread creates the stream. At the end the part drops the file, because the two refer to each other: so
    memory is freed at once.

    Args:
        numbers: Their numbers in the file, in order.
    """

    def __init__(self, file: ColdFile, numbers: Sequence[int]) -> None:
        self._file: ColdFile | None = file
        self._numbers, self._left = numbers, len(numbers)
        self._indices = {number: index for index, number in enumerate(numbers)}
        self.stream: WeightStream | None = None
        self._lock = threading.Lock()
        self._hurried: list[int] = []
        self._thread = BackgroundThread(self._begin, name="cold-part")

    def start(self) -> None:
        try:
            self._thread.start()
        except UpriverError as error:
            self._unreadable(error)

    def cancel(self) -> None:
        """Cancel the stream; the file has failed."""
        if self.stream is not None:
            self.stream.cancel()

    def join(self) -> None:
        self._thread.join()
        if self.stream is not None:
            self.stream.join()

    def hurry(self, number: int) -> None:
        """Prefer this tensor, if it is one of these, since a caller waits for it."""
        if number not in self._indices:
            return
        with self._lock:
            if self.stream is None:
                self._hurried.append(self._indices[number])
                return
        self.stream.hurry(self._indices[number])

    def _begin(self) -> None:
        file = self._here()
        try:
            stream = file.stream_of(self._numbers, self)
            with self._lock:
                self.stream = stream
            if file.error is not None:  # it failed before: no later call cancels the stream
                self._file = None
                return
            for index in self._hurried:
                stream.hurry(index)
            stream.start()
        except UpriverError as error:
            self._unreadable(error)
        except Exception as error:
            log.exception("a weights file could not be requested")
            self._unreadable(error)

    def _unreadable(self, error: Exception) -> None:
        file, self._file = self._here(), None
        file.unreadable(error)

    def room(self, index: int) -> memoryview:
        return self._here().room(self._numbers[index])

    def filled(self, index: int) -> None:
        file = self._here()
        self._left -= 1
        file.came(self._numbers[index], last=not self._left)
        if not self._left:
            self._file = None

    def failed(self, error: UpriverError) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.failed(error)

    def _here(self) -> ColdFile:
        assert self._file is not None, "its stream is over"
        return self._file


def _no_hurry(number: int) -> None:
    """Do nothing: hashing waits for tensors without priority."""
