"""The workers of a loader: their addresses, those that it starts itself, and what they are asked for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property

from upriver.client.embedded import EmbeddedServer
from upriver.client.transport import ServerClient
from upriver.dataloader.auto import num_bytes
from upriver.dataloader.declared import Declared
from upriver.dataloader.local import Maker
from upriver.dataloader.plan import name_of_stretch
from upriver.dataloader.remote import Asked, ByName, Canary, InStore, Worker, Workers
from upriver.dataloader.tasks import Arrivals, Task
from upriver.pipeline.seeding import apart
from upriver.protocol import BY_DEFAULT


class Hired:
    """Everyone who may make samples for a loader.

    Args:
        asked: What they are asked for.
        maker: Makes the same here.
        clients: Workers by their addresses.
        local: How many to start on this machine.
    """

    def __init__(
        self,
        asked: Asked,
        maker: Maker,
        *,
        clients: Sequence[ServerClient],
        local: int = 0,
    ) -> None:
        self._maker, self._asked = maker, asked
        self._workers = [Worker(client.url, client) for client in clients]
        self._local, self._started = local, list[EmbeddedServer]()
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._workers)

    @cached_property
    def candidates(self) -> tuple[str, ...]:
        """What can be offloaded and may be worth it, all of it last.

        p1 where samples are read in a step of its own, p3 where workers find what collates; and of a dataset
        of ours, what ends where fewer bytes cross than anywhere later, as a sample that was made here tells.
        """
        source = self._maker.source
        found = ["p1"] if len(source.stages) > 1 else []
        if isinstance(source, Declared):
            stops = source.positions[2:]
            crossing = [self._bytes_at(stop) for stop in stops]
            found += [
                name_of_stretch(source.positions[0], stop, source.positions, source.stages)
                for at, stop in enumerate(stops[:-1])
                if crossing[at] < min(crossing[at + 1 :])
            ]
        return (*found, "p2", "p3") if self._asked.joins else (*found, "p2")

    def _bytes_at(self, stop: int) -> int:
        with apart():
            made = self._maker.make(self._first(0)._replace(stop=stop))
        return num_bytes(made)

    @property
    def why_not(self) -> Mapping[str, str]:
        """Why some are not asked, by address."""
        return {worker.url: worker.why_not for worker in self._workers if worker.why_not}

    def work(self, epoch: int, arrivals: Arrivals) -> Workers:
        """Those who make samples of an epoch; some are started first, where that is to be."""
        self._start()
        return Workers(
            self._workers,
            self._asked,
            arrivals,
            canary=self._canary(epoch),
            lock=self._lock,
            owner=self,
        )

    def _start(self) -> None:
        """Workers on this machine, which end with this object."""
        while len(self._started) < self._local:
            self._started.append(self._server())
            url = self._started[-1].url
            self._workers.append(Worker(url, ServerClient(url)))

    def _server(self) -> EmbeddedServer:
        if isinstance(self._asked, InStore):
            store = self._asked.source.dataset.store
            return EmbeddedServer.start({store.name: store.uri}, workers=1)
        assert isinstance(self._asked, ByName)
        names = (self._asked.name, self._asked.collate)
        allow = {name.partition(":")[0] for name in names if name is not None and name != BY_DEFAULT}
        return EmbeddedServer.start_worker(sorted(allow), workers=1)

    def _first(self, epoch: int) -> Task:
        """A task for one sample."""
        start = self._maker.source.positions[0]
        return Task(number=-1, epoch=epoch, batch=0, indices=(0,), samples=(0,), whole=False, start=start)

    def _canary(self, epoch: int) -> Canary | None:
        """A sample of an epoch; None where everyone has shown that it makes the same."""
        if all(worker.proved or worker.why_not for worker in self._workers):
            return None
        task = self._first(epoch)
        with apart():
            return Canary(task=task, value=self._maker.make(task))


def _close(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.client.close()
