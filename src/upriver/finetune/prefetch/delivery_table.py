"""The table behind the loader: which micro-batches are free, in flight, ready or taken. No threads, no clock.

Everything that makes delivery exact lives here. A micro-batch has a slot from the moment somebody claims it
until the consumer takes it; a slot belongs to one claim, and what arrives for another claim is dropped. So
each index is delivered once, and in order, because only the lowest one can be taken.

```
free ──claim──► in flight ──deliver──► ready ──take──► taken
  ▲                 │
  └────release──────┘
```
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice

from upriver.errors import ConfigError
from upriver.types import MicroBatch, Timings

MAX_REMOTE_ATTEMPTS = 3
"""A micro-batch that failed remotely so often is computed here: it may be what kills the servers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchWindow:
    """How far fetching may run ahead of the consumer.

    Attributes:
        micro_batches: At most so many in flight or ready.
        num_bytes: At most so many bytes of them; one micro-batch is always allowed, whatever its size.
    """

    micro_batches: int = 64
    num_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if self.micro_batches < 1 or self.num_bytes < 1:
            raise ConfigError(
                f"a window holds at least 1 micro-batch and 1 byte, "
                f"got {self.micro_batches} and {self.num_bytes}"
            )


class Way(StrEnum):
    """How a micro-batch is made: by a server, or here from the store."""

    REMOTE = "remote"
    LOCAL = "local"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """Where a micro-batch must come from, when an earlier run is replayed.

    Attributes:
        way: By a server or here.
        source: The server's URL.
        cut: The position up to which it runs there.
    """

    way: Way
    source: str
    cut: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Dealt:
    """How one micro-batch is to be made.

    Attributes:
        way: By a server or here.
        cut: The position up to which a server runs it; that of the stored bytes where none does.
    """

    way: Way
    cut: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """A micro-batch as it came.

    Attributes:
        position: Where it stood.
        num_bytes: Of its tensors.
    """

    position: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Delivery:
    """What came of a micro-batch: itself, or the error that stands in its place.

    Attributes:
        came: What it was when it came, once more was done to it here, or tried.
        done: Whether nothing is left to be done to it here.
    """

    source: str
    batch: MicroBatch | None = None
    timings: Timings = field(default_factory=Timings)
    error: Exception | None = None
    came: Received | None = None
    done: bool = False

    @property
    def arrival(self) -> Received:
        """What it was when it came."""
        if self.came is not None:
            return self.came
        batch = self.result()
        return Received(position=batch.position, num_bytes=sum(tensor.nbytes for tensor in batch.tensors))

    def finished(self, batch: MicroBatch | None) -> Delivery:
        """The same with nothing left to be done here; None where that failed: its turn tells."""
        return replace(self, batch=batch or self.batch, came=self.arrival, done=batch is not None)

    def result(self) -> MicroBatch:
        """The micro-batch; raises what stands in its place."""
        if self.batch is None:
            raise self.error or ValueError("a delivery holds a micro-batch or an error")
        return self.batch

    @property
    def num_bytes(self) -> int:
        """Memory it holds: whole storages, each once, since tensors are often views of one buffer."""
        if self.batch is None:
            return 0
        storages = [tensor.untyped_storage() for tensor in self.batch.tensors]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@dataclass(kw_only=True, slots=True, eq=False)
class Claim:
    """A run of micro-batches that one thread works on.

    Attributes:
        cut: The position up to which a server runs them; None where the loader was told of no routes.
    """

    way: Way
    indices: tuple[int, ...]
    cut: int | None = None


@dataclass(slots=True, eq=False)
class _Slot:
    claim: Claim
    num_bytes: int
    delivery: Delivery | None = None


def _kind(way: Way, cut: int | None) -> tuple[Way, int | None]:
    """Micro-batches of a kind weigh the same; what is made here is always the model's input."""
    return (way, None if way is Way.LOCAL else cut)


class SlotTable:
    """Which of ``num_micro_batches`` are free, in flight, ready or taken. Not thread-safe: the loader locks.

    Args:
        num_micro_batches: Of the whole epoch.
        first: Where to start; those before count as taken.
        window: How far to run ahead.
        expected_bytes: What a micro-batch weighs, by route or, for all others, by way; corrected by what
            arrives.
        pins: Micro-batches that must come from a certain place; all others may come from anywhere.
        dealt: The route of each micro-batch; None lets servers make them all, up to the same cut. What
            servers cannot do is made here all the same.
    """

    def __init__(
        self,
        num_micro_batches: int,
        *,
        first: int,
        window: PrefetchWindow,
        expected_bytes: Mapping[Way | Dealt, int] | None = None,
        pins: Mapping[int, Pin] | None = None,
        dealt: Sequence[Dealt] | None = None,
    ) -> None:
        if not 0 <= first <= num_micro_batches:
            raise ConfigError(f"first must lie in 0..{num_micro_batches}, got {first}")
        self.taken = first
        self.retried = 0
        self._stop = num_micro_batches
        self.window = window
        self._expected_bytes: Mapping[Way | Dealt, int] = expected_bytes or {}
        self._largest_bytes: dict[tuple[Way, int | None], int] = {}  # that has arrived
        self._pins = dict(pins or {})
        self._num = num_micro_batches
        self._instead: Dealt | None = None
        self._dealt: Sequence[Dealt] | None = None
        if dealt is not None:
            self.deal(dealt)
        self._slots: dict[int, _Slot] = {}
        self._held_bytes = 0
        self._failures: dict[int, int] = {}

    @property
    def done(self) -> bool:
        """Whether every micro-batch has been taken."""
        return self.taken >= self._stop

    @property
    def held_bytes(self) -> int:
        """Bytes in flight (expected) and ready (real)."""
        return self._held_bytes

    def __len__(self) -> int:
        """Micro-batches in flight or ready."""
        return len(self._slots)

    # -------------------------------------------------------------------------------- finding work

    def find(self, way: Way, limit: int, *, stride: int = 1, only_failed: bool = False) -> tuple[int, ...]:
        """The free micro-batches, at most ``limit``, that ``way`` should work on next.

        They are neighbours, but for micro-batches of other routes in between. Or each is so many behind the
        one before it: of ``stride`` who ask, each then gets the next one that is due, and what is made at the
        same time is taken one after the other.

        Args:
            way: Who asks. Those that failed too often remotely are left to the local way.
            limit: Longest run.
            stride: Steps from one to the next, over micro-batches of that way.
            only_failed: Only those that failed too often remotely.
        """
        run: list[int] = []
        for index in self._free(way, only_failed=only_failed):
            if run and (not self._alike(index, run[-1]) or index < self._ahead(run[-1], stride)):
                continue
            if len(run) == limit or (run and index != self._ahead(run[-1], stride)):
                break
            if not self._fits(index, len(run), way):
                break
            run.append(index)
        return () if self._worth_waiting(run, limit, stride) else tuple(run)

    def num_kinds(self, way: Way) -> int:
        """How many requests it takes at least to have all free micro-batches of the window made this way."""
        return len({(self._route(index), self.pin(index)) for index in self._free(way, only_failed=False)})

    def pin(self, index: int) -> Pin | None:
        """Where this micro-batch must come from; None when from anywhere."""
        return self._pins.get(index)

    def _alike(self, index: int, other: int) -> bool:
        """Whether one request can be for both."""
        return self._route(index) == self._route(other) and self.pin(index) == self.pin(other)

    def _route(self, index: int) -> Dealt | None:
        """How a micro-batch is to be made now; None where that was not said."""
        if self._dealt is None:
            return None
        route = self._dealt[index]
        if route.way is Way.LOCAL and self._instead is not None and not self._failed(index):
            return self._instead
        return route

    def _failed(self, index: int) -> bool:
        """Whether servers have failed at it too often."""
        return self._failures.get(index, 0) >= MAX_REMOTE_ATTEMPTS

    def _ahead(self, index: int, steps: int) -> int:
        """The next that could go with this one, so many of its way or more behind; the end if none is."""
        stop = min(self._stop, self._window_end + self.window.micro_batches)
        way = self._way(index)
        others = (other for other in range(index + 1, stop) if self._way(other) is way)
        earliest = next(islice(others, steps - 1, None), stop)
        return next((other for other in range(earliest, stop) if self._alike(other, index)), self._stop)

    def _way(self, index: int) -> Way | None:
        """Who is to make a micro-batch; None where that was not said."""
        chosen = self.pin(index) or self._route(index)
        return chosen.way if chosen is not None else None

    def _cut(self, index: int) -> int | None:
        if (pin := self.pin(index)) is not None:
            return pin.cut
        route = self._route(index)
        return route.cut if route is not None else None

    def claim(self, way: Way, run: Sequence[int]) -> Claim:
        """Give a run that `find` returned to one thread."""
        claim = Claim(way=way, indices=tuple(run), cut=self._cut(run[0]))
        expected = self._expected(way, claim.cut)
        for index in claim.indices:
            self._slots[index] = _Slot(claim, expected)
            self._held_bytes += expected
        return claim

    def _expected(self, way: Way, cut: int | None) -> int:
        """Bytes of a micro-batch that is made this way, as far as is known before it is there."""
        even = self.window.num_bytes // self.window.micro_batches
        guess = self._expected_bytes.get(way, even)
        if cut is not None:
            guess = self._expected_bytes.get(Dealt(way=way, cut=cut), guess)
        return max(self._largest_bytes.get(_kind(way, cut), 0), guess)

    def _free(self, way: Way, *, only_failed: bool) -> Iterator[int]:
        for index in range(self.taken, min(self._stop, self._window_end)):
            if index not in self._slots and self._wanted(index, way, only_failed=only_failed):
                yield index

    def _wanted(self, index: int, way: Way, *, only_failed: bool) -> bool:
        if (pin := self.pin(index)) is not None:
            return way is pin.way
        route = self._route(index)
        if route is not None and route.way is Way.LOCAL:
            return way is Way.LOCAL
        failed = self._failed(index)
        return not failed if way is Way.REMOTE else failed or not only_failed

    @property
    def _window_end(self) -> int:
        return self.taken + self.window.micro_batches

    def _fits(self, index: int, found: int, way: Way) -> bool:
        """Whether one more stays within the window's bytes; the one that is due always does."""
        expected = self._expected(way, self._cut(index)) * (found + 1)
        return index == self.taken or self._held_bytes + expected <= self.window.num_bytes

    def _worth_waiting(self, run: Sequence[int], limit: int, stride: int) -> bool:
        """Whether a run cut short by the window's end should wait until the window has moved on.

        Otherwise each step of the consumer would start a request for a single micro-batch. Of a route with a
        small share the window holds few, so what is due within the nearer half of it waits no longer.
        """
        if not 0 < len(run) < limit or run[0] == self.taken:
            return False
        short = self._window_end <= self._ahead(run[-1], stride) < self._stop
        near = run[-1] + 1 < self._window_end and run[0] - self.taken < self.window.micro_batches // 2
        return short and not near

    # ------------------------------------------------------------------------------------- changes

    def deal(self, dealt: Sequence[Dealt], window: PrefetchWindow | None = None) -> None:
        """New routes, and another window, for what is not in flight yet; what is stays what it was."""
        self._check_dealt(dealt)
        self._dealt = dealt
        self.window = window or self.window

    @property
    def common_cut(self) -> int | None:
        """The cut at which servers are asked for most of the epoch; None where they are asked for nothing.

        While they make what was to be made here, too, it is the cut that they do that at.
        """
        if self._instead is not None:
            return self._instead.cut
        cuts = Counter(hand.cut for hand in self._dealt or () if hand.way is Way.REMOTE)
        return cuts.most_common(1)[0][0] if cuts else None

    def ask_servers(self, claim: Claim, cut: int) -> bool:
        """Free what could not be made here; servers make it, and all that was to be made here, up to a cut.

        False, and nothing changes, where servers have failed at it themselves, or it may come from here only.
        """
        if any(self._failed(index) or self.pin(index) is not None for index in claim.indices):
            return False
        self._instead = Dealt(way=Way.REMOTE, cut=cut)
        self.release(claim)
        return True

    def ask_servers_no_more(self) -> None:
        """What was dealt to be made here is made here again."""
        self._instead = None

    def _check_dealt(self, dealt: Sequence[Dealt]) -> None:
        if len(dealt) != self._num:
            raise ConfigError(f"{self._num} micro-batches need as many routes, got {len(dealt)}")

    def deliver(self, claim: Claim, index: int, delivery: Delivery) -> bool:
        """Put a result in its slot; False (and dropped) when the slot is no longer this claim's to fill."""
        slot = self._slots.get(index)
        if slot is None or slot.claim is not claim or slot.delivery is not None:
            return False
        if delivery.error is not None:
            self._stop = min(self._stop, index + 1)  # nothing after an error will be delivered
        self._fill(slot, delivery)
        kind = _kind(claim.way, claim.cut)
        self._largest_bytes[kind] = max(self._largest_bytes.get(kind, 0), slot.num_bytes)
        return True

    def _fill(self, slot: _Slot, delivery: Delivery) -> None:
        """Hold a delivery, and count what it really weighs."""
        num_bytes = delivery.num_bytes
        self._held_bytes += num_bytes - slot.num_bytes
        slot.num_bytes, slot.delivery = num_bytes, delivery

    def missing(self, claim: Claim) -> tuple[int, ...]:
        """The claim's micro-batches that have not arrived."""
        mine = ((index, self._slots.get(index)) for index in claim.indices)
        return tuple(i for i, slot in mine if slot and slot.claim is claim and slot.delivery is None)

    def release(self, claim: Claim) -> None:
        """Free what has not arrived, so that others can claim it."""
        for index in self.missing(claim):
            self._held_bytes -= self._slots.pop(index).num_bytes

    def give_up(self, claim: Claim, *, retry: bool) -> None:
        """Free what has not arrived of a remote claim that failed.

        The first one missing is counted as having failed: it is the one the server was at.

        Args:
            claim: The claim that broke off.
            retry: Whether servers may try again; otherwise all of it is left to the local way.
        """
        missing = self.missing(claim)
        for index in missing if not retry else missing[:1]:
            self._failures[index] = self._failures.get(index, 0) + (1 if retry else MAX_REMOTE_ATTEMPTS)
        self.retried += len(missing)
        self.release(claim)

    @property
    def ready(self) -> bool:
        """Whether the micro-batch that is due has arrived."""
        slot = self._slots.get(self.taken)
        return slot is not None and slot.delivery is not None

    def unfinished(self) -> tuple[int, Delivery] | None:
        """The first micro-batch behind the one that is due that has arrived and was not touched since."""
        for index in range(self.taken + 1, min(self._stop, self._window_end)):
            slot = self._slots.get(index)
            delivery = slot.delivery if slot is not None else None
            if delivery is not None and delivery.batch is not None and delivery.came is None:
                return index, delivery
        return None

    def finish(self, index: int, delivery: Delivery) -> None:
        """Put what has been done to a micro-batch in its slot."""
        self._fill(self._slots[index], delivery)

    def take(self) -> Delivery:
        """Hand out the micro-batch that is due; only when `ready`."""
        slot = self._slots[self.taken]
        if slot.delivery is None:
            raise KeyError(self.taken)
        del self._slots[self.taken]
        self._failures.pop(self.taken, None)
        self._held_bytes -= slot.num_bytes
        self.taken += 1
        return slot.delivery
