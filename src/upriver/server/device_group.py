"""Group a device with its memory, workers, programs and queue of requests."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from upriver.control.admission_queue import AdmissionQueue
from upriver.control.batch_adaptation import POLICIES
from upriver.control.fair_queue import FairQueue
from upriver.control.memory_budget import BASE, INDEXES, MemoryBudget, MemoryHold
from upriver.errors import ConfigError, Overloaded
from upriver.resources import available_bytes, total_bytes
from upriver.server.config import ServerConfig
from upriver.server.execution.worker_pool import WorkerPool
from upriver.server.features.feature_store import FeatureStore
from upriver.server.http.errors import ErrorWording
from upriver.server.ipc.messages import Hello, Setup
from upriver.server.ipc.shared_memory import KEPT_BYTES
from upriver.server.observability.load import LoadMeter
from upriver.server.observability.metrics import ServerMetrics
from upriver.server.programs.cache import ProgramCache
from upriver.server.programs.datasets import Datasets
from upriver.server.programs.registry import ProgramRegistry
from upriver.server.run_handler import RunHandler
from upriver.server.sandbox.bubblewrap import enclose
from upriver.server.sandbox.rlimits import on_cpu
from upriver.server.scheduling.admission_gate import AdmissionGate
from upriver.server.scheduling.footprint import DECODING_BYTES, GRAPH_FACTOR, WEIGHED_BYTES
from upriver.server.scheduling.turn_gate import TurnGate
from upriver.server.tenants import Tenant
from upriver.store import Store
from upriver.text import bytes_text

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

LEAST_BYTES = 64 << 20
"""Bytes besides idle workers below which hardly any request fits."""

IMPORTED_LATER_BYTES = 160 << 20
"""Memory by which a front grows when it imports PyTorch for its first tensors: 58 MB before, 215 MB after, of
proportional set size."""

LOOK_S = 1.0
"""Least seconds between measurements of memory. One takes some ms per worker, and stops the worker for a part
of them."""


class DeviceGroup:
    """One device of a server.

    Requests are dealt evenly over all devices, and each device then admits its own.

    HAPI (2022), section 4.5, solves the problem for each accelerator alone in the same way.

    Args:
        load: Load meter of all workers of the server.
        datasets: Indexes, which all devices share.
        features: Kept rows, which all devices share.

    Attributes:
        base: Hold on the memory of idle workers; None until that is known.

    Raises:
        ConfigError: If no memory is left for requests.
    """

    def __init__(
        self,
        config: ServerConfig,
        device: str,
        *,
        load: LoadMeter,
        datasets: Datasets,
        features: FeatureStore,
        stores: Mapping[str, Store],
        metrics: ServerMetrics,
        wording: ErrorWording,
    ) -> None:
        self.device, self._config = device, config
        self.base: MemoryHold | None = None
        self.budget = MemoryBudget(_memory(config, device))
        self.program_cache = ProgramCache(
            self.budget,
            most_bytes=config.program_budget_bytes,
            on_evict=self._evicted,
            quotas={
                each.name: each.program_bytes for each in config.everyone() if each.program_bytes is not None
            },
        )
        self.pool = WorkerPool(
            count=config.workers,
            setup=Setup(
                threads=config.threads_per_worker,
                device=device,
                caps=config.caps,
                memory_bytes=self.budget.total_bytes,
                allow=config.allow,
            ),
            job_timeout_s=config.job_timeout_s,
            enclosure=enclose(
                config.sandbox,
                device=device,
                memory_bytes=self.budget.total_bytes,
                own_code=bool(config.allow),
                hidden=config.hidden_variables,
            ),
            on_restart=metrics.restart,
            load=load,
        )
        self.programs = ProgramRegistry(
            stores,
            prefix=config.prefix,
            program_cache=self.program_cache,
            caps=config.caps,
            most_bytes=config.program_budget_bytes,
            stored_bytes=config.stored_bytes,
            workers=config.workers,
            copies=1 if on_cpu(device) else config.workers,
            device=device,
            limits=config.stream_limits,
            metrics=metrics,
        )
        by_memory = config.admission == "adaptive"
        queue = AdmissionQueue(
            self.budget,
            self.program_cache,
            POLICIES[config.admission],
            most=config.max_admitted,
            most_waiting=config.max_waiting,
            most_waiting_bytes=config.max_waiting_bytes,
            min_batch=config.min_batch if by_memory else 1,
            spare=datasets.drop_oldest,
        )
        self.line = AdmissionGate(queue, self.budget, collect_s=config.collect_s if by_memory else 0.0)
        self.turns = TurnGate(FairQueue(config.workers, one_each=True))
        self.runner = RunHandler(
            config,
            pool=self.pool,
            programs=self.programs,
            datasets=datasets,
            features=features,
            budget=self.budget,
            line=self.line,
            turns=self.turns,
            metrics=metrics,
            wording=wording,
        )

    @property
    def hello(self) -> Hello:
        """Return the description that its workers sent; raise `Overloaded` if no worker is ready yet."""
        if self.pool.hello is None or self.base is None:
            raise Overloaded(self.pool.why)
        return self.pool.hello

    def hold_index(self, nbytes: int) -> MemoryHold:
        """Hold memory for a dataset's index; unused programs are evicted to make room."""
        self.program_cache.make_room(nbytes)
        return self.budget.hold(nbytes, owner=INDEXES)

    async def hold_base(self) -> None:
        """Hold the memory of idle workers, which is no request's. The device is not ready before."""
        try:
            await self.pool.first()
        except ConfigError:  # the caller that started this server gets the error
            return
        resident = 0 if self.pool.hello is None else self.pool.hello.resident_bytes
        each = resident + KEPT_BYTES + GRAPH_FACTOR * WEIGHED_BYTES
        if self._config.stores:
            each += DECODING_BYTES
        nbytes = min(each * self._config.workers, self.budget.free_bytes)
        if self.budget.free_bytes - nbytes < LEAST_BYTES:
            log.warning(
                "idle workers take %d of the memory budget's %d bytes: next to nothing is left for requests",
                each * self._config.workers,
                self.budget.total_bytes,
            )
        self.base = self.budget.hold(nbytes, owner=BASE)

    def _evicted(self, key: str) -> None:
        self.pool.forget(key)


class DeviceGroups:
    """Deal requests over all devices of a server, one or more."""

    def __init__(self, units: Sequence[DeviceGroup]) -> None:
        self._units = tuple(units)
        self._first = 0  # index to try first among equals
        self._holding: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[int] | None = None
        self._looked_at = 0.0

    def __iter__(self) -> Iterator[DeviceGroup]:
        return iter(self._units)

    @property
    def ready(self) -> bool:
        """Return whether each device has a ready worker."""
        return all(unit.pool.ready and unit.base is not None for unit in self._units)

    @property
    def why(self) -> str:
        """Return why a device has no ready worker."""
        return next((unit.pool.why for unit in self._units if not unit.pool.ready), self._units[0].pool.why)

    @property
    def hello(self) -> Hello:
        """Return the workers' description, which is the same on every device.

        Raises:
            Overloaded: If a device has no ready worker.
        """
        first, *_ = [unit.hello for unit in self._units]
        return first

    def start(self) -> None:
        """Start all workers without waiting for them."""
        for unit in self._units:
            unit.pool.start()
        self._holding = asyncio.create_task(self._hold_bases())

    async def first(self) -> None:
        """Wait until each device has a worker.

        Raises:
            ConfigError: If no worker can start on one device, or two devices do not compute the same bits.
        """
        for unit in self._units:
            await unit.pool.first()
        hellos = [(unit.device, unit.pool.hello) for unit in self._units]
        found = {str(hello.fingerprint): device for device, hello in hellos if hello is not None}
        if len(found) > 1:
            raise ConfigError(
                f"{' and '.join(found.values())} compute different bits, so answers would depend on chance: "
                "start one server for each"
            )

    async def close(self) -> None:
        """End all workers now."""
        if self._holding is not None:
            self._holding.cancel()
            await asyncio.gather(self._holding, return_exceptions=True)
        await asyncio.gather(*(unit.programs.close() for unit in self._units))
        await asyncio.gather(*(unit.pool.close() for unit in self._units))

    def deal(self, tenant: Tenant) -> DeviceGroup:
        """Return the device for a tenant's next request.

        It is the device with the fewest of the tenant's requests, then with the fewest of all. Equal devices
        take turns.
        """
        count = len(self._units)
        order = [(self._first + step) % count for step in range(count)]
        runners = [unit.runner for unit in self._units]
        chosen = min(order, key=lambda at: (runners[at].running_of(tenant.name), runners[at].running))
        self._first = (chosen + 1) % count
        return self._units[chosen]

    def hold_index(self, nbytes: int) -> MemoryHold:
        """Hold memory for a dataset's index.

        It is the first device's if that is the machine's memory, else the host's.
        """
        first = self._units[0]
        return first.hold_index(nbytes) if on_cpu(first.device) else self._host.hold(nbytes, owner=INDEXES)

    @property
    def most_index_bytes(self) -> int:
        """Return the memory that opening one index may take: half of the most that can be available."""
        first = self._units[0]
        return (first.budget if on_cpu(first.device) else self._host).most_bytes // 2

    @cached_property
    def _host(self) -> MemoryBudget:
        """Budget for indexes if devices have their own memory: a quarter of the machine's free memory."""
        return MemoryBudget(_usable_bytes("cpu", reserve=0.75))

    async def used_bytes(self) -> int:
        """Return the bytes that all workers use, measured at most once a second."""
        now = time.monotonic()
        if self._looking is None or (self._looking.done() and now >= self._looked_at + LOOK_S):
            pools = [unit.pool for unit in self._units]
            look = asyncio.to_thread(lambda: sum(pool.used_bytes() for pool in pools))
            self._looking, self._looked_at = asyncio.create_task(look), now
        return await asyncio.shield(self._looking)

    async def _hold_bases(self) -> None:
        await asyncio.gather(*(unit.hold_base() for unit in self._units))


def _memory(config: ServerConfig, device: str) -> int:
    """Return the bytes for requests on a device. Devices that share the machine's memory divide it."""
    given = config.memory_budget_bytes
    if given is not None:
        _warn_of_too_much(given, device, count=len(config.devices) if on_cpu(device) else 1)
        return given
    found = _usable_bytes(device, reserve=config.memory_reserve)
    return max(1, found // len(config.devices)) if on_cpu(device) else found


def _usable_bytes(device: str, *, reserve: float) -> int:
    """Return the available bytes of a device, without the share of them that stays free.

    Raises:
        ConfigError: If no bytes are left, or the device does not exist.
    """
    available = available_bytes(_checked(device))
    if device == "cpu" and "torch" not in sys.modules:
        available -= IMPORTED_LATER_BYTES
    usable = int((1 - reserve) * available)
    if usable < 1:
        raise ConfigError(
            f"no memory is left for requests on {device}: {available} bytes are available, and of these a "
            f"share of {reserve:g} stays free"
        )
    return usable


def _checked(device: str) -> str | torch.device:
    """Return a device that exists. An accelerator needs PyTorch, which takes more than a second to import."""
    if device == "cpu":
        return device
    from upriver.program.graph.devices import check_device

    return check_device(device)


def _warn_of_too_much(budget: int, device: str, *, count: int) -> None:
    """Warn of a budget above the device's memory.

    It is no error, as the operator may know more than the machine reports.
    """
    most = total_bytes(_checked(device))
    if budget * count > most:
        where = "this machine, or the control group of this process," if on_cpu(device) else device
        log.warning(
            "memory_budget_bytes is %s%s, and %s has %s: requests are admitted that find no memory",
            bytes_text(budget),
            f" for each of {count}" if count > 1 else "",
            where,
            bytes_text(most),
        )
