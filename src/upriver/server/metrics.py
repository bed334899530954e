"""What the server counts, in a registry of its own, so that two servers in a process do not meet."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from upriver.types import Timings

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Half a decade each: from a cut among the input stages to vgg19 on one core."""


class Metrics:
    """Every wait and every failure shows in one of these."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "upriver_requests_total",
            "Requests answered",
            ["route", "code"],
            registry=self.registry,
        )
        self.running = Gauge("upriver_running_requests", "Run requests in progress", registry=self.registry)
        self.bytes_out = Counter("upriver_bytes_out_total", "Bytes of answers", registry=self.registry)
        self.bytes_read = Counter(
            "upriver_bytes_read_total",
            "Stored bytes of samples",
            registry=self.registry,
        )
        self.micro_batches = Counter(
            "upriver_micro_batches_total",
            "Micro-batches answered",
            registry=self.registry,
        )
        self.errors = Counter(
            "upriver_errors_total",
            "Errors told to clients",
            ["code"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "upriver_micro_batch_seconds",
            "Seconds of a micro-batch by phase",
            ["phase"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.programs = Counter(
            "upriver_program_requests_total",
            "Programs needed: kept already, or read from a store",
            ["found"],
            registry=self.registry,
        )
        self.program_bytes = Gauge(
            "upriver_program_bytes",
            "Programs kept loaded",
            registry=self.registry,
        )
        self.restarts = Counter(
            "upriver_worker_restarts_total",
            "Workers that died",
            registry=self.registry,
        )

    def micro_batch(self, timings: Timings) -> None:
        """One more micro-batch is on its way out."""
        self.micro_batches.inc()
        for phase, seconds in timings.phases.items():
            self.seconds.labels(phase).observe(seconds)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
