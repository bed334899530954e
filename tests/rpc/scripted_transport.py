"""A transport that fails, stalls and lies by a script: schedules that real servers show too rarely."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from upriver.errors import ServerUnavailable
from upriver.protocol import RunRequest
from upriver.rpc.client import AnswerClosed
from upriver.types import MicroBatch, Timings

WIDTH = 16
"""Floats in a row of a scripted micro-batch."""


def make_batch(ids: tuple[int, ...]) -> MicroBatch:
    return MicroBatch(ids=ids, position=0, tensors=(torch.full((1, WIDTH), float(ids[0])),))


BATCH_BYTES = WIDTH * 4


@dataclass(frozen=True)
class Step:
    """The outcome of one request: ``good`` micro-batches, then an error (or all micro-batches)."""

    good: int | None = None
    error: Exception | None = None
    delay_s: float = 0.0
    lie: str = ""


class ScriptedServer:
    """Answer requests by one script; after the script, and where it is silent, answer correctly."""

    def __init__(self, url: str, script: Iterable[Step] = (), *, probes: Iterable[bool] = ()) -> None:
        self._url = url
        self.script = deque(script)
        self.probes = deque(probes)
        self.lock = threading.Lock()
        self.requests: list[tuple[tuple[int, ...], ...]] = []
        self.dead = False
        self.aborted = threading.Event()
        self.closed = False

    @property
    def url(self) -> str:
        return self._url

    def run(self, request: RunRequest) -> ScriptedAnswer:
        with self.lock:
            self.requests.append(request.micro_batches)
            step = self.script.popleft() if self.script else Step()
        return ScriptedAnswer(self, request, step)

    def alive(self, *, timeout_s: float) -> bool:
        return self._answers()

    def ready(self, *, timeout_s: float) -> bool:
        return self._answers()

    def _answers(self) -> bool:
        with self.lock:
            if self.dead or self.closed or (self.probes and not self.probes.popleft()):
                raise ServerUnavailable(f"{self.url}: refused")
        return True

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        self.closed = True
        self.abort()


class ScriptedAnswer:
    def __init__(self, server: ScriptedServer, request: RunRequest, step: Step) -> None:
        self.server = server
        self.step = step
        self.batches = [tuple(ids) for ids in request.micro_batches]
        if step.lie == "swap":
            self.batches.reverse()
        if step.lie == "repeat":
            self.batches = [ids for ids in self.batches for _ in range(2)]
        if step.lie == "short":
            self.batches = self.batches[:-1]
        self.at = 0
        self.closed = threading.Event()

    def __iter__(self) -> ScriptedAnswer:
        return self

    def __next__(self) -> tuple[MicroBatch, Timings]:
        if self.step.delay_s:
            time.sleep(self.step.delay_s)
        if self.closed.is_set():
            raise AnswerClosed("closed")
        if self.server.dead or self.server.closed:
            raise ServerUnavailable(f"{self.server.url}: died")
        if self.step.error is not None and self.at >= (self.step.good or 0):
            raise self.step.error
        if self.at == len(self.batches):
            raise StopIteration
        self.at += 1
        return make_batch(self.batches[self.at - 1]), Timings(phases={"forward": 1.0})

    def close(self) -> None:
        self.closed.set()


def request_for(micro_batches: list[tuple[int, ...]]):
    def make(indices, cut: int | None = None) -> RunRequest:
        return RunRequest(
            micro_batches=tuple(micro_batches[i] for i in indices), start=-1, stop=0, micro_batch=64
        )

    return make
