"""Measure the use of the link, the trainer's core and the server's core: in all, and over time."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Self

import psutil

from upriver._threads.background import BackgroundThread
from upriver.finetune.job import FinetuneJob
from upriver.finetune.session import Near
from upriver.report.demo_plot import BusySpan
from upriver.rpc.link_meter import LinkMeter

INTERVAL_S = 0.25
"""Seconds between two readings: some fifty an epoch, each much longer than the 0.01 s that /proc resolves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Used:
    """Resources used by an epoch: the link, the trainer's core, the server's core."""

    link_bytes: int
    trainer_s: float
    server_s: float

    @classmethod
    def now(cls, job: FinetuneJob, near: Near) -> Used:
        """Return the use since the start of this process."""
        server_s = sum(
            phases.get("input", 0.0) + phases.get("forward", 0.0)
            for source, phases in job.report.phases.items()
            if source.startswith("http")
        )
        return cls(link_bytes=near.meter.total_bytes, trainer_s=time.process_time(), server_s=server_s)

    def since(self, before: Used) -> Used:
        """Return the use since an earlier reading."""
        return Used(
            link_bytes=self.link_bytes - before.link_bytes,
            trainer_s=self.trainer_s - before.trainer_s,
            server_s=self.server_s - before.server_s,
        )

    def bound_s(self, link_bytes_per_s: float) -> float:
        """Return the seconds of the busiest of the three, were it never idle."""
        return max(self.link_bytes / link_bytes_per_s, self.trainer_s, self.server_s)


class UsageRecorder:
    """Read the use of all three in a thread while a block runs.

    Args:
        pid: Process id of the server. CPU seconds of its child processes count as its own.
        meter: Meter of the link.
    """

    def __init__(self, pid: int, meter: LinkMeter) -> None:
        self._processes, self._meter = list[psutil.Process](), meter
        with contextlib.suppress(psutil.Error):  # the server has ended: the job tells
            server = psutil.Process(pid)
            self._processes = [server, *server.children(recursive=True)]
        self._readings: list[tuple[float, Used]] = []
        self._over = threading.Event()
        self._thread = BackgroundThread(self._run, name="usage")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def busy(self, link_bytes_per_s: float) -> tuple[BusySpan, ...]:
        """Return the share of each second that the three were in use, from reading to reading."""
        began_s = self._readings[0][0]
        spans = []
        for (start_s, before), (stop_s, after) in pairwise(self._readings):
            used = after.since(before)
            seconds = (used.server_s, used.link_bytes / link_bytes_per_s, used.trainer_s)
            shares = (min(1.0, max(0.0, each) / (stop_s - start_s)) for each in seconds)
            spans.append(BusySpan(start_s - began_s, stop_s - began_s, *shares))
        return tuple(spans)

    def _run(self) -> None:
        self._read()
        while not self._over.wait(INTERVAL_S):
            self._read()
        self._read()

    def _read(self) -> None:
        server_s = 0.0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):  # it has ended
                server_s += sum(process.cpu_times()[:2])
        used = Used(link_bytes=self._meter.total_bytes, trainer_s=time.process_time(), server_s=server_s)
        self._readings.append((time.perf_counter(), used))
