"""The workers of a loader: their addresses, those that it starts itself, and what they are asked for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from upriver.client.embedded import EmbeddedServer
from upriver.client.transport import ServerClient
from upriver.dataloader.local import Maker
from upriver.dataloader.named import NamedDataset, name_of
from upriver.dataloader.plan import CANDIDATES, Candidate
from upriver.dataloader.remote import Canary, Source, Worker, Workers
from upriver.dataloader.tasks import Arrivals, Task
from upriver.pipeline.seeding import apart
from upriver.protocol import BY_DEFAULT


class Hired:
    """Everyone who may make samples for a loader.

    Args:
        dataset: By name, so that they can.
        maker: Makes the same here.
        collate: What collates; None where batches are no lists of samples.
        clients: Workers by their addresses.
        local: How many to start on this machine.
    """

    def __init__(
        self,
        dataset: NamedDataset,
        maker: Maker,
        *,
        collate: Callable[[list[Any]], Any] | None,
        clients: Sequence[ServerClient],
        local: int = 0,
    ) -> None:
        self._maker = maker
        self._source = Source(
            name=dataset.name,
            arguments=dataset.arguments,
            seed=maker.source.seed,
            collate=name_of(collate) if collate is not None else None,
        )
        self._workers = [Worker(client.url, client) for client in clients]
        self._local, self._started = local, list[EmbeddedServer]()
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._workers)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """What can be offloaded: p1 where the dataset is divided, p3 where workers find what collates."""
        possible = {"p1": self._maker.source.divided, "p2": True, "p3": self._source.collate is not None}
        return tuple(name for name in CANDIDATES if possible[name])

    @property
    def why_not(self) -> Mapping[str, str]:
        """Why some are not asked, by address."""
        return {worker.url: worker.why_not for worker in self._workers if worker.why_not}

    def work(self, epoch: int, arrivals: Arrivals) -> Workers:
        """Those who make samples of an epoch; some are started first, where that is to be."""
        self._start()
        return Workers(
            self._workers,
            self._source,
            arrivals,
            canary=self._canary(epoch),
            lock=self._lock,
            owner=self,
        )

    def _start(self) -> None:
        """Workers on this machine, which end with this object."""
        names = (self._source.name, self._source.collate)
        allow = {name.partition(":")[0] for name in names if name is not None and name != BY_DEFAULT}
        while len(self._started) < self._local:
            self._started.append(EmbeddedServer.start_worker(sorted(allow), workers=1))
            url = self._started[-1].url
            self._workers.append(Worker(url, ServerClient(url)))

    def _canary(self, epoch: int) -> Canary | None:
        """A sample of an epoch; None where everyone has shown that it makes the same."""
        if all(worker.proved or worker.why_not for worker in self._workers):
            return None
        task = Task(number=-1, epoch=epoch, batch=0, indices=(0,), samples=(0,), whole=False)
        with apart():
            return Canary(task=task, value=self._maker.make(task))


def _close(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.client.close()
