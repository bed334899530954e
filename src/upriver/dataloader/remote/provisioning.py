"""Manage a loader's workers: those with addresses, and those started for it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

from upriver._threads.closing import close_later
from upriver._threads.executor import DaemonExecutor
from upriver.dataloader.datasets.declared import Declared
from upriver.dataloader.datasets.digests import DatasetSnapshot
from upriver.dataloader.datasets.divided import is_divided
from upriver.dataloader.datasets.worker_spec import ByName, InStore, SampleSpec
from upriver.dataloader.local.workers import SampleMaker
from upriver.dataloader.offload_stretch import name_of_stretch
from upriver.dataloader.prefetch_limit import num_bytes
from upriver.dataloader.remote.dispatcher import Canary, WorkerDispatcher
from upriver.dataloader.remote.worker_choice import LoaderWorker
from upriver.dataloader.tasks import Arrivals, Task
from upriver.errors import ConfigError, NotExact, UpriverError
from upriver.pipeline.seeding import apart
from upriver.profile.throughput_cache import RemoteResources, RemoteWorker, sample_key
from upriver.protocol import BY_DEFAULT
from upriver.protocol.tree import identical
from upriver.rpc.client import ServerClient
from upriver.rpc.worker_fleet import Fleet, Provider, Serves
from upriver.text import error_text
from upriver.types import DONE

log = logging.getLogger("upriver")

MOST_NAMED = 5
"""Maximum number of attributes that a reason names."""


class ProvisionedWorkers:
    """All workers that may make samples for a loader.

    Args:
        maker: Makes the same samples here.
        provider: Starts workers; None if the user gave addresses.
        as_made: Contents of a dataset by name when it was made here; None for other datasets.
    """

    def __init__(
        self,
        asked: SampleSpec,
        maker: SampleMaker,
        *,
        clients: Sequence[ServerClient],
        provider: Provider | None = None,
        as_made: DatasetSnapshot | None = None,
    ) -> None:
        self._as_made = as_made
        self.changed = ""
        """Reason why no worker is asked in this epoch, as the dataset differs from theirs; else empty."""
        self._maker, self._asked = maker, asked
        self._workers = [LoaderWorker(client.url, client) for client in clients]
        self._provider = provider
        self._fleet = self._open()
        self._coming: Future[Sequence[str]] | None = None
        self._number, self._urls, self._epoch = 0, set[str](), 0
        self.joined = 0
        """Number of workers started and added so far."""
        self._at_work = weakref.WeakSet[WorkerDispatcher]()
        self._lock = threading.Lock()
        self._here_s = 0.0
        self._steady = isinstance(maker.source, Declared)  # its stages draw by the sample alone
        close_later(self, partial(_close, self._workers))

    @cached_property
    def form(self) -> str:
        """Return a key of the first sample's form and collate function; empty if it cannot be made."""
        try:
            canary = self._canary(self._first(self._epoch))
        except Exception as error:  # the dataset's own error; requested samples may be others
            log.info("sample 0 cannot be made: %s", error_text(error))
            return ""
        return f"{sample_key(canary.value)} {self._asked.collates}"

    @property
    def pipeline(self) -> str:
        """Return a key of what workers make, for stored measurements."""
        return self._asked.key

    @property
    def joins(self) -> bool:
        """Return whether workers can collate."""
        return self._asked.joins

    @property
    def resources(self) -> RemoteResources:
        """Return the workers as a key, without the addresses of started ones, which differ each time."""
        workers = [
            RemoteWorker(address="started" if worker.url in self._urls else worker.url)
            for worker in self._workers
        ]
        return RemoteResources(workers=tuple(workers), candidates=self.candidates)

    @cached_property
    def candidates(self) -> tuple[str, ...]:
        """Return the candidates that may be worth offloading, the largest last.

        p1 is one if reading is seen to be a step of its own, and p3 if workers find the collate function. An
        `upriver.Dataset` adds candidates that end where fewer bytes cross than anywhere later, as seen with
        its first sample, if that can be made.
        """
        source = self._maker.source
        found = ["p1"] if len(source.stages) > 1 and is_divided(source) else []
        if isinstance(source, Declared):
            stops, crossing = source.positions[2:], self._crossing()[1:]
            found += [
                name_of_stretch(source.positions[0], stop, source.positions, source.stages)
                for at, stop in enumerate(stops[:-1])
                if crossing[at] < min(crossing[at + 1 :])
            ]
        return (*found, "p2", "p3") if self._asked.joins else (*found, "p2")

    def _crossing(self) -> list[int]:
        """Return a sample's bytes at each position but the first; zeros if a stage fails."""
        positions = self._maker.source.positions
        task, rows, found = self._first(0), None, list[int]()
        try:
            with apart():
                for start, stop in pairwise(positions):
                    rows = self._maker.make(task._replace(start=start, stop=stop, given=rows))
                    found.append(num_bytes(rows))
        except Exception as error:
            log.info("sample 0 does not tell what crosses: %s", error_text(error))
            return [0] * (len(positions) - 1)
        return found

    @property
    def why_not(self) -> Mapping[str, str]:
        """Return why workers are not asked any more, or their last failure, by address."""
        reasons = {worker.url: self.changed or worker.reason for worker in self._workers}
        if self.changed and not reasons:
            return {"workers": self.changed}
        return {url: reason for url, reason in reasons.items() if reason}

    @property
    def nobody(self) -> bool:
        """Return whether all workers have failed, and none has made the canary since."""
        return bool(self._workers) and all(w.reason and not w.proved for w in self._workers)

    @property
    def grows(self) -> bool:
        """Return whether the number of workers was left open."""
        return self._provider is not None and self._provider.number is None

    @property
    def released(self) -> bool:
        """Return whether the started workers have been ended, and can be started again."""
        return self._provider is not None and self._fleet is None

    @property
    def count(self) -> int:
        """Return the number of workers that are asked."""
        return sum(not worker.why_not for worker in self._workers)

    @property
    def most(self) -> int:
        """Return the maximum number of workers, including those that can be started now."""
        return min(self._most, self.count + max(0, self._fleet.room())) if self._fleet else self.count

    def work(self, epoch: int, arrivals: Arrivals) -> WorkerDispatcher:
        """Return the workers of an epoch, after starting some if needed."""
        self._epoch = epoch
        self._start()
        workers = WorkerDispatcher(
            self._workers,
            self._asked,
            arrivals,
            canary=self._canary,
            lock=self._lock,
            here_s=self._here_s,
            owner=self,
        )
        self._at_work.add(workers)
        return workers

    def is_as_made(self) -> bool:
        """Return whether the dataset still equals the workers'; if not, none is asked in this epoch."""
        if self._as_made is None:
            return True
        self._as_made.learn(lambda: self._made_apart(self._first(0)))
        names, before = self._as_made.changed(), self.changed
        self.changed = ""
        if names:
            some = ", ".join(names[:MOST_NAMED]) + (", …" if len(names) > MOST_NAMED else "")
            self.changed = (
                f"{self._asked.name} was changed after it had been made ({some}), and workers make it by its "
                "name, as its constructor leaves it: all samples are made here"
            )
            if self.changed != before:
                log.warning("%s", self.changed)
        return not names

    def _made_apart(self, task: Task) -> Any:
        with apart():
            return self._maker.make(task)

    # ------------------------------------------------------------------------------ those that are started

    def grow_to(self, number: int) -> None:
        """Start the workers missing to ``number`` while training runs; `come` adds them."""
        self._number = number
        missing = number - len(self._urls)
        if self._fleet is not None and self._coming is None and missing > 0:
            self._coming = _started(self._fleet, missing)

    def come(self) -> None:
        """Add the workers that have been started meanwhile."""
        if self._coming is not None and self._coming.done():
            urls, self._coming = self._coming.result(), None
            self._take_in(urls)

    def release(self, why: str) -> None:
        """End the workers that were started.

        Args:
            why: Reason why they are not asked any more.
        """
        fleet, self._fleet, self._coming = self._fleet, None, None
        if fleet is not None:
            for worker in self._workers:
                worker.why_not = worker.why_not or why
            fleet.stop()

    def hire_again(self) -> None:
        """Start one worker while training runs, after all were released; if that fails, none is asked."""
        try:
            self._fleet = self._open()
        except UpriverError as error:
            log.warning("no worker can be started again: %s", error)
            self._provider = None
        self._urls.clear()
        self.grow_to(1)

    def _open(self) -> Fleet | None:
        if self._provider is None:
            return None
        fleet = self._provider.open(_what(self._asked))
        close_later(self, fleet.stop, at_exit=True)
        return fleet

    def _start(self) -> None:
        """Start the given number of workers, or one for measuring; replace those that ended."""
        if self._fleet is None or self._provider is None:
            return
        if not self._number:
            number = self._provider.number or 1
            self._take_in(self._fleet.start(number))
            self._number = number
            return
        self.come()
        lost = set(self._fleet.lost())
        for worker in self._workers:
            if worker.url in lost:
                worker.why_not = worker.why_not or "it has ended"
        self._urls -= lost
        self.grow_to(self._number)

    def _take_in(self, urls: Sequence[str]) -> None:
        token = self._fleet.token if self._fleet is not None else None
        processes = self._fleet.processes if self._fleet is not None else 1
        come = [LoaderWorker(url, ServerClient(url, token=token), processes=processes) for url in urls]
        self._workers.extend(come)
        self._urls.update(urls)
        self.joined += len(come)
        for workers in list(self._at_work):
            workers.add(come)

    @property
    def _most(self) -> int:
        return self._provider.most if self._provider is not None else 0

    def _first(self, epoch: int) -> Task:
        """Return a task for one sample."""
        start = self._maker.source.positions[0]
        return Task(number=-1, epoch=epoch, batch=0, indices=(0,), samples=(0,), whole=False, start=start)

    def _canary(self, task: Task) -> Canary:
        """Make the first sample of a task here.

        Raises:
            NotExact: If it differs each time.
        """
        start = self._maker.source.positions[0]
        one = task._replace(
            number=-1,
            batch=0,
            indices=task.indices[:1],
            samples=task.samples[:1],
            whole=False,
            start=start,
            stop=DONE,
            given=None,
        )
        began_s = time.monotonic()
        with apart():
            value = self._maker.make(one)
            self._here_s = time.monotonic() - began_s
            if not self._steady:
                self._check_again(one, value)
        self._steady = True
        return Canary(task=one, value=value, seconds=self._here_s)

    def _check_again(self, task: Task, value: Any) -> None:
        """Check that a sample is the same when made again, as one seed may make both sides agree at first."""
        again = self._maker.make(task)
        with contextlib.suppress(ConfigError):  # no worker makes values that cannot be sent
            if not identical(again, value):
                raise NotExact(
                    f"sample {task.samples[0]} differs each time it is made: the dataset draws from its own "
                    "generator, or counts"
                )


def _what(asked: SampleSpec) -> Serves:
    """Return what started workers serve: the store of an `upriver.Dataset`, or else code."""
    if isinstance(asked, InStore):
        store = asked.source.dataset.store
        return Serves(stores={store.name: store.uri})
    assert isinstance(asked, ByName)
    names = (asked.name, asked.collate)
    return Serves(allow=sorted({name for name in names if name is not None and name != BY_DEFAULT}))


def _started(fleet: Fleet, count: int) -> Future[Sequence[str]]:
    """Start workers in a thread, and return a future of their addresses; empty if the start fails."""

    def work() -> Sequence[str]:
        try:
            return fleet.start(count)
        except Exception as error:  # any error costs only the workers' help
            log.warning("no further workers: %s", error)
            return ()

    executor = DaemonExecutor(1, name="hiring")
    future = executor.submit(work)
    executor.shutdown(wait=False)
    return future


def _close(workers: Sequence[LoaderWorker]) -> None:
    for worker in workers:
        worker.client.close()
