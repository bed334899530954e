"""Weights that are still on their way into the memory that workers map: what is asked for, and who waits.

A program runs before all of its weights are there, stage by stage, as in PISeL (CIKM 2024); see
:mod:`upriver.coldstart.load_program`. Here the front reads, as workers have no network: each tensor goes
straight to where the file has it, and a worker asks before a stage whose weights it has not seen.

Chunks are checked against the manifest before anyone reads them, and the whole file against the digest that
the graph names as it comes. Where only stages before a cut are asked for, that is never known.
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

import numpy as np
import torch

from upriver.coldstart.fetch.weight_stream import Stream, StreamLimits
from upriver.coldstart.format.manifest import Manifest
from upriver.coldstart.grouping.groups import joins_s
from upriver.coldstart.incoming_weights import step_back
from upriver.coldstart.load_handle import Groupings, remember
from upriver.coldstart.load_model import grouped
from upriver.coldstart.load_program import Found
from upriver.coldstart.model.arrivals import Arrivals
from upriver.errors import Cancelled, ProgramError, UpriverError
from upriver.server.ipc.shared_memory import FillingFile
from upriver.text import error_text

log = logging.getLogger(__name__)

TENSOR_BYTES, CHECKSUM_BYTES, CHARACTER_BYTES = 1600, 96, 4
"""What a process keeps of a tensor that is asked for, of each of its checksums and of its name: as it is
stored, as it is placed, what is asked for, what has happened."""


GROUPING = "upriver"
"""Which tensors are asked for together: :data:`~upriver.coldstart.grouping.groups.GROUPINGS`."""


class ColdFile:
    """A weights file of which some is here, and some asked for.

    It belongs to the event loop's thread, but for what says otherwise.

    Args:
        found: What is known of the file.
        digest: The file's.
        limits: Of what it takes of a link.
        device: Where programs with these weights run.
        on_forged: Told where all of it came, each chunk as the manifest has it, and it is another file.

    Attributes:
        fd: Of the memory, which has the file's header from the start.
        nbytes: Of the file.
        numbers: Of its tensors, by key: their places in it.

    Raises:
        OSError: If there is no memory of the kind.
    """

    def __init__(
        self,
        found: Found,
        digest: str,
        limits: StreamLimits,
        *,
        device: torch.device,
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
        # That the file is what it is called is one more thing to come.
        self._arrivals = Arrivals(len(self._tensors) + 1)
        self._asked: set[int] = set()
        self._wanted: deque[Collection[int]] = deque()
        self._to_end = False
        self._part: _Part | None = None
        self._checking: threading.Thread | None = None
        self._groupings: Groupings = {}
        self._at_once: Stream | None = None
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()

    # --------------------------------------------------------------------------- from any thread

    @property
    def whole(self) -> bool:
        """Whether all of it is here, and is what it is called."""
        return self._arrivals.complete

    @property
    def error(self) -> UpriverError | None:
        """Why what is not here will not come; a new one each time."""
        return self._arrivals.error

    def wait(self, numbers: Collection[int], *, timeout_s: float) -> bool:
        """Until these tensors are here, in a thread other than the loop's; False where that takes longer.

        Raises:
            UpriverError: If they do not come.
        """
        if not self._asked.issuperset(numbers):
            self._tell(lambda: self.ask(numbers))
        return self._arrivals.wait(numbers, self._hurry, timeout_s=timeout_s)

    # ------------------------------------------------------------------------- in the loop's thread

    @property
    def coming(self) -> bool:
        """Whether something is under way that was asked for, or is being checked."""
        return not self._arrivals.over and (self._part is not None or self._checking is not None)

    def ask(self, numbers: Iterable[int], *, to_end: bool = False) -> None:
        """Have these tensors come.

        Args:
            numbers: By their places in the file.
            to_end: Whether all others are to come behind them, so that the file can be held against its
                digest.
        """
        self._wanted.append(set(numbers) - self._asked)
        self._to_end |= to_end
        if self._part is None:
            self._next()
        if self._to_end and self._checking is None:
            checking = threading.Thread(target=self._check, name="upriver-cold-digest", daemon=True)
            try:
                checking.start()
            except RuntimeError as error:  # no thread can be started
                self._give_up(
                    UpriverError(f"{self._found.source.path} cannot be checked: {error_text(error)}")
                )
            else:
                self._checking = checking

    async def ready(self, first: Collection[int], others: Collection[int], *, within_s: float) -> None:
        """Wait until the first are here, and the others will be in so many seconds, as the link is.

        Who begins now and works for so long is not through later than who would have begun before, and waits
        less in between: a worker that waits for weights is one that nobody else has.

        Raises:
            UpriverError: If they do not come.
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
        """Wait while something is under way.

        Raises:
            UpriverError: If it does not come, or the file is another one.
        """
        while self.coming:
            await self._news.wait()
        self._arrivals.check()

    async def checked(self) -> None:
        """Wait until the file is known to be what it is called, where all of it was asked for.

        Raises:
            UpriverError: If it is not, or does not come.
        """
        while self._to_end and not self._arrivals.over:
            await self._news.wait()
        self._arrivals.check()

    def cancel(self) -> None:
        """Nothing more is read; who waits gets an error."""
        self._give_up(Cancelled(f"the load of {self._found.source.path!r} was cancelled"))

    def join(self) -> None:
        """Wait until nothing of it runs any more, after a cancel."""
        if self._part is not None:
            self._part.join()
        if self._checking is not None:
            self._checking.join()

    def _next(self) -> None:
        """Begin with what is wanted next, if anything is."""
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
        """Have all who wait look again."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _bytes_per_s(self) -> float:
        stream = self._part.stream if self._part is not None else None
        link = self._found.link if stream is None else stream.measured
        return link.bandwidth_bytes_per_s

    # -------------------------------------------------------------------- in threads of its own

    def room(self, number: int) -> memoryview:
        """Where a tensor belongs."""
        return self._memory.room(self._tensors[number].start, self._tensors[number].stop)

    def stream_of(self, numbers: Sequence[int], sink: _Part) -> Stream:
        """What brings these tensors; to choose what is asked for together can take tenths of a second."""
        some, known = self._found.source, self._found.known
        if len(numbers) < len(self._tensors):
            some, known = replace(some, tensors=tuple(some.tensors[number] for number in numbers)), {}
        groups, news = grouped(some, self._found.link, GROUPING, self._limits, self._device, known)
        stream = Stream(
            some,
            groups,
            sink,
            limits=self._limits,
            link=self._found.link,
            joins_s=joins_s(GROUPING),
        )
        if some is self._found.source:
            self._at_once, self._groupings = stream, news
        return stream

    def came(self, number: int, *, last: bool) -> None:
        """A tensor is here; whether it is the last of those that are under way.

        Raises:
            ProgramError: If it has no values of its type. A worker looked before there were any.
        """
        tensor = self._tensors[number]
        room = self.room(number) if tensor.dtype == "bool" else memoryview(b"")
        if len(room) and np.frombuffer(room, np.uint8).max() > 1:
            raise ProgramError(f"weight {tensor.name!r}: a bool holds 0 or 1 only")
        self._arrivals.filled(number)
        self._tell(self._part_is_here if last else self._wake)

    def unreadable(self, error: Exception) -> None:
        """It cannot be asked for."""
        self.failed(UpriverError(f"{self._found.source.path} cannot be read: {error_text(error)}"))

    def failed(self, error: UpriverError) -> None:
        """What is not here will not come."""
        self._arrivals.failed(error)
        self._tell(self._wake)

    def _hurry(self, number: int) -> None:
        if (part := self._part) is not None:
            part.hurry(number)

    def _tell(self, what: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(what)

    def _check(self) -> None:
        """Hold the file against its digest as it comes, behind everybody who has stages to run."""
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
        """The digest of what is here, once all is.

        Raises:
            UpriverError: If it does not come.
        """
        folded, end = hashlib.sha256(), 0
        with self._memory.room(0, self.nbytes) as data:
            for number, tensor in enumerate(self._tensors):
                self._arrivals.wait([number], _no_hurry)
                folded.update(data[end : tensor.stop])
                end = tensor.stop
            folded.update(data[end:])
        return folded.hexdigest()


def kept_bytes(manifest: Manifest) -> int:
    """What the front keeps of a weights file beside its bytes, at most."""
    return sum(
        TENSOR_BYTES + CHECKSUM_BYTES * len(tensor.crc32c) + CHARACTER_BYTES * len(tensor.name)
        for tensor in manifest.tensors
    )


class _Part:
    """Tensors that come with one stream, whose sink this is; a thread of its own makes that.

    It lets go of the file at the end, as each holds on to the other: memory is given back at once.

    Args:
        file: Whose they are.
        numbers: Their places in it, in order.

    Attributes:
        stream: What brings them, as soon as it is made.
    """

    def __init__(self, file: ColdFile, numbers: Sequence[int]) -> None:
        self._file: ColdFile | None = file
        self._numbers, self._left = numbers, len(numbers)
        self._indices = {number: index for index, number in enumerate(numbers)}
        self.stream: Stream | None = None
        self._lock = threading.Lock()
        self._hurried: list[int] = []
        self._thread = threading.Thread(target=self._begin, name="upriver-cold-part", daemon=True)

    def start(self) -> None:
        """Have them come."""
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread can be started
            self._unreadable(error)

    def cancel(self) -> None:
        """Nothing more is to come; the file has failed."""
        if self.stream is not None:
            self.stream.cancel()

    def join(self) -> None:
        """Wait until nothing of it runs any more."""
        if self._thread.ident is not None:
            self._thread.join()
        if self.stream is not None:
            self.stream.join()

    def hurry(self, number: int) -> None:
        """Somebody waits for this tensor, if it is one of these."""
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
            if file.error is not None:  # and so nobody cancels it
                self._file = None
                return
            for index in self._hurried:
                stream.hurry(index)
            stream.start()
        except (UpriverError, RuntimeError) as error:  # RuntimeError: no thread can be started
            self._unreadable(error)
        except Exception as error:
            log.exception("a weights file was not asked for")
            self._unreadable(error)

    def _unreadable(self, error: Exception) -> None:
        file, self._file = self._here(), None
        file.unreadable(error)

    def room(self, index: int) -> memoryview:
        """See :class:`~upriver.coldstart.fetch.weight_stream.Sink`."""
        return self._here().room(self._numbers[index])

    def filled(self, index: int) -> None:
        """See :class:`~upriver.coldstart.fetch.weight_stream.Sink`."""
        file = self._here()
        self._left -= 1
        file.came(self._numbers[index], last=not self._left)
        if not self._left:
            self._file = None

    def failed(self, error: UpriverError) -> None:
        """See :class:`~upriver.coldstart.fetch.weight_stream.Sink`."""
        file, self._file = self._file, None
        if file is not None:
            file.failed(error)

    def _here(self) -> ColdFile:
        assert self._file is not None, "its stream is over"
        return self._file


def _no_hurry(number: int) -> None:
    """What is hashed behind everybody is in no hurry."""
