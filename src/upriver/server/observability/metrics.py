"""Count server events in a Prometheus registry per server, so that two servers in a process stay apart.

Labels are bounded: tenants and stores come from the configuration, and all other values from the constants
below. Text from a client or a worker never becomes a label. ``docs/observability.md`` lists every metric.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from upriver import errors
from upriver.server.observability.snapshot import ErrorRow
from upriver.types import Timings

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Bucket bounds half a decade apart: from a cut among the input stages to vgg19 on one core."""

READ_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Bucket bounds half a decade apart: from files on this machine to a store that was retried to the end of
patience."""

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Bucket bounds that double: from one sample to the largest training batch in the papers on splitting."""

RECENT_S = 60.0
"""Seconds that count as recent on the page: a glance that comes a little late still sees the error."""

MAX_RECENT = 4096
"""Most errors kept one by one. A server that sends more in a minute shows only this many."""

ANYONE = "anyone"
"""Name of the tenant on a server without tenants."""

REASONS = ("memory", "queue", "quota", "worker", "deadline", "disconnect", "draining")
"""Reasons why a request was not admitted, or was ended early."""

RESTARTS = ("crash", "memory", "timeout")
"""Reasons why a worker was replaced."""

Found = Literal["kept", "read", "stored"]
"""Origin of a program: kept in memory, read from a store, or just uploaded by its client."""

PHASES = ("receive", "queue", "read", "input", "weights", "forward", "encode", "kept", "send")
"""Phases of a micro-batch, in order. Workers report most of them, and a worker may be compromised."""

FEATURES = ("found", "written")
"""Events of kept rows: they answer a request, or are written."""

STORE_ERRORS = ("store", "not_found", "object_changed")
"""Codes of the errors with which a store's reads end."""

CODES = frozenset(
    {kind.code for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "code")}
    | {"method_not_allowed"}
)
"""Codes of the errors that a server sends. A compromised worker may report others."""


class ServerMetrics:
    """Hold every metric of a server; each wait and each failure shows in one.

    Args:
        tenants: Names of tenants whose series exist from the start. The rate of a series misses its first
            count if the series begins with that count.
        stores: Names of stores, for the same reason.
        now: Seconds of a monotonic clock.
    """

    def __init__(
        self,
        *,
        tenants: Iterable[str] = (ANYONE,),
        stores: Iterable[str] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = CollectorRegistry()
        self._now, self._since = now, now()
        self._make_requests()
        self._make_admission()
        self._make_load()
        self._make_micro_batches()
        self._make_programs()
        self._make_stores()
        self._make_process()
        self._begin(tuple(tenants), tuple(stores))

    # ------------------------------------------------------------------------------------ construction

    def _make_requests(self) -> None:
        self.requests = self._counter("requests", "Requests answered", "route", "code")
        self.running = self._gauge("running_requests", "Run requests in progress")
        self.errors = ErrorCounts(self._counter("errors", "Errors told to clients", "code"), now=self._now)
        self._bytes_in = self._counter("bytes_in", "Bytes of requests' bodies", "tenant")
        self._bytes_out = self._counter("bytes_out", "Bytes of answers to run requests", "tenant")
        self.audit_failures = self._counter("audit_failures", "Lines that the audit log has not got")

    def _make_admission(self) -> None:
        self._queue_requests = self._gauge("queue_requests", "Requests that wait to be admitted")
        self._queue_bytes = self._gauge("queue_bytes", "Bytes that waiting requests ask for")
        self._budget = self._gauge("memory_budget_bytes", "Memory that requests may hold together")
        self._reserved = self._gauge("memory_reserved_bytes", "Memory set aside out of the budget")
        self._used = self._gauge("memory_used_bytes", "Memory of the machine that workers take")
        self._admitted = self._counter("admitted_requests", "Requests admitted", "tenant")
        self._shed = self._counter(
            "shed_requests", "Requests not admitted, or let go before their end", "tenant", "reason"
        )
        self.draining = self._gauge("draining", "1 while the last requests finish and no new ones are taken")

    def _make_load(self) -> None:
        self._load_factor = self._gauge("load_factor", "How many times as long as at best stages take now")
        self._machine = self._gauge(
            "machine_utilisation", "Share of the time for which everybody keeps cores or accelerators busy"
        )

    def _make_micro_batches(self) -> None:
        self._micro_batches = self._counter("micro_batches", "Micro-batches answered", "tenant")
        self.seconds = self._histogram(
            "micro_batch_seconds", "Seconds of a micro-batch by phase", SECONDS, "phase"
        )
        self._of_phase = {phase: self.seconds.labels(phase) for phase in PHASES}
        self._rows = self._histogram("forward_rows", "Samples in one forward pass", ROWS, "tenant")

    def _make_programs(self) -> None:
        self._programs = self._counter(
            "program_requests", "Programs needed, by where they came from", "found", "tenant"
        )
        self.program_bytes = self._gauge("program_bytes", "Programs kept loaded")

    def _make_stores(self) -> None:
        self._read_seconds = self._histogram(
            "store_read_seconds", "Seconds of reading what a forward pass takes", READ_SECONDS, "store"
        )
        self._read_bytes = self._counter("store_read_bytes", "Bytes read from a store", "store")
        self._store_errors = self._counter(
            "store_errors", "Reads from a store that failed for good", "store", "kind"
        )

        self._features = self._counter(
            "feature_rows", "Rows that answered a request, or were written to a store", "tenant", "what"
        )

    def _make_process(self) -> None:
        self._restarts = self._counter("worker_restarts", "Workers that were replaced", "reason")
        uptime = self._gauge("uptime_seconds", "Seconds since the server started")
        uptime.set_function(lambda: self.uptime_s)
        ProcessCollector(namespace="upriver", registry=self.registry)

    def _begin(self, tenants: Sequence[str], stores: Sequence[str]) -> None:
        """Create every series whose labels are known."""
        for tenant in tenants:
            for counter in (self._admitted, self._micro_batches, self._bytes_in, self._bytes_out):
                counter.labels(tenant)
            self._rows.labels(tenant)
            for reason in REASONS:
                self._shed.labels(tenant, reason)
            for found in get_args(Found):
                self._programs.labels(found, tenant)
            for what in FEATURES:
                self._features.labels(tenant, what)
        for store in stores:
            self._read_seconds.labels(store)
            self._read_bytes.labels(store)
            for kind in STORE_ERRORS:
                self._store_errors.labels(store, kind)
        for reason in RESTARTS:
            self._restarts.labels(reason)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"upriver_{name}_total", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"upriver_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"upriver_{name}", text, labels, buckets=buckets, registry=self.registry)

    # ------------------------------------------------------------------------------------------ events

    def queue(self, requests: int, nbytes: int) -> None:
        """Set the number of requests that wait for admission, and the bytes that they ask for together."""
        self._queue_requests.set(requests)
        self._queue_bytes.set(nbytes)

    def memory(self, reserved: int, used: int, budget: int) -> None:
        """Set the bytes reserved, the bytes that workers use, and the budget."""
        self._reserved.set(reserved)
        self._used.set(used)
        self._budget.set(budget)

    def load(self, k: float, machine: float) -> None:
        """Set the load factor ``k`` and the share of time in which any process keeps the machine busy."""
        self._load_factor.set(k)
        self._machine.set(machine)

    def admitted(self, tenant: str) -> None:
        """Count an admitted request."""
        self._admitted.labels(tenant).inc()

    def shed(self, tenant: str, reason: str) -> None:
        """Count a request that was not admitted, or was ended early, for one of the `REASONS`."""
        self._shed.labels(tenant, reason).inc()

    def micro_batches_by(self) -> dict[str, int]:
        """Return the number of micro-batches answered so far, by tenant."""
        samples = [sample for family in self._micro_batches.collect() for sample in family.samples]
        return {
            sample.labels["tenant"]: int(sample.value) for sample in samples if sample.name.endswith("_total")
        }

    def features(self, what: str, tenant: str, rows: int) -> None:
        """Count kept rows, as one of `FEATURES`."""
        self._features.labels(tenant, what).inc(rows)

    def batch(self, tenant: str, rows: int) -> None:
        """Count a forward pass of ``rows`` samples."""
        self._rows.labels(tenant).observe(rows)

    def micro_batch(self, tenant: str, timings: Timings) -> None:
        """Count a micro-batch that is about to be sent, with the seconds of its phases."""
        self._micro_batches.labels(tenant).inc()
        for phase, seconds in timings.phases.items():
            if phase in self._of_phase:
                self._of_phase[phase].observe(seconds)

    def sent(self, seconds: float) -> None:
        """Add the seconds in which a micro-batch was sent; its own timings end before."""
        self._of_phase["send"].observe(seconds)

    def program(self, found: Found, tenant: str) -> None:
        """Count a request's need for a program, by the program's origin."""
        self._programs.labels(found, tenant).inc()

    def store_read(self, store: str, seconds: float, nbytes: int) -> None:
        """Add one forward pass's read from a store, over all its GETs."""
        self._read_seconds.labels(store).observe(seconds)
        self._read_bytes.labels(store).inc(nbytes)

    def store_error(self, store: str, kind: str) -> None:
        """Count a failed read from a store; ``kind`` is the error's code."""
        self._store_errors.labels(store, kind if kind in STORE_ERRORS else "store").inc()

    def restart(self, reason: str) -> None:
        """Count a replaced worker, for one of the reasons in `RESTARTS`."""
        self._restarts.labels(reason).inc()

    def bytes_in(self, tenant: str, n: int) -> None:
        """Add bytes received of a tenant's request."""
        self._bytes_in.labels(tenant).inc(n)

    def bytes_out_by(self, tenant: str, n: int) -> None:
        """Add bytes sent of a response to a tenant."""
        self._bytes_out.labels(tenant).inc(n)

    # ------------------------------------------------------------------------------------------ output

    @property
    def uptime_s(self) -> float:
        """Seconds since the server started."""
        return self._now() - self._since

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class ErrorCounts:
    """Count errors sent to clients by code, with those of the last minute apart."""

    def __init__(self, counter: Counter, *, now: Callable[[], float]) -> None:
        self._counter, self._now = counter, now
        self._totals: Tally[str] = Tally()
        self._recent: deque[tuple[float, str]] = deque(maxlen=MAX_RECENT)

    def labels(self, code: str) -> ErrorsOfCode:
        """Return the counter of one code."""
        return ErrorsOfCode(self, code)

    def add(self, code: str) -> None:
        """Count an error. A code that is not in `CODES` counts as ``error``."""
        code = code if code in CODES else "error"
        self._counter.labels(code).inc()
        self._totals[code] += 1
        self._recent.append((self._now(), code))

    def rows(self) -> tuple[ErrorRow, ...]:
        """Return a row for every code seen, the most frequent first."""
        since = self._now() - RECENT_S
        recent = Tally(code for at, code in list(self._recent) if at >= since)
        return tuple(
            ErrorRow(code=code, recent=recent[code], total=total)
            for code, total in self._totals.most_common()
        )


@dataclass(frozen=True, slots=True)
class ErrorsOfCode:
    """Counter of the errors of one code."""

    errors: ErrorCounts
    code: str

    def inc(self) -> None:
        """Count an error."""
        self.errors.add(self.code)
