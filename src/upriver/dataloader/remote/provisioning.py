"""The workers of a loader: their addresses, those that are started for it, and what they are asked for."""

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

from upriver.dataloader.datasets.declared import Declared
from upriver.dataloader.datasets.digests import Contents
from upriver.dataloader.datasets.divided import is_divided
from upriver.dataloader.datasets.worker_spec import ByName, InStore, SampleSpec
from upriver.dataloader.deferred_close import closed_with
from upriver.dataloader.local.workers import Maker
from upriver.dataloader.offload_stretch import name_of_stretch
from upriver.dataloader.prefetch_limit import num_bytes
from upriver.dataloader.remote.worker import LoaderWorker
from upriver.dataloader.remote.workers import Canary, Workers
from upriver.dataloader.tasks import Arrivals, Task
from upriver.errors import ConfigError, NotExact, UpriverError
from upriver.pipeline.mapstyle import DONE
from upriver.pipeline.seeding import apart
from upriver.profile.throughput_cache import RemoteResources, RemoteWorker, sample_key
from upriver.protocol import BY_DEFAULT
from upriver.protocol.tree import identical
from upriver.rpc.client import ServerClient
from upriver.rpc.worker_fleet import Fleet, Provider, Serves
from upriver.text import error_text

log = logging.getLogger("upriver")

MOST_NAMED = 5
"""Attributes that a reason names."""


class Hired:
    """Everyone who may make samples for a loader.

    Args:
        asked: What they are asked for.
        maker: Makes the same here.
        clients: Workers by their addresses.
        provider: Starts others, where there are to be.
        as_made: What a dataset that workers make by its name held when it was made here; None for others.
    """

    def __init__(
        self,
        asked: SampleSpec,
        maker: Maker,
        *,
        clients: Sequence[ServerClient],
        provider: Provider | None = None,
        as_made: Contents | None = None,
    ) -> None:
        self._as_made = as_made
        self.changed = ""
        """Why nobody is asked in this epoch, as the dataset is not the one that they make; else empty."""
        self._maker, self._asked = maker, asked
        self._workers = [LoaderWorker(client.url, client) for client in clients]
        self._provider = provider
        self._fleet = self._open()
        self._coming: Future[Sequence[str]] | None = None
        self._number, self._urls, self._epoch = 0, set[str](), 0
        self.joined = 0
        """Workers that have been started so far, and taken in."""
        self._at_work = weakref.WeakSet[Workers]()
        self._lock = threading.Lock()
        self._here_s = 0.0
        self._steady = isinstance(maker.source, Declared)  # whose stages draw by the sample alone
        closed_with(self, partial(_close, self._workers))

    @cached_property
    def form(self) -> str:
        """Of the first sample, and what collates it; empty where that sample cannot be made."""
        try:
            canary = self._canary(self._first(self._epoch))
        except Exception as error:  # the dataset's own; samples that are asked for may be others
            log.info("sample 0 cannot be made: %s", error_text(error))
            return ""
        return f"{sample_key(canary.value)} {self._asked.collates}"

    @property
    def pipeline(self) -> str:
        """Names what is asked of workers, for figures that are kept."""
        return self._asked.key

    @property
    def joins(self) -> bool:
        """Whether workers can collate."""
        return self._asked.joins

    @property
    def resources(self) -> RemoteResources:
        """Who makes samples; those that are started here have another address each time."""
        workers = [
            RemoteWorker(address="started" if worker.url in self._urls else worker.url)
            for worker in self._workers
        ]
        return RemoteResources(workers=tuple(workers), candidates=self.candidates)

    @cached_property
    def candidates(self) -> tuple[str, ...]:
        """What can be offloaded and may be worth it, all of it last.

        p1 where samples are seen to be read in a step of its own, p3 where workers find what collates; and of
        a dataset of ours, what ends where fewer bytes cross than anywhere later, as its first sample tells,
        if that can be made.
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
        """Bytes of a sample at each position but the first, each stage run once; as many where one fails."""
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
        """Why some are not asked any more, or failed last, by address."""
        reasons = {worker.url: self.changed or worker.reason for worker in self._workers}
        if self.changed and not reasons:
            return {"workers": self.changed}
        return {url: reason for url, reason in reasons.items() if reason}

    @property
    def grows(self) -> bool:
        """Whether it was left open how many there are to be."""
        return self._provider is not None and self._provider.number is None

    @property
    def released(self) -> bool:
        """Whether those that were started have been ended, and can be started again."""
        return self._provider is not None and self._fleet is None

    @property
    def count(self) -> int:
        """How many are asked."""
        return sum(not worker.why_not for worker in self._workers)

    @property
    def most(self) -> int:
        """How many there may be, with those that can be had now in addition."""
        return min(self._most, self.count + max(0, self._fleet.room())) if self._fleet else self.count

    def work(self, epoch: int, arrivals: Arrivals) -> Workers:
        """Those who make samples of an epoch; some are started first, where that is to be."""
        self._epoch = epoch
        self._start()
        workers = Workers(
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
        """Whether the dataset is as workers have it; where it is not nobody is to be asked in this epoch."""
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
        """Start what is missing to so many while training goes on; `come` takes them in."""
        self._number = number
        missing = number - len(self._urls)
        if self._fleet is not None and self._coming is None and missing > 0:
            self._coming = _started(self._fleet, missing)

    def come(self) -> None:
        """Take in those that have been started in the meantime."""
        if self._coming is not None and self._coming.done():
            urls, self._coming = self._coming.result(), None
            self._take_in(urls)

    def release(self, why: str) -> None:
        """End those that were started.

        Args:
            why: They are not asked any more.
        """
        fleet, self._fleet, self._coming = self._fleet, None, None
        if fleet is not None:
            for worker in self._workers:
                worker.why_not = worker.why_not or why
            fleet.stop()

    def hire_again(self) -> None:
        """Start one while training goes on, after all were released; where that cannot be, nobody is."""
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
        closed_with(self, fleet.stop, at_exit=True)
        return fleet

    def _start(self) -> None:
        """Start as many as there are to be, or one where that is to be measured; replace those that ended."""
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
        """A task for one sample."""
        start = self._maker.source.positions[0]
        return Task(number=-1, epoch=epoch, batch=0, indices=(0,), samples=(0,), whole=False, start=start)

    def _canary(self, task: Task) -> Canary:
        """The first sample of a task, made here.

        Raises:
            NotExact: If it is another one each time.
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
        """Whether a sample is the same once more: here and there may agree on it at first, from one seed.

        Raises:
            NotExact: If it is another one.
        """
        again = self._maker.make(task)
        with contextlib.suppress(ConfigError):  # what cannot be sent is no worker's anyway
            if not identical(again, value):
                raise NotExact(
                    f"sample {task.samples[0]} is another one each time that it is made: the dataset draws "
                    "from a generator of its own, or counts"
                )


def _what(asked: SampleSpec) -> Serves:
    """What workers that are started are to have: the store of a dataset of ours; otherwise code."""
    if isinstance(asked, InStore):
        store = asked.source.dataset.store
        return Serves(stores={store.name: store.uri})
    assert isinstance(asked, ByName)
    names = (asked.name, asked.collate)
    return Serves(allow=sorted({name for name in names if name is not None and name != BY_DEFAULT}))


def _started(fleet: Fleet, count: int) -> Future[Sequence[str]]:
    """Addresses of workers that a thread starts; of none where that fails, as training goes on without."""
    future = Future[Sequence[str]]()

    def work() -> None:
        urls: Sequence[str] = ()
        try:
            urls = fleet.start(count)
        except Exception as error:  # whatever it is, it costs their help and nothing else
            log.warning("no further workers: %s", error)
        finally:
            future.set_result(urls)

    threading.Thread(target=work, name="upriver-hiring", daemon=True).start()
    return future


def _close(workers: Sequence[LoaderWorker]) -> None:
    for worker in workers:
        worker.client.close()
