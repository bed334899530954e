"""Run one epoch: plan batches in the sampler's order, have them made, and hand them out in that order.

Only the training process plans. The contents of a batch never depend on which machine makes it, how fast, or
which one fails. The iterating thread owns all state; results of other threads and machines arrive through one
queue.

The iterating thread may be interrupted between any two lines (Ctrl-C, an alarm), and its caller may continue.
One step therefore marks a batch as done, and one step hands it out. After an interruption the next call
restarts everything that is not done.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Empty
from typing import Any, Protocol

from upriver.control.share_controller import EpochWaits
from upriver.dataloader.local.pinned_memory import PinningQueue, pinned
from upriver.dataloader.local.workers import (
    FedProcesses,
    LoaderProcesses,
    ProcessesEnded,
    RunningProcesses,
    SampleMaker,
)
from upriver.dataloader.offload_stretch import OffloadStretch
from upriver.dataloader.pending_batch import Batch, PendingTask
from upriver.dataloader.prefetch_limit import PrefetchLimit
from upriver.dataloader.share import Backlog, OffloadShare
from upriver.dataloader.tasks import HERE, Arrival, Arrivals, Task, sample_number
from upriver.errors import CodeFailed
from upriver.pipeline.mapstyle import not_the_end, note
from upriver.pipeline.seeding import apart
from upriver.types import DONE

log = logging.getLogger("upriver")

LOOK_S = 1.0
"""Seconds without an arrival after which overdue tasks are looked for."""


class Elsewhere(Protocol):
    """Other machines that do tasks."""

    @property
    def slots(self) -> int:
        """Number of tasks that the machines can hold at once."""

    def give(self, task: Task, raw: Sequence[Any] | None) -> bool:
        """Give a task to the machines, and return whether one accepts it.

        An accepted task always arrives in `Arrivals`, as a result or an error.

        Args:
            raw: Samples at the task's start position; None if the machine reads them.
        """

    @property
    def ready(self) -> bool:
        """Return whether a machine that has proved it can do tasks may be asked now."""

    @property
    def coming(self) -> bool:
        """Return whether a machine is about to prove that it can do tasks."""

    def look(self, task: Task) -> bool:
        """Return whether a machine is `ready`; have machines that are not prove themselves.

        Args:
            task: Task whose first sample is used for the proof, if one is needed.
        """

    def late(self) -> Sequence[int]:
        """Return the numbers of tasks that their machines do not answer; the epoch makes them here."""


class KeptAhead(Protocol):
    """Samples that this machine keeps on their way."""

    @property
    def position(self) -> int:
        """Position at which samples are kept."""

    def holds(self, samples: Sequence[int], epoch: int) -> list[bool]:
        """Return for each sample whether it is kept."""


class Epoch:
    """Iterator that plans and hands out one epoch.

    Args:
        batches: Indices of each batch, from the sampler; drawn one batch at a time during planning.
        maker: Makes the samples that no other machine makes.
        arrivals: Queue of results from other threads. If it pins batches, so does the epoch with those that
            it makes.
        elsewhere: Machines that do the offloaded tasks; None if there are none.
        ahead: Minimum number of batches planned beyond the one handed out next.
        here: Number of batches that keep this machine busy; the tasks that others can hold at once are added.
            This machine still makes, whole or in part, at most ``ahead + here`` batches beyond the next one.
        room: Memory limit for batches that others make; None for no limit.
        on_made: Called for each batch handed out with its number of samples by maker.
        hold: Whether nothing is planned before it is asked for.
        first: Number of the first batch.
        timeout_s: Seconds without an arrival, while this machine's processes owe a result, until a timeout; 0
            for no limit.
        kept: Samples that cost this machine little, so that others are made elsewhere first; None if none
            are.

    Attributes:
        hold: Whether planning is paused.
    """

    def __init__(
        self,
        number: int,
        batches: Iterator[tuple[Any, ...]],
        *,
        maker: SampleMaker,
        split: OffloadShare,
        arrivals: Arrivals,
        elsewhere: Elsewhere | None = None,
        ahead: int = 8,
        here: int = 0,
        room: PrefetchLimit | None = None,
        on_made: Callable[[Mapping[str, int]], object] = lambda made: None,
        hold: bool = False,
        first: int = 0,
        timeout_s: float = 0.0,
        kept: KeptAhead | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._number, self._batches = number, batches
        self._maker = maker
        self._start = maker.source.positions[0]
        self.split, self._on_made = split, on_made
        self._ahead, self._keeps_here, self._room = ahead, here, room
        self._most_here, self._held = 1 + ahead + here, 0
        self._arrivals, self._elsewhere = arrivals, elsewhere
        self._pins = arrivals if isinstance(arrivals, PinningQueue) else None
        self._here: RunningProcesses | None = None
        self._kept = kept
        self._planned: deque[Batch] = deque()
        self._inline: deque[Task] = deque()
        self._work: dict[int, PendingTask] = {}
        self._next_task, self._next_batch, self._draws = 0, first, first - 1
        self._as_left = True
        self._timeout_s, self._quiet_s, self._overdue, self._told = timeout_s, 0.0, False, False
        self._failed = set[str]()
        self._all_planned = False
        self._raised: Exception | None = None
        self.hold, self.waits, self._clock = hold, EpochWaits(), clock

    def use(self, processes: LoaderProcesses | FedProcesses) -> None:
        """Have loader processes do this machine's tasks; without any the iterating thread does them."""
        self.plan()
        for task in self._inline:
            self._expect(task)
        self._here = processes.start(self._arrivals, self._inline)
        self._inline.clear()

    # ------------------------------------------------------------------------------------- planning

    @property
    def planned(self) -> int:
        """Return the number of batches that are planned and not handed out."""
        return len(self._planned)

    @property
    def handed_out(self) -> int:
        """Return the number of batches and errors handed out, including the batches before the first."""
        return self._planned[0].number if self._planned else self._next_batch

    @property
    def backlog(self) -> Backlog:
        """Return the number of samples under way here and elsewhere."""
        samples = Counter[bool]()
        for work in self._work.values():
            samples[work.stretch is not None] += 0 if work.held else len(work.at)
        return Backlog(here=samples[False], elsewhere=samples[True])

    @property
    def ready(self) -> bool:
        """Return whether other machines may be asked now."""
        return self._elsewhere is not None and self._elsewhere.ready

    @property
    def coming(self) -> bool:
        """Return whether other machines are about to be ready."""
        return self._elsewhere is not None and self._elsewhere.coming

    def look(self) -> bool:
        """Return whether other machines may be asked now; have those that are due for it prove themselves."""
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
                samples=tuple(map(sample_number, indices)),
                whole=False,
                start=self._start,
            )
        )

    def returned(self, first: int = 0) -> float:
        """Return the share of samples meant to be made elsewhere that were not, from batch ``first`` on."""
        batches = list(self._planned)[first:]
        given = sum(batch.given for batch in batches)
        return sum(batch.returned for batch in batches) / given if given else 0.0

    def prepare(self, count: int, *, most_returned: float = 1.0) -> int:
        """Have ``count`` batches made before the next one is handed out; return how many there are.

        Args:
            count: Number of batches, including those already planned.
            most_returned: Stop waiting once more than this share of the samples meant to be made elsewhere
                has come back.
        """
        self._enter()
        self._plan_to(count)
        self._begin_here(count)
        ready = list(self._planned)[:count]
        while not all(batch.done for batch in ready) and not self._overdue:
            self._wait()
            if self.returned() > most_returned:
                break
            self._begin_here(count)  # samples meant to be made elsewhere may have come back
        self._as_left = True
        return len(ready)

    def plan(self) -> None:
        """Plan as many batches ahead as allowed, and start their tasks."""
        self._plan_beyond(1)

    def _plan_beyond(self, count: int) -> None:
        """Plan as many batches ahead as allowed beyond the next ``count``."""
        if self.hold:
            return
        most = max(self._ahead, self._keeps_here)
        if self._elsewhere is not None and self.split.ratio:
            wanted = max(most, self._keeps_here + self._elsewhere.slots)
            most = wanted if self._room is None else self._room.most(most, wanted)
        self._plan_to(count + most)

    def _plan_to(self, count: int) -> None:
        while len(self._planned) < count and not self._all_planned and self._raised is None:
            while not self._arrivals.empty():  # count all arrivals as done first
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
            except Exception as error:  # the sampler's own error is raised in the place of its batch
                self._draws, self._raised = number - 1, error
                return
            if indices is None:
                self._all_planned = True
            else:
                self._planned.append(Batch(number, indices))
                self._plan(self._planned[-1])

    def _plan(self, batch: Batch) -> None:
        """Start the tasks of a batch, here and elsewhere."""
        count = len(batch.indices)
        backlog = self.backlog if self.split.even else Backlog(here=0, elsewhere=0)
        goes = self.split.split(count, backlog) if self._elsewhere is not None else [False] * count
        if any(goes) and self._kept is not None:
            parts = self._parted(batch, goes, self._kept)
        else:
            parts = {
                self.split.stretch: [at for at, each in enumerate(goes) if each],
                None: [at for at, each in enumerate(goes) if not each],
            }
        for stretch, places in parts.items():
            if places or (stretch is None and not count):
                self._begin(batch, places, stretch)
        batch.begun = True

    def _parted(
        self, batch: Batch, goes: Sequence[bool], kept: KeptAhead
    ) -> dict[OffloadStretch | None, list[int]]:
        """Return a batch's places by the stages that run elsewhere; None for those that are made here.

        As many samples go elsewhere as ``goes`` says, first those that are not kept. Kept ones start there at
        the position at which they are kept.
        """
        stretch, count = self.split.stretch, len(goes)
        held = kept.holds(tuple(map(sample_number, batch.indices)), self._number)
        if stretch.whole:
            held = [all(held)] * count
        order = sorted(range(count), key=lambda at: (held[at], not goes[at]))
        away = set(order[: sum(goes)])
        parts: dict[OffloadStretch | None, list[int]] = {stretch: [], None: []}
        for at in range(count):
            left = stretch.of_kept(kept.position, self._start) if held[at] else stretch
            parts.setdefault(left if at in away else None, []).append(at)
        return parts

    def _enter(self) -> None:
        """Restart every batch that is not done if the last call was interrupted, as its tasks may be lost."""
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
        """Return an error that is raised on purpose, after marking this call as left in order."""
        self._as_left = True
        return error

    def _begin(self, batch: Batch, places: Sequence[int], stretch: OffloadStretch | None) -> None:
        """Start a task for some samples of a batch.

        Args:
            stretch: Stages that run elsewhere; None if none do.
        """
        number, self._next_task = self._next_task, self._next_task + 1
        indices = tuple(batch.indices[at] for at in places)
        task = Task(
            number=number,
            epoch=self._number,
            batch=batch.number,
            indices=indices,
            samples=tuple(map(sample_number, indices)),
            whole=len(places) == len(batch.indices) and (stretch is None or stretch.whole),
            start=self._start,
        )
        work = self._work[number] = PendingTask(task, batch, places, stretch=stretch)
        batch.missing += 1
        if stretch is None:
            self._keep_here(work, task)
            return
        batch.given += len(places)
        if stretch.start > self._start:
            self._do_here(task._replace(stop=stretch.start))
        else:
            self._give(work, stretch, None)

    def _give(self, work: PendingTask, stretch: OffloadStretch, values: Sequence[Any] | None) -> None:
        """Send a task, with ``values`` at its start position, to others; do it here if none accepts it."""
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
        self._keep_here(work, work.task)  # the dataset is at hand here, wherever the task was

    def _keep_here(self, work: PendingTask, task: Task) -> None:
        """Keep the rest of a task for this machine until its batch's turn."""
        work.batch.here, work.held = True, True
        work.batch.held.append(task)
        self._held += 1
        self._begin_here(self._most_here)

    def _begin_here(self, most: int) -> None:
        """Start this machine's tasks of the next ``most`` batches.

        Batches are planned far ahead to keep other machines busy. Of its own work this machine starts only a
        few batches ahead, as without workers: they lie in shared memory, which is small.
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
        """Return the next batch, in the sampler's order.

        Raises:
            Exception: The dataset's error for one of the samples, or the sampler's for the batch. The next
                call continues after that batch.
            ProcessesEnded: If the processes that were to make the batch have ended. The next call continues
                after that batch.
            RuntimeError: If the processes exceed the timeout. The next call waits for the same batch.
        """
        self._enter()
        if self._told:  # the caller continues without that batch
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
        """Remove the batch from the plan and return its value in one step."""
        self._next_batch = self._planned[0].number + 1  # needed where nothing is planned any more
        return (value, self._planned.popleft())[0]

    def _count_made(self, batch: Batch) -> None:
        self._on_made(batch.made)
        self.waits.samples += len(batch.indices)
        self.waits.given += batch.given
        self.waits.returned += batch.returned
        if self._here is not None and HERE in batch.made:
            self._here.let_go(batch)

    def _value(self, batch: Batch) -> Any:
        """Return the value to hand out, or raise the error in the batch's place."""
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
        """Wait for the next arrival, and count the time against the side that delays the batch."""
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
        """Wait for the next arrival, or make one of this thread's own tasks if none has arrived.

        Returns:
            Whether this thread was idle meanwhile.
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
        """Add to the seconds without an arrival while this machine's processes have tasks.

        PyTorch's loader counts alike: only while the caller waits, and each arrival resets the count.
        """
        if self._timeout_s and any(not (work.away or work.held) for work in self._work.values()):
            self._quiet_s += more_s
            if self._quiet_s >= self._timeout_s:
                self._quiet_s, self._overdue = 0.0, True

    def _call_back(self) -> None:
        """Take back tasks that other machines have held for far too long, and do them here."""
        for number in self._elsewhere.late() if self._elsewhere is not None else ():
            work = self._work.pop(number, None)  # ignore any later result
            if work is None:
                continue  # the task was restarted under another number
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
        except Exception as error:  # the dataset's own error
            return Arrival(task.number, error=error, final=True)

    def _arrived(self, arrival: Arrival) -> None:
        work = self._work.get(arrival.number)
        if work is None:
            return  # the result is late, and the task was done here
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
        batch.missing -= 1  # only now may the batch count as done

    def _blame(self, failed: Arrival) -> None:
        """Blame the machine that could not do a task which this machine has done."""
        if failed.blame is not None:
            failed.blame()
        if failed.place not in self._failed:
            self._failed.add(failed.place)
            log.warning("made here in epoch %d, as it could not be %s", self._number, _told(failed))


def _told(failed: Arrival) -> str:
    """Return the error that was raised elsewhere, with its trace in the dataset's code."""
    trace = failed.error.trace if isinstance(failed.error, CodeFailed) else ""
    return f"at worker {failed.place}: {failed.error}\n{trace}".rstrip()
