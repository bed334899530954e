"""Samples made by workers elsewhere: who is asked for which, and what comes of it."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from upriver.client.transport import AnswerClosed, RunAnswer, ServerClient
from upriver.dataloader.declared import Declared
from upriver.dataloader.tasks import Arrival, Arrivals, Task
from upriver.engine.fingerprint import fingerprint
from upriver.errors import (
    CodeFailed,
    ConfigError,
    Forbidden,
    NotAuthorized,
    NotExact,
    ObjectNotFound,
    Overloaded,
    ProtocolError,
    ServerUnavailable,
    UpriverError,
)
from upriver.pipeline.mapstyle import DONE, RAW, START
from upriver.profile.metrics_store import pipeline_key
from upriver.protocol import BY_DEFAULT, DEFAULT_CAPS, CodeRef, Collate, DatasetRef, RunRequest
from upriver.protocol.caps import MAX_INTEGER
from upriver.protocol.tree import build, flatten, identical
from upriver.types import MicroBatch

log = logging.getLogger("upriver")

SLOTS = 4
"""Tasks under way at each worker: two processes make one each, and two are on their way."""

REST_S = 1.0
"""A worker that failed is not asked again for so long, doubled each time it fails again."""

MOST_REST_S = 30.0

MOST_CODE_FAILS = 3
"""Times in a row that a worker's copy of the dataset may fail: then something is missing there."""

PIECE = 16
"""Samples of a task that are made together, where they are not collated: a worker's processes share a task,
and an answer has a bounded number of tensors."""

NEVER = (ConfigError, Forbidden, NotAuthorized, NotExact, ObjectNotFound, ProtocolError)
"""What asking again would not change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Canary:
    """A sample that was made here, which a worker must make to the bit before it is given others.

    Attributes:
        task: For this one sample.
        value: A list of it.
    """

    task: Task
    value: Any


@dataclass(eq=False, slots=True)
class Worker:
    """One worker, as far as it is known.

    Attributes:
        slots: Tasks that it is given at once, at most, for one epoch.
        proved: Whether it has made the canary.
        fails: How often in a row.
        rests_until: It is asked again then, by the monotonic clock.
        failed: What it failed with last; empty where it has not since it made something.
        why_not: Why it is not asked any more; empty where it is.
    """

    url: str
    client: ServerClient
    slots: int = SLOTS
    proved: bool = False
    fails: int = 0
    rests_until: float = 0.0
    failed: str = ""
    why_not: str = ""
    proving: threading.Lock = field(default_factory=threading.Lock, repr=False)


class Asked(Protocol):
    """What workers are asked for."""

    @property
    def name(self) -> str:
        """Of the dataset."""

    @property
    def joins(self) -> bool:
        """Whether they collate batches, too."""

    @property
    def collates(self) -> str | None:
        """Name of what collates; None where that has none."""

    @property
    def key(self) -> str:
        """Names all of it, for figures that are kept."""

    def request(self, task: Task, raw: Sequence[Any] | None) -> tuple[RunRequest, list[MicroBatch]]:
        """The request for a task, and what is sent along.

        Raises:
            ConfigError: If it cannot be sent.
        """

    def value(self, task: Task, answers: Sequence[MicroBatch]) -> Any:
        """What came of a task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ByName:
    """A user's own dataset, whose code workers have.

    Attributes:
        name: Of the dataset's code.
        arguments: Its keyword arguments.
        seed: Of what is drawn.
        collate: Name of what collates; None where batches are collated here.
        code: What makes it.
    """

    name: str
    arguments: Mapping[str, Any]
    seed: int
    collate: str | None
    code: object = None

    @property
    def joins(self) -> bool:
        """Whether they can collate."""
        return self.collate is not None

    @property
    def collates(self) -> str | None:
        """See `Asked`."""
        return self.collate

    @property
    def key(self) -> str:
        """See `Asked`."""
        return pipeline_key(self.name, self.arguments, self.collate, code=self.code)

    def request(self, task: Task, raw: Sequence[Any] | None) -> tuple[RunRequest, list[MicroBatch]]:
        """See `Asked`."""
        collate, size = None, min(PIECE, len(task.samples))
        if task.whole and self.collate is not None:
            collate, size = Collate(name=self.collate, batches=(task.batch,)), len(task.samples)
        pieces = _pieces(task, size)
        request = RunRequest(
            code=CodeRef(name=self.name, arguments=dict(self.arguments), collate=collate),
            micro_batches=tuple(task.samples[piece] for piece in pieces),
            micro_batch=size,
            start=START if raw is None else RAW,
            stop=DONE,
            seed=self.seed,
            epoch=task.epoch,
        )
        if raw is None:
            return request, []
        return request, [_sent(task.samples[piece], raw[piece]) for piece in pieces]

    def value(self, task: Task, answers: Sequence[MicroBatch]) -> Any:
        """See `Asked`."""
        made = [build(batch.tree, batch.tensors) for batch in answers]
        return made[0] if task.whole and self.joins else [sample for piece in made for sample in piece]


@dataclass(frozen=True, kw_only=True, slots=True)
class InStore:
    """A dataset of ours, whose stages every server has that is near its store.

    Attributes:
        source: The dataset.
        joins: Whether batches are what `torch.utils.data.default_collate` makes.
    """

    source: Declared
    joins: bool

    @property
    def name(self) -> str:
        """Of the dataset."""
        return f"dataset {self.source.dataset.digest[:12]}"

    @property
    def collates(self) -> str | None:
        """See `Asked`."""
        return BY_DEFAULT if self.joins else None

    @property
    def key(self) -> str:
        """See `Asked`."""
        return pipeline_key(self.source.dataset.digest, {}, self.collates)

    def request(self, task: Task, raw: Sequence[Any] | None) -> tuple[RunRequest, list[MicroBatch]]:
        """See `Asked`."""
        dataset = self.source.dataset
        whole = task.whole and self.joins and len(task.samples) <= DEFAULT_CAPS.tensors
        size = len(task.samples) if whole else min(PIECE, len(task.samples))
        pieces = _pieces(task, size)
        request = RunRequest(
            dataset=DatasetRef(store=dataset.store.name, digest=dataset.digest),
            micro_batches=tuple(task.samples[piece] for piece in pieces),
            micro_batch=size,
            start=max(task.start, dataset.chain.start),
            stop=task.stop,
            seed=self.source.seed,
            epoch=task.epoch,
            given=raw is not None,
        )
        if raw is None:
            return request, []
        return request, [
            MicroBatch(ids=task.samples[piece], position=task.start, tensors=tuple(raw[piece]))
            for piece in pieces
        ]

    def value(self, task: Task, answers: Sequence[MicroBatch]) -> Any:
        """See `Asked`; of samples that are done, a row each."""
        if task.stop < DONE:
            return [tensor for batch in answers for tensor in batch.tensors]
        rows = [batch.tensors[0][: len(batch.ids)] for batch in answers]
        targets = self.source.targets(task.indices)
        if task.whole and self.joins:
            return [rows[0] if len(rows) == 1 else torch.cat(rows), torch.tensor(targets)]
        return list(zip([row for piece in rows for row in piece], targets, strict=True))


def _pieces(task: Task, size: int) -> list[slice]:
    return [slice(at, at + size) for at in range(0, len(task.samples), size)]


class Workers:
    """Deals tasks to workers, each as fast as it makes them.

    A task is kept here until a worker has a place for it, so that the fast ones take more. What a worker that
    fails was given others make, and the training node where there is no other.

    Args:
        workers: At least one.
        source: What they are asked for.
        arrivals: Where what they make comes.
        canary: What each must make first; None where all have.
        lock: Of the workers, who may be asked for several epochs at once.
        most_slots: Tasks that can be under way at once when all are there that may be added.
        owner: Lives as long as this does.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        source: Asked,
        arrivals: Arrivals,
        *,
        canary: Canary | None,
        lock: threading.Lock,
        most_slots: int = 0,
        owner: object = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers, self._source, self._arrivals, self._now = list(workers), source, arrivals, now
        self._canary, self._owner = canary, owner
        self._waiting: list[tuple[Task, Sequence[Any] | None]] = []
        self._lock, self._closed = lock, False
        self._answers: set[RunAnswer] = set()
        self._at: dict[int, tuple[Worker, RunAnswer | None]] = {}
        self._late: set[int] = set()
        self._under_way: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(
            max(most_slots, sum(worker.slots for worker in workers)), thread_name_prefix="upriver-worker"
        )

    @property
    def slots(self) -> int:
        """Tasks that can be under way at once."""
        return sum(worker.slots for worker in self._workers if not worker.why_not)

    def give(self, task: Task, raw: Sequence[Any] | None) -> bool:
        """Have a task done; False where no worker is there, or indices are no numbers that can be sent."""
        if task.indices != task.samples or not all(0 <= sample <= MAX_INTEGER for sample in task.samples):
            return False
        with self._lock:
            if self._closed or not any(self._may(worker) for worker in self._workers):
                return False
            self._waiting.append((task, raw))
            self._deal()
        return True

    def add(self, workers: Sequence[Worker], canary: Canary | None) -> None:
        """Have more of them from now on.

        Args:
            canary: What they must make first.
        """
        with self._lock:
            self._workers.extend(workers)
            self._canary = canary
            back = [] if self._closed else self._deal()
        self._send_back(back)

    def late(self, number: int) -> None:
        """A task is done on the training node, as it was not answered: who has it rests, and is cut off."""
        with self._lock:
            self._waiting = [each for each in self._waiting if each[0].number != number]
            worker, answer = self._at.get(number, (None, None))
            if worker is not None:
                self._late.add(number)
                worker.fails, worker.failed = worker.fails + 1, "it does not answer"
                worker.rests_until = self._now() + MOST_REST_S
            back = self._deal()
        if answer is not None:
            answer.close()
        self._send_back(back)

    def close(self) -> None:
        """Break off whatever is under way."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            answers = list(self._answers)
        for answer in answers:
            answer.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --------------------------------------------------------------------------------------- dealing

    def _may(self, worker: Worker) -> bool:
        return not worker.why_not and worker.rests_until <= self._now()

    def _deal(self) -> list[Task]:
        """Give what waits to whoever has a place; what nobody will make, where none is asked any more.

        The lock is held.
        """
        while self._waiting:
            there = [each for each in self._workers if self._may(each)]
            if not there:
                back = [task for task, _ in self._waiting]
                self._waiting.clear()
                return back
            free = [each for each in there if self._under_way[each.url] < each.slots]
            if not free:
                break
            worker = min(free, key=lambda each: self._under_way[each.url] / each.slots)
            self._under_way[worker.url] += 1
            task, raw = self._waiting.pop(0)
            self._at[task.number] = worker, None
            self._threads.submit(self._ask, worker, task, raw)
        return []

    def _ask(self, worker: Worker, task: Task, raw: Sequence[Any] | None) -> None:
        try:
            with worker.proving:
                if not worker.proved and self._canary is not None:
                    self._prove(worker, self._canary)
            value = self._made(worker, task, raw)
        except Exception as error:
            self._failed(worker, task, raw, error)
        else:
            self._arrived(worker, task, value)

    def _made(self, worker: Worker, task: Task, raw: Sequence[Any] | None) -> Any:
        request, sent = self._source.request(task, raw)
        with worker.client.run(request, sent) as answer, self._open(answer, task):
            answers = [batch for batch, _timings in answer]
        return self._source.value(task, answers)

    @contextmanager
    def _open(self, answer: RunAnswer, task: Task) -> Iterator[None]:
        """Whoever closes this closes the answer."""
        with self._lock:
            self._answers.add(answer)
            if task.number in self._at:
                self._at[task.number] = self._at[task.number][0], answer
            closed = self._closed or task.number in self._late
        try:
            if closed:
                raise AnswerClosed("nobody waits for it any more")
            yield
        finally:
            with self._lock:
                self._answers.discard(answer)

    def _prove(self, worker: Worker, canary: Canary) -> None:
        """Whether it makes the same bits.

        Raises:
            NotExact: If it does not.
        """
        differences = _differences(worker.client.info().fingerprint)
        if differences:
            raise NotExact(f"it computes otherwise: {differences}")
        if not identical(self._made(worker, canary.task, None), canary.value):
            sample = canary.task.indices[0]
            raise NotExact(f"it makes another sample {sample} of {self._source.name} than this machine")
        worker.proved = True

    def _arrived(self, worker: Worker, task: Task, value: Any) -> None:
        with self._lock:
            self._under_way[worker.url] -= 1
            self._at.pop(task.number, None)
            worker.fails, worker.failed = 0, ""
            back = self._deal()
        self._arrivals.put(Arrival(task.number, value, place=worker.url))
        self._send_back(back)

    def _failed(self, worker: Worker, task: Task, raw: Sequence[Any] | None, error: Exception) -> None:
        """Somebody else makes it; where it is the dataset's own fault, that shows on the training node."""
        with self._lock:
            self._under_way[worker.url] -= 1
            self._at.pop(task.number, None)
            if self._closed:
                return
            late = task.number in self._late
            if not late:
                self._note(worker, error)
                if not isinstance(error, CodeFailed):
                    self._waiting.insert(0, (task, raw))
            back = self._deal()
        self._send_back([*back, task] if isinstance(error, CodeFailed) and not late else back)

    def _send_back(self, tasks: Sequence[Task]) -> None:
        """They are made on the training node."""
        for task in tasks:
            self._arrivals.put(Arrival(task.number, error=ServerUnavailable("no worker makes it")))

    def _note(self, worker: Worker, error: Exception) -> None:
        """What a failure says of a worker."""
        log.info("worker %s: %s", worker.url, error)
        worker.fails, worker.failed = worker.fails + 1, str(error) or type(error).__name__
        if isinstance(error, NEVER) or not isinstance(error, UpriverError):
            worker.why_not = worker.failed
        elif isinstance(error, CodeFailed):
            worker.why_not = worker.failed if worker.fails >= MOST_CODE_FAILS else ""
        else:
            rest_s = min(MOST_REST_S, REST_S * 2 ** (worker.fails - 1))
            told_s = error.retry_after_s if isinstance(error, Overloaded) else 0.0
            worker.rests_until = self._now() + max(rest_s, told_s)


def _sent(ids: tuple[int, ...], raw: Sequence[Any]) -> MicroBatch:
    """What was read of some samples."""
    tree, tensors = flatten(list(raw))
    return MicroBatch(ids=ids, position=RAW, tensors=tuple(tensors), tree=tree)


def _differences(theirs: Mapping[str, str]) -> str:
    """In what a worker's fingerprint differs from this process's, in words; empty if in nothing."""
    ours = fingerprint()
    names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    return ", ".join(
        f"{name} is {theirs.get(name) or 'unknown'}, here {ours.get(name) or 'unknown'}" for name in names
    )
