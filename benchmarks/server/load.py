"""Load a server from a process of its own: read orders as JSON lines, and answer each with its results.

An order names questions (run requests with their expected answers) and streams of questions. Each stream has
a token, and either a number of concurrent requests or a rate that does not depend on the answers. Readers
that read nothing are in `readers`. Everything is real HTTP through `ServerClient`, and every answer
is checked.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from benchmarks.server.readers import Stalled, Taken, stall
from upriver.errors import Overloaded, UpriverError
from upriver.protocol import RunRequest
from upriver.rpc.client import ServerClient
from upriver.rpc.tolerance import FLOAT32
from upriver.types import MicroBatch

AT_ONCE = 96
"""Most requests in flight of one open stream. Four such streams stay below a server's limit of connections
(512)."""

FIRM_S = 600.0
"""Seconds until a request is given up by default: a server's own deadline."""

ALL_TRIES = 1 << 30

JITTER = 0.25
"""Largest share added to a wait at random, so that requests refused together do not return together."""

OK, WRONG, LEFT, CLOSED = "ok", "wrong", "left", "closed"
"""Outcomes of a request, in addition to the codes of errors: the right answer, another answer, given up at
the end of its stream, closed by this process."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A run request, and its expected answer.

    Attributes:
        digests: Digests of the tensors of each micro-batch, bit for bit; empty if they are not checked.
        values: A ``.npy`` file with the rows of all micro-batches, which the answer must be close to; for
            requests whose low bits are left to the server.
    """

    request: RunRequest
    digests: tuple[str, ...] = ()
    values: str = ""


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """Requests with one token.

    Attributes:
        questions: Names, requested in turn, over and over.
        count: Number of requests. Without it and ``seconds``, the stream lasts until all others have ended.
        in_flight: Concurrent requests. Each is followed by the next when it is answered.
        rate: Requests a second instead, whatever their outcome; needs ``seconds``.
        begin_s: Seconds from the order to the first request.
        after: Name of the stream after whose end this one begins.
        seconds: Seconds after which no request begins.
        pause_s: Seconds between a refusal and the next try. None uses the server's advice.
        most_tries: Number of tries after which a request is given up.
        patience_s: Seconds after which a request is given up.
    """

    name: str
    token: str
    questions: tuple[str, ...]
    count: int | None = None
    in_flight: int = 1
    rate: float = 0.0
    begin_s: float = 0.0
    after: str = ""
    seconds: float | None = None
    pause_s: float | None = None
    most_tries: int = ALL_TRIES
    patience_s: float = FIRM_S


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """An order for the load on a server."""

    url: str
    questions: dict[str, Question]
    streams: tuple[Stream, ...] = ()
    readers: tuple[Stalled, ...] = ()


class Asked(msgspec.Struct, kw_only=True):
    """One request. Times are seconds since the order.

    Attributes:
        asked_s: Time when the request was due, or sent.
        done_s: Time of the last byte, or of the end without one.
        tries: Number of tries.
        outcome: `OK`, `WRONG`, `LEFT`, `CLOSED` or an error's code.
        work_s: Mean seconds of its micro-batches in the worker.
        why: An error's message.
    """

    question: str
    asked_s: float
    done_s: float = 0.0
    tries: int = 0
    outcome: str = ""
    work_s: float = 0.0
    why: str = ""


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The results of an order.

    Attributes:
        began: Time of the start, by the machine's monotonic clock.
        error: The reason if the order failed.
    """

    began: float = 0.0
    streams: dict[str, list[Asked]] = {}
    readers: list[Taken] = []
    error: str = ""


# -------------------------------------------------------------------------------------------- answers


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of every bit, and of types and shapes."""
    found = xxhash.xxh3_128()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().reshape(-1).numpy().view(np.uint8).data)
    return found.hexdigest()


class Check:
    """Compare the micro-batches of an answer with the expected ones, as they arrive."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._seen = self._rows = 0
        self._values = np.load(question.values, mmap_mode="r") if question.values else None
        self.right = True

    def __call__(self, batch: MicroBatch) -> None:
        """Check the next micro-batch."""
        at, self._seen = self._seen, self._seen + 1
        if self._values is not None:
            wanted = torch.from_numpy(np.array(self._values[self._rows : self._rows + len(batch.ids)]))
            self._rows += len(batch.ids)
            self.right &= _close(batch.tensors[0][: len(batch.ids)], wanted)
        elif self._question.digests:
            self.right &= digest_of(batch.tensors) == self._question.digests[at]


def _close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    if got.shape != wanted.shape or not len(wanted):
        return False
    most = float(wanted.abs().max())
    return torch.allclose(got, wanted, rtol=FLOAT32.rtol, atol=FLOAT32.atol * most)


# ---------------------------------------------------------------------------------------------- streams


class Load:
    """Execute one order."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._clients = {stream.name: ServerClient(order.url, token=stream.token) for stream in order.streams}
        self._asked: defaultdict[str, list[Asked]] = defaultdict(list)
        self._through = {stream.name: threading.Event() for stream in order.streams}
        self.over = threading.Event()
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._began = 0.0

    def now(self) -> float:
        """Return the seconds since the order."""
        return time.monotonic() - self._began

    def run(self) -> Done:
        """Execute the order. All its threads have ended on return."""
        self._began = time.monotonic()
        streams = [
            threading.Thread(target=self._guarded, args=(self._stream, stream))
            for stream in self._order.streams
        ]
        taken: list[Taken] = []
        readers = threading.Thread(target=self._guarded, args=(self._readers, taken))
        for thread in (*streams, readers):
            thread.start()
        readers.join()
        self._wait_for_bounded()
        for thread in streams:
            thread.join()
        for client in self._clients.values():
            client.close()
        if self._failure is not None:
            raise self._failure
        return Done(began=self._began, streams=dict(self._asked), readers=taken)

    def _guarded(self, work: Callable[[Any], None], argument: Any) -> None:
        """Run `work`. A failure in its thread ends the order."""
        try:
            work(argument)
        except BaseException as error:
            self._failure = error
            self.over.set()
            for through in self._through.values():
                through.set()

    def _readers(self, taken: list[Taken]) -> None:
        questions = self._order.questions
        for reader in self._order.readers:
            taken += stall(self._order.url, reader, questions[reader.question].request)

    def _wait_for_bounded(self) -> None:
        """Wait for the streams that end by themselves, and then end the others."""
        for stream in self._order.streams:
            if is_bounded(stream):
                self._through[stream.name].wait()
        self.over.set()
        for stream in self._order.streams:
            if not is_bounded(stream):
                self._clients[stream.name].close()

    def _stream(self, stream: Stream) -> None:
        if stream.after:
            self._through[stream.after].wait()
        if not self.over.wait(stream.begin_s - self.now()):
            (Open if stream.rate else Closed)(self, stream).run()
        self._through[stream.name].set()

    def add(self, stream: Stream, asked: Asked) -> None:
        """Record a request that has ended."""
        asked.done_s = self.now()
        with self._lock:
            self._asked[stream.name].append(asked)

    def attempt(self, stream: Stream, asked: Asked) -> Overloaded | None:
        """Send a request once. Return a refusal, or None if the request has ended."""
        asked.tries += 1
        question = self._order.questions[asked.question]
        check, work, count = Check(question), 0.0, 0
        try:
            with self._clients[stream.name].run(question.request) as answer:
                for batch, timings in answer:
                    check(batch)
                    work += sum(timings.phases.get(phase, 0.0) for phase in ("input", "forward", "encode"))
                    count += 1
        except Overloaded as refusal:
            asked.outcome, asked.why = refusal.code, str(refusal)
            return refusal
        except UpriverError as error:
            ended = self.over.is_set() and not is_bounded(stream)
            asked.outcome, asked.why = CLOSED if ended else error.code, str(error)
            return None
        asked.outcome, asked.why, asked.work_s = OK if check.right else WRONG, "", work / max(1, count)
        return None

    def wait_s(self, stream: Stream, asked: Asked, refusal: Overloaded) -> float | None:
        """Return the seconds until the next try, or None if the request is given up."""
        pause = refusal.retry_after_s if stream.pause_s is None else stream.pause_s
        pause *= random.uniform(1.0, 1.0 + JITTER)
        late = self.now() + pause > asked.asked_s + stream.patience_s
        return None if late or asked.tries >= stream.most_tries else pause


def is_bounded(stream: Stream) -> bool:
    """Return whether a stream ends by itself."""
    return stream.count is not None or stream.seconds is not None


@dataclass(frozen=True)
class Closed:
    """Keep a number of requests in flight: each is followed by the next when it has ended."""

    load: Load
    stream: Stream

    def run(self) -> None:
        """Send requests until none is left."""
        numbers = itertools.count()  # one thread alone draws the next number
        until = float("inf") if self.stream.seconds is None else self.load.now() + self.stream.seconds
        with ThreadPoolExecutor(self.stream.in_flight) as pool:
            for work in [pool.submit(self._work, numbers, until) for _ in range(self.stream.in_flight)]:
                work.result()

    def _work(self, numbers: Iterable[int], until: float) -> None:
        questions = self.stream.questions
        for number in numbers:
            through = self.stream.count is not None and number >= self.stream.count
            if through or self.load.over.is_set() or self.load.now() >= until:
                return
            asked = Asked(question=questions[number % len(questions)], asked_s=self.load.now())
            while (refusal := self.load.attempt(self.stream, asked)) is not None:
                pause = self.load.wait_s(self.stream, asked, refusal)
                if pause is None:
                    break
                if self.load.over.wait(pause):
                    asked.outcome = CLOSED
                    break
            self.load.add(self.stream, asked)


class Open:
    """Send requests at a fixed rate, whatever their outcome. A waiting retry occupies no thread."""

    def __init__(self, load: Load, stream: Stream) -> None:
        if stream.seconds is None:
            raise ValueError(f"stream {stream.name!r} has a rate and no end")
        self._load, self._stream = load, stream
        began, names = load.now(), stream.questions
        self._until = began + stream.seconds
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Asked]] = [
            (due, next(self._numbers), Asked(question=names[number % len(names)], asked_s=due))
            for number in range(int(stream.rate * stream.seconds))
            for due in [began + number / stream.rate]
        ]
        heapq.heapify(self._due)

    def run(self) -> None:
        """Send requests until the time is over.

        Requests in flight then finish, and waiting retries are dropped.
        """
        with ThreadPoolExecutor(AT_ONCE) as pool:
            tries = []
            while (asked := self._next()) is not None:
                tries.append(pool.submit(self._try, asked))
            for each in tries:
                each.result()
        for _, _, asked in self._due:
            asked.outcome = LEFT
            self._load.add(self._stream, asked)

    def _next(self) -> Asked | None:
        with self._changed:
            while not self._load.over.is_set():
                now = self._load.now()
                if now >= self._until:
                    return None
                due = self._due[0][0] if self._due else self._until
                if due <= now:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(min(due, self._until) - now)
        return None

    def _try(self, asked: Asked) -> None:
        refusal = self._load.attempt(self._stream, asked)
        pause = None if refusal is None else self._load.wait_s(self._stream, asked, refusal)
        if pause is None:
            self._load.add(self._stream, asked)
            return
        with self._changed:
            heapq.heappush(self._due, (self._load.now() + pause, next(self._numbers), asked))
            self._changed.notify()


# ---------------------------------------------------------------------------------------------- process


def carry_out(order: Order) -> Done:
    """Execute an order from its beginning to its end."""
    names = [stream.name for stream in order.streams]
    if len(set(names)) != len(names):
        raise ValueError(f"streams have names of their own, got {names}")
    return Load(order).run()


def main(lines: Iterable[bytes], say: Callable[[Done], None]) -> None:
    """Execute orders until the input ends."""
    for line in lines:
        try:
            say(carry_out(msgspec.json.decode(line, type=Order)))
        except Exception as error:
            say(Done(error=f"{type(error).__name__}: {error}"))


def ended(done: Done, names: Sequence[str] = ()) -> list[Asked]:
    """Return the requests of some streams, or of all, by time of end. Requests closed here are left out."""
    chosen = names or list(done.streams)
    found = [asked for name in chosen for asked in done.streams.get(name, []) if asked.outcome != CLOSED]
    return sorted(found, key=lambda asked: asked.done_s)


if __name__ == "__main__":
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with the answers

    def write(done: Done) -> None:
        answers.write(msgspec.json.encode(done) + b"\n")
        answers.flush()

    write(Done())
    main(sys.stdin.buffer, write)
