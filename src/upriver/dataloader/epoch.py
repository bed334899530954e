"""One epoch: batches planned in the sampler's order, made wherever shares say, handed out in that order.

The training process plans, and nobody else: what a batch is made of never depends on who makes it, how fast,
or who fails. All of it belongs to the thread that iterates; what others have made comes through one queue.

That thread may be interrupted between any two lines (Ctrl-C, an alarm), and its caller may go on. So one step
makes a batch done, and one hands it out. Whoever comes back after something that was not raised here begins
anew what is not done.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from queue import Empty
from typing import Any, Protocol

from upriver.dataloader.local.pinned_memory import Pinned, pinned
from upriver.dataloader.local.workers import Fed, Maker, Processes, ProcessesEnded, Running
from upriver.dataloader.offload_stretch import Stretch
from upriver.dataloader.pending_batch import Batch, PendingTask
from upriver.dataloader.prefetch_limit import PrefetchLimit
from upriver.dataloader.share import Backlog
from upriver.dataloader.tasks import HERE, Arrival, Arrivals, Task
from upriver.errors import CodeFailed
from upriver.pipeline.mapstyle import DONE, not_the_end, note
from upriver.pipeline.seeding import apart

log = logging.getLogger("upriver")

LOOK_S = 1.0
"""So often that is looked at, where nothing comes."""


class Elsewhere(Protocol):
    """Other machines."""

    @property
    def slots(self) -> int:
        """Tasks that they can have at once."""

    def give(self, task: Task, raw: Sequence[Any] | None) -> bool:
        """Have a task done, for `Arrivals`, where it comes in any case; whether anybody takes it.

        Args:
            raw: Samples as they stand at its start; None where they are read there.
        """

    @property
    def ready(self) -> bool:
        """Whether there is anybody who has shown that tasks can be done there, and who may be asked."""

    @property
    def coming(self) -> bool:
        """Whether anybody is about to show it."""

    def look(self, task: Task) -> bool:
        """Whether anybody is `ready`; those who are not are to show it.

        Args:
            task: By its first sample, if need be.
        """

    def late(self) -> Sequence[int]:
        """Tasks that whoever has them does not answer, by number: somebody else does them from now on."""


class BatchSplit(Protocol):
    """Which samples of the next batch are made elsewhere."""

    @property
    def stretch(self) -> Stretch:
        """The stages of them that run elsewhere."""

    @property
    def ratio(self) -> float:
        """For what share of all."""

    def __call__(self, count: int) -> Sequence[bool]:
        """For each of ``count`` samples, in order, whether it is."""


@dataclass(eq=False, slots=True)
class Waits:
    """What handing out has waited for so far, and what became of what was to be made elsewhere.

    Attributes:
        here_s: Seconds in which nothing was missing of the next batch but what this machine makes.
        elsewhere_s: In which nothing was but what others make, and nothing else was left to do.
        both_s: In which both were missing, or the thread that trains made samples of later batches while
            others were at the next one.
        samples: Handed out.
        given: Of these, such as were to be made elsewhere.
        returned: Of these, such as nobody took or made there.
    """

    here_s: float = 0.0
    elsewhere_s: float = 0.0
    both_s: float = 0.0
    samples: int = 0
    given: int = 0
    returned: int = 0

    @property
    def failed(self) -> float:
        """Part of what was to be made elsewhere that was not."""
        return self.returned / self.given if self.given else 0.0

    def __add__(self, more: Waits) -> Waits:
        """Of both."""
        return Waits(*(getattr(self, each.name) + getattr(more, each.name) for each in fields(self)))

    def __sub__(self, before: Waits) -> Waits:
        """What has come since."""
        return Waits(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(self)))


class Epoch:
    """Plans and hands out one epoch.

    Args:
        number: Of the epoch.
        batches: Indices of each batch, from the sampler, one batch after another as they are planned.
        maker: Makes here what nobody else does.
        number_of: A number for an index, for what is drawn.
        split: Which samples go elsewhere.
        arrivals: Where what others do comes; where it pins batches, so does the epoch those that it makes.
        elsewhere: Who takes what goes elsewhere; None where nobody does.
        ahead: Batches that are planned beyond the one that is handed out next, at least.
        here: Of these, such as keep this machine busy; what others can have at once comes on top. What this
            machine makes, whole or in part, is at most ``ahead + here`` beyond the next one all the same.
        room: For what others make; None for any number.
        on_made: Told of each batch that is handed out how many of its samples were made where.
        hold: Whether nothing is planned before it is asked for.
        first: Number of the first batch.
        timeout_s: So long nothing may come while something is awaited that this machine's processes make; 0
            for any time.
        clock: Seconds.

    Attributes:
        waits: What handing out has waited for.
        hold: Whether nothing further is planned for now.
    """

    def __init__(
        self,
        number: int,
        batches: Iterator[tuple[Any, ...]],
        *,
        maker: Maker,
        number_of: Callable[[Any], int],
        split: BatchSplit,
        arrivals: Arrivals,
        elsewhere: Elsewhere | None = None,
        ahead: int = 8,
        here: int = 0,
        room: PrefetchLimit | None = None,
        on_made: Callable[[Mapping[str, int]], object] = lambda made: None,
        hold: bool = False,
        first: int = 0,
        timeout_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._number, self._batches = number, batches
        self._maker, self._number_of = maker, number_of
        self._start = maker.source.positions[0]
        self.split, self._on_made = split, on_made
        self._ahead, self._keeps_here, self._room = ahead, here, room
        self._most_here, self._held = 1 + ahead + here, 0
        self._arrivals, self._elsewhere = arrivals, elsewhere
        self._pins = arrivals if isinstance(arrivals, Pinned) else None
        self._here: Running | None = None
        self._planned: deque[Batch] = deque()
        self._inline: deque[Task] = deque()
        self._work: dict[int, PendingTask] = {}
        self._next_task, self._next_batch, self._draws = 0, first, first - 1
        self._as_left = True
        self._timeout_s, self._quiet_s, self._overdue, self._told = timeout_s, 0.0, False, False
        self._failed = set[str]()
        self._all_planned = False
        self._raised: Exception | None = None
        self.hold, self.waits, self._clock = hold, Waits(), clock

    def use(self, processes: Processes | Fed) -> None:
        """Have processes do what is done on this machine; without any the thread that iterates does it."""
        self.plan()
        for task in self._inline:
            self._expect(task)
        self._here = processes.start(self._arrivals, self._inline)
        self._inline.clear()

    # ------------------------------------------------------------------------------------- planning

    @property
    def planned(self) -> int:
        """Batches that are being made, or are made and not handed out."""
        return len(self._planned)

    @property
    def handed_out(self) -> int:
        """Batches, and errors in their place, with those before the first."""
        return self._planned[0].number if self._planned else self._next_batch

    @property
    def backlog(self) -> Backlog:
        """What is under way on either side."""
        samples = Counter[bool]()
        for work in self._work.values():
            samples[work.stretch is not None] += 0 if work.held else len(work.at)
        return Backlog(here=samples[False], elsewhere=samples[True])

    @property
    def ready(self) -> bool:
        """Whether others may be asked now."""
        return self._elsewhere is not None and self._elsewhere.ready

    @property
    def coming(self) -> bool:
        """Whether others are about to be ready."""
        return self._elsewhere is not None and self._elsewhere.coming

    def look(self) -> bool:
        """Whether others may be asked now; who has not been able to is asked to show that, if it is time."""
        if self._elsewhere is None or not self._planned or not self._planned[0].indices:
            return False
        batch = self._planned[0]
        indices = tuple(batch.indices[:1])
        return self._elsewhere.look(
            Task(
                number=-1,
                epoch=self._number,
                batch=batch.number,
                indices=indices,
                samples=tuple(map(self._number_of, indices)),
                whole=False,
                start=self._start,
            )
        )

    def returned(self, first: int = 0) -> float:
        """Share of what was to be made elsewhere that was not, of what is planned behind so many batches."""
        batches = list(self._planned)[first:]
        given = sum(batch.given for batch in batches)
        return sum(batch.returned for batch in batches) / given if given else 0.0

    def prepare(self, count: int, *, most_returned: float = 1.0) -> int:
        """Have that many batches made before the next one is handed out; how many there are.

        Args:
            count: With those that are planned.
            most_returned: Where more than this share of what was to be made elsewhere has come back, it is
                not waited for.
        """
        self._enter()
        self._plan_to(count)
        self._begin_here(count)
        ready = list(self._planned)[:count]
        while not all(batch.done for batch in ready) and not self._overdue:
            self._wait()
            if self.returned() > most_returned:
                break
            self._begin_here(count)  # what was to be made elsewhere may have come back
        self._as_left = True
        return len(ready)

    def plan(self) -> None:
        """Plan as far ahead as may be, and have everybody begin."""
        self._plan_beyond(1)

    def _plan_beyond(self, count: int) -> None:
        """The same beyond so many batches."""
        if self.hold:
            return
        most = max(self._ahead, self._keeps_here)
        if self._elsewhere is not None and self.split.ratio:
            wanted = max(most, self._keeps_here + self._elsewhere.slots)
            most = wanted if self._room is None else self._room.most(most, wanted)
        self._plan_to(count + most)

    def _plan_to(self, count: int) -> None:
        while len(self._planned) < count and not self._all_planned and self._raised is None:
            while not self._arrivals.empty():  # whatever has come since is done
                self._arrived(self._arrivals.get())
            number = self._planned[-1].number + 1 if self._planned else self._next_batch
            if self._draws == number:
                raise RuntimeError(
                    f"the sampler was interrupted at batch {number} of epoch {self._number}, which may be "
                    "lost: begin the epoch anew, or go on in it with load_state_dict(state_dict())"
                )
            self._draws = number
            try:
                indices = next(self._batches, None)
            except Exception as error:  # its own: raised where its batch would be
                self._draws, self._raised = number - 1, error
                return
            if indices is None:
                self._all_planned = True
            else:
                self._planned.append(Batch(number, indices))
                self._plan(self._planned[-1])

    def _plan(self, batch: Batch) -> None:
        """Have everybody begin."""
        count = len(batch.indices)
        goes = self.split(count) if self._elsewhere is not None else [False] * count
        away = [at for at, each in enumerate(goes) if each]
        stay = [at for at, each in enumerate(goes) if not each]
        if away:
            self._begin(batch, away, goes=True)
        if stay or not count:
            self._begin(batch, stay, goes=False)
        batch.begun = True

    def _enter(self) -> None:
        """Where this was not left as it leaves by itself, whatever may be lost is done once more."""
        if not self._as_left:
            self._work.clear()
            self._inline.clear()
            self._held = 0
            fresh = [each if each.done else Batch(each.number, each.indices) for each in self._planned]
            self._planned = deque(fresh)
            for batch in fresh:
                if not batch.done:
                    self._plan(batch)
        self._as_left = False

    def _leave(self, error: Exception) -> Exception:
        """With an error that is meant."""
        self._as_left = True
        return error

    def _begin(self, batch: Batch, places: Sequence[int], *, goes: bool) -> None:
        number, self._next_task = self._next_task, self._next_task + 1
        indices = tuple(batch.indices[at] for at in places)
        task = Task(
            number=number,
            epoch=self._number,
            batch=batch.number,
            indices=indices,
            samples=tuple(map(self._number_of, indices)),
            whole=len(places) == len(batch.indices) and (self.split.stretch.whole or not goes),
            start=self._start,
        )
        work = self._work[number] = PendingTask(
            task, batch, places, stretch=self.split.stretch if goes else None
        )
        batch.missing += 1
        batch.given += goes * len(places)
        if work.stretch is None:
            self._keep_here(work, task)
        elif work.stretch.start > self._start:
            self._do_here(task._replace(stop=work.stretch.start))
        else:
            self._give(work, work.stretch, None)

    def _give(self, work: PendingTask, stretch: Stretch, values: Sequence[Any] | None) -> None:
        """To others, from where ``values`` stand; to this machine where none of them takes it."""
        task = work.task._replace(start=stretch.start, stop=stretch.stop)
        self._expect(task)
        if self._elsewhere is not None and self._elsewhere.give(task, values):
            work.away = True
            work.batch.away += 1
        else:
            self._returned(work)

    def _returned(self, work: PendingTask) -> None:
        work.batch.returned += len(work.at)
        work.stretch = None
        self._keep_here(work, work.task)  # wherever it was, here the dataset can be had

    def _keep_here(self, work: PendingTask, task: Task) -> None:
        """The rest of it is done by this machine, when it is its turn."""
        work.batch.here, work.held = True, True
        work.batch.held.append(task)
        self._held += 1
        self._begin_here(self._most_here)

    def _begin_here(self, most: int) -> None:
        """What this machine is to make of so many batches, those that are handed out next.

        Batches are planned far ahead so that others are busy. Of what this machine makes itself few are ahead
        of the next one, as if there were no others: they are in shared memory, which is small.
        """
        for batch in self._planned:
            if not self._held or not most:
                return
            most -= batch.here
            for task in batch.held:
                self._work[task.number].held = False
                self._do_here(task)
            self._held -= len(batch.held)
            batch.held.clear()

    def _do_here(self, task: Task) -> None:
        if self._here is None:
            self._inline.append(task)
        else:
            self._expect(task)
            self._here.give(task)

    def _expect(self, task: Task) -> None:
        if self._pins is not None and task.joins:
            self._pins.expect(task.number)

    # ------------------------------------------------------------------------------------ handing out

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch, in the sampler's order.

        Raises:
            Exception: What the dataset raised for one of its samples, or the sampler for the batch; the next
                call goes on behind it.
            ProcessesEnded: If processes that were to make it have ended; the same.
            RuntimeError: If processes take longer than they may; the next call waits for the same batch.
        """
        self._enter()
        if self._told:  # and whoever goes on does without that batch
            self._told = False
            self._hand_out()
        self._begin_here(self._most_here)
        self.plan()
        if not self._planned and self.hold:
            self._plan_to(1)
        if not self._planned and self._raised is not None:
            error, self._raised = self._raised, None
            raise self._leave(error)
        if not self._planned:
            if self._here is not None:
                self._here.halt()
            raise self._leave(StopIteration())
        batch = self._planned[0]
        while not batch.done:
            if self._overdue:
                self._overdue = False
                raise self._leave(RuntimeError(f"DataLoader timed out after {self._timeout_s} seconds"))
            self._wait_for(batch)
        if isinstance(batch.error, ProcessesEnded):
            self._told = True
            raise self._leave(batch.error)
        self._begin_here(self._most_here + batch.here)
        self._plan_beyond(2)
        try:
            value = self._value(batch)
        except Exception as error:
            self._hand_out()
            self._as_left = True
            if isinstance(error, StopIteration):
                raise not_the_end(error) from error
            raise
        self._count_made(batch)
        self._as_left = True
        return self._hand_out(value)

    def _hand_out(self, value: Any = None) -> Any:
        """The value; from here on it has been."""
        self._next_batch = self._planned[0].number + 1  # which counts where nothing is planned any more
        return (value, self._planned.popleft())[0]

    def _count_made(self, batch: Batch) -> None:
        self._on_made(batch.made)
        self.waits.samples += len(batch.indices)
        self.waits.given += batch.given
        self.waits.returned += batch.returned
        if self._here is not None and HERE in batch.made:
            self._here.let_go(batch)

    def _value(self, batch: Batch) -> Any:
        """What is handed out.

        Raises:
            Exception: What stands in its place.
        """
        if batch.error is not None:
            raise batch.error
        if batch.whole:
            value = batch.value
        else:
            with apart():
                value = self._maker.join(batch.rows, epoch=self._number, batch=batch.number)
        if self._room is not None and self._elsewhere is not None:
            self._room.look(batch.number, value, batch.rows)
        return value if self._pins is None or batch.pinned else pinned(value)

    def _wait_for(self, batch: Batch) -> None:
        """For whatever comes next, at the expense of whoever keeps the batch waiting."""
        missing, away, began = batch.missing, batch.away, self._clock()
        idle = self._wait()
        wait_s = self._clock() - began
        if not away:
            self.waits.here_s += wait_s
        elif away == missing and idle:
            self.waits.elsewhere_s += wait_s
        else:
            self.waits.both_s += wait_s

    def _wait(self) -> bool:
        """For whatever comes next; where nothing has come, and nobody else does it, do some of it.

        Returns:
            Whether this thread had nothing to do meanwhile.
        """
        if self._inline and self._arrivals.empty():
            self._arrived(self._made_inline(self._inline.popleft()))
            return False
        began = self._clock()
        try:
            arrival = self._arrivals.get(True, min(LOOK_S, self._timeout_s or LOOK_S))
        except Empty:
            self._call_back()
            self._count(self._clock() - began)
        else:
            self._quiet_s, self._overdue = 0.0, False
            self._arrived(arrival)
        return True

    def _count(self, more_s: float) -> None:
        """Seconds in which nothing has come while this machine's processes were at something.

        As PyTorch's loader counts: only while somebody waits, and whatever comes begins anew.
        """
        if self._timeout_s and any(not (work.away or work.held) for work in self._work.values()):
            self._quiet_s += more_s
            if self._quiet_s >= self._timeout_s:
                self._quiet_s, self._overdue = 0.0, True

    def _call_back(self) -> None:
        """What others have had for far too long: they hang, and it is done here."""
        for number in self._elsewhere.late() if self._elsewhere is not None else ():
            work = self._work.pop(number, None)  # whatever still comes of it
            if work is None:
                continue  # it was begun anew by another number
            work.task = work.task._replace(number=self._next_task)
            self._next_task += 1
            self._work[work.task.number] = work
            work.away = False
            work.batch.away -= 1
            self._returned(work)

    def _made_inline(self, task: Task) -> Arrival:
        try:
            with apart():
                return Arrival(task.number, self._maker.make(task))
        except Exception as error:  # the dataset's own
            return Arrival(task.number, error=error, final=True)

    def _arrived(self, arrival: Arrival) -> None:
        work = self._work.get(arrival.number)
        if work is None:
            return  # it came late, and was done here
        stretch = work.stretch
        work.batch.away -= work.away
        was_away, work.away = work.away, False
        if arrival.error is not None:
            if arrival.final:
                self._finish(work, arrival)
            else:
                work.failed = arrival if arrival.blame is not None else work.failed
                self._returned(work)
        elif stretch is not None and not was_away:
            self._give(work, stretch, arrival.value)
        elif stretch is not None and stretch.stop < DONE:
            work.stretch, work.place = None, arrival.place
            self._keep_here(work, work.task._replace(start=stretch.stop, given=arrival.value))
        else:
            self._finish(work, arrival)

    def _finish(self, work: PendingTask, arrival: Arrival) -> None:
        del self._work[work.task.number]
        batch = work.batch
        if arrival.error is not None:
            if work.failed is not None:
                note(arrival.error, _told(work.failed))
            batch.error = batch.error or arrival.error
        else:
            if work.failed is not None:
                self._blame(work.failed)
            batch.made[arrival.place if work.place == HERE else work.place] += len(work.at)
            batch.take(work, arrival)
        batch.missing -= 1  # only now

    def _blame(self, failed: Arrival) -> None:
        """This machine has done what another one could not."""
        if failed.blame is not None:
            failed.blame()
        if failed.place not in self._failed:
            self._failed.add(failed.place)
            log.warning("made here in epoch %d, as it could not be %s", self._number, _told(failed))


def _told(failed: Arrival) -> str:
    """What was raised elsewhere, and where in the dataset's code."""
    trace = failed.error.trace if isinstance(failed.error, CodeFailed) else ""
    return f"at worker {failed.place}: {failed.error}\n{trace}".rstrip()
