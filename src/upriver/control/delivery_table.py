"""Track which micro-batches are free, in flight, ready or taken. The table has no threads and no clock.

The table makes delivery exact. A micro-batch has a slot from its claim until the consumer takes it. A slot
belongs to one claim, and results for another claim are dropped. Each index is therefore delivered once, and
in order, because only the lowest one can be taken.

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
"""Remote failures after which a micro-batch is computed locally: it may be what crashes the servers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchWindow:
    """Limits on how far fetching may run ahead of the consumer.

    Attributes:
        micro_batches: Most micro-batches in flight or ready.
        num_bytes: Most bytes of them; one micro-batch is always allowed, whatever its size.
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
    """The two ways to make a micro-batch: by a server, or locally from the store."""

    REMOTE = "remote"
    LOCAL = "local"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """The place where a micro-batch must be computed, when an earlier run is replayed.

    A server at the URL ``source`` runs it up to ``cut``.
    """

    way: Way
    source: str
    cut: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DealtRoute:
    """The way and the cut by which one micro-batch is to be made.

    The cut is the position of the stored bytes if no server runs it.
    """

    way: Way
    cut: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """The position and the tensors' bytes of a micro-batch on arrival."""

    position: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Delivery:
    """A micro-batch that was made, or the error that stands in its place.

    Attributes:
        came: State of the micro-batch on arrival; set once local stages have run or failed on it.
        done: Whether no local stage is left to run on it.
    """

    source: str
    batch: MicroBatch | None = None
    timings: Timings = field(default_factory=Timings)
    error: Exception | None = None
    came: Received | None = None
    done: bool = False

    @property
    def arrival(self) -> Received:
        """State of the micro-batch on arrival."""
        if self.came is not None:
            return self.came
        batch = self.result()
        return Received(position=batch.position, num_bytes=sum(tensor.nbytes for tensor in batch.tensors))

    def finished(self, batch: MicroBatch | None) -> Delivery:
        """Return the delivery after its local stages ran; a ``batch`` of None means that they failed.

        A failed delivery keeps its micro-batch: the stages run again, and fail, when it is due.
        """
        return replace(self, batch=batch or self.batch, came=self.arrival, done=batch is not None)

    def result(self) -> MicroBatch:
        """Return the micro-batch, or raise the error in its place."""
        if self.batch is None:
            raise self.error or ValueError("a delivery holds a micro-batch or an error")
        return self.batch

    @property
    def num_bytes(self) -> int:
        """Memory that it holds: whole storages, each once, since tensors are often views of one buffer."""
        if self.batch is None:
            return 0
        storages = [tensor.untyped_storage() for tensor in self.batch.tensors]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@dataclass(kw_only=True, slots=True, eq=False)
class Claim:
    """A run of micro-batches that one thread works on.

    Attributes:
        cut: Position up to which a server runs them; None if the loader was given no routes.
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
    """Return a key for micro-batches of equal size; local ones are always the model's input."""
    return (way, None if way is Way.LOCAL else cut)


class DeliveryTable:
    """Track the state of ``num_micro_batches``. Not thread-safe: the loader holds a lock.

    Args:
        num_micro_batches: Micro-batches of the whole epoch.
        first: Index to start at; earlier ones count as taken.
        expected_bytes: Bytes of a micro-batch by route, or by way for all other routes; corrected by real
            sizes.
        pins: Micro-batches that must come from a certain place; all others may come from anywhere.
        dealt: The route of each micro-batch; None lets servers make them all, up to the same cut.
            Micro-batches that servers cannot make are made locally in any case.
    """

    def __init__(
        self,
        num_micro_batches: int,
        *,
        first: int,
        window: PrefetchWindow,
        expected_bytes: Mapping[Way | DealtRoute, int] | None = None,
        pins: Mapping[int, Pin] | None = None,
        dealt: Sequence[DealtRoute] | None = None,
    ) -> None:
        if not 0 <= first <= num_micro_batches:
            raise ConfigError(f"first must lie in 0..{num_micro_batches}, got {first}")
        self.taken = first
        self.retried = 0
        self._stop = num_micro_batches
        self.window = window
        self._expected_bytes: Mapping[Way | DealtRoute, int] = expected_bytes or {}
        self._largest_bytes: dict[tuple[Way, int | None], int] = {}  # of those that arrived
        self._pins = dict(pins or {})
        self._num = num_micro_batches
        self._instead: DealtRoute | None = None
        self._dealt: Sequence[DealtRoute] | None = None
        if dealt is not None:
            self.deal(dealt)
        self._slots: dict[int, _Slot] = {}
        self._held_bytes = 0
        self._failures: dict[int, int] = {}

    @property
    def done(self) -> bool:
        """Return whether every micro-batch has been taken."""
        return self.taken >= self._stop

    @property
    def held_bytes(self) -> int:
        """Bytes in flight (expected) and ready (real)."""
        return self._held_bytes

    def __len__(self) -> int:
        """Return the number of micro-batches in flight or ready."""
        return len(self._slots)

    # -------------------------------------------------------------------------------- finding work

    def find(self, way: Way, limit: int, *, stride: int = 1, only_failed: bool = False) -> tuple[int, ...]:
        """Return the free micro-batches, at most ``limit``, that ``way`` should work on next.

        With ``stride`` 1 they are neighbours, except for micro-batches of other routes in between. With a
        larger stride each lies that many behind the one before. Each of ``stride`` connections then gets one
        of the next due micro-batches. Micro-batches that are made at the same time are thus taken in
        sequence.

        Args:
            way: The way that asks. The remote way gets no micro-batches that failed too often remotely.
            stride: Steps from one to the next, counted over micro-batches of that way.
            only_failed: Return only those that failed too often remotely.
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
        """Return the least number of requests that cover this way's free micro-batches in the window."""
        return len({(self._route(index), self.pin(index)) for index in self._free(way, only_failed=False)})

    def pin(self, index: int) -> Pin | None:
        """Return where this micro-batch must come from; None if it may come from anywhere."""
        return self._pins.get(index)

    def _alike(self, index: int, other: int) -> bool:
        """Return whether one request can hold both micro-batches."""
        return self._route(index) == self._route(other) and self.pin(index) == self.pin(other)

    def _route(self, index: int) -> DealtRoute | None:
        """Return the present route of a micro-batch; None if there are no routes."""
        if self._dealt is None:
            return None
        route = self._dealt[index]
        if route.way is Way.LOCAL and self._instead is not None and not self._failed(index):
            return self._instead
        return route

    def _failed(self, index: int) -> bool:
        """Return whether servers have failed on it too often."""
        return self._failures.get(index, 0) >= MAX_REMOTE_ATTEMPTS

    def _ahead(self, index: int, steps: int) -> int:
        """Return the next index for the same request, at least ``steps`` of its way behind, or the end."""
        stop = min(self._stop, self._window_end + self.window.micro_batches)
        way = self._way(index)
        others = (other for other in range(index + 1, stop) if self._way(other) is way)
        earliest = next(islice(others, steps - 1, None), stop)
        return next((other for other in range(earliest, stop) if self._alike(other, index)), self._stop)

    def _way(self, index: int) -> Way | None:
        """Return the way of a micro-batch; None if neither a pin nor a route sets it."""
        chosen = self.pin(index) or self._route(index)
        return chosen.way if chosen is not None else None

    def _cut(self, index: int) -> int | None:
        if (pin := self.pin(index)) is not None:
            return pin.cut
        route = self._route(index)
        return route.cut if route is not None else None

    def claim(self, way: Way, run: Sequence[int]) -> Claim:
        """Claim a run that `find` returned, for one thread."""
        claim = Claim(way=way, indices=tuple(run), cut=self._cut(run[0]))
        expected = self._expected(way, claim.cut)
        for index in claim.indices:
            self._slots[index] = _Slot(claim, expected)
            self._held_bytes += expected
        return claim

    def _expected(self, way: Way, cut: int | None) -> int:
        even = self.window.num_bytes // self.window.micro_batches
        guess = self._expected_bytes.get(way, even)
        if cut is not None:
            guess = self._expected_bytes.get(DealtRoute(way=way, cut=cut), guess)
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
        """Return whether one more stays within the window's bytes; the one that is due always does."""
        expected = self._expected(way, self._cut(index)) * (found + 1)
        return index == self.taken or self._held_bytes + expected <= self.window.num_bytes

    def _worth_waiting(self, run: Sequence[int], limit: int, stride: int) -> bool:
        """Return whether a run cut short by the window's end should wait until the window has moved on.

        Otherwise each step of the consumer would start a request for a single micro-batch. The window holds
        few micro-batches of a route with a small share. Those in the nearer half of the window therefore do
        not wait.
        """
        if not 0 < len(run) < limit or run[0] == self.taken:
            return False
        short = self._window_end <= self._ahead(run[-1], stride) < self._stop
        near = run[-1] + 1 < self._window_end and run[0] - self.taken < self.window.micro_batches // 2
        return short and not near

    # ------------------------------------------------------------------------------------- changes

    def deal(
        self,
        dealt: Sequence[DealtRoute],
        window: PrefetchWindow | None = None,
        expected_bytes: Mapping[Way | DealtRoute, int] | None = None,
    ) -> None:
        """Set new routes, and other limits if given, for micro-batches that are not in flight yet."""
        if len(dealt) != self._num:
            raise ConfigError(f"{self._num} micro-batches need as many routes, got {len(dealt)}")
        self._dealt = dealt
        self.window = window or self.window
        self._expected_bytes = expected_bytes or self._expected_bytes

    @property
    def common_cut(self) -> int | None:
        """The cut at which servers make most of the epoch; None if they make nothing.

        While servers also replace the plain way, it is the cut at which they do so.
        """
        if self._instead is not None:
            return self._instead.cut
        cuts = Counter(hand.cut for hand in self._dealt or () if hand.way is Way.REMOTE)
        return cuts.most_common(1)[0][0] if cuts else None

    def ask_servers(self, claim: Claim, cut: int) -> bool:
        """Release a local claim that failed, and have servers make all local micro-batches, up to ``cut``.

        Return False and change nothing if servers have failed on it too, or if it is pinned.
        """
        if any(self._failed(index) or self.pin(index) is not None for index in claim.indices):
            return False
        self._instead = DealtRoute(way=Way.REMOTE, cut=cut)
        self.release(claim)
        return True

    def ask_servers_no_more(self) -> None:
        """Make micro-batches with local routes locally again."""
        self._instead = None

    def deliver(self, claim: Claim, index: int, delivery: Delivery) -> bool:
        """Put a result in its slot; drop it and return False if the slot no longer belongs to this claim."""
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
        """Store a delivery in its slot, and count its real bytes."""
        num_bytes = delivery.num_bytes
        self._held_bytes += num_bytes - slot.num_bytes
        slot.num_bytes, slot.delivery = num_bytes, delivery

    def missing(self, claim: Claim) -> tuple[int, ...]:
        """Return the claim's micro-batches that have not arrived."""
        mine = ((index, self._slots.get(index)) for index in claim.indices)
        return tuple(i for i, slot in mine if slot and slot.claim is claim and slot.delivery is None)

    def release(self, claim: Claim) -> None:
        """Free the claim's micro-batches that have not arrived, so that other threads can claim them."""
        for index in self.missing(claim):
            self._held_bytes -= self._slots.pop(index).num_bytes

    def give_up(self, claim: Claim, *, retry: bool) -> None:
        """Free the missing micro-batches of a remote claim that failed.

        The first one missing counts as failed: the server was working on it.

        Args:
            retry: Whether servers may try again; otherwise all of them are left to the plain way.
        """
        missing = self.missing(claim)
        for index in missing if not retry else missing[:1]:
            self._failures[index] = self._failures.get(index, 0) + (1 if retry else MAX_REMOTE_ATTEMPTS)
        self.retried += len(missing)
        self.release(claim)

    @property
    def ready(self) -> bool:
        """Return whether the micro-batch that is due has arrived."""
        slot = self._slots.get(self.taken)
        return slot is not None and slot.delivery is not None

    def unfinished(self) -> tuple[int, Delivery] | None:
        """Return the first micro-batch behind the due one that has arrived and awaits its local stages."""
        for index in range(self.taken + 1, min(self._stop, self._window_end)):
            slot = self._slots.get(index)
            delivery = slot.delivery if slot is not None else None
            if delivery is not None and delivery.batch is not None and delivery.came is None:
                return index, delivery
        return None

    def finish(self, index: int, delivery: Delivery) -> None:
        """Replace the delivery in a slot after its local stages."""
        self._fill(self._slots[index], delivery)

    def take(self) -> Delivery:
        """Hand out the micro-batch that is due; call it only if `ready`."""
        slot = self._slots[self.taken]
        if slot.delivery is None:
            raise KeyError(self.taken)
        del self._slots[self.taken]
        self._failures.pop(self.taken, None)
        self._held_bytes -= slot.num_bytes
        self.taken += 1
        return slot.delivery
