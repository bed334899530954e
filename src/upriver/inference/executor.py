"""Execute one request, whatever happens: the device up to the cut, then a server, or the device again.

A server that is late, refuses, breaks off or answers garbage costs time, never the answer. The device keeps
what crosses the cut and continues from there. With hedging, the device starts the rest while a late server
still works; the first answer wins.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from upriver.errors import UpriverError
from upriver.inference.exchange import Exchange, ExchangeResult
from upriver.inference.remote_server import RemoteServer
from upriver.program.capture.whole_model import CapturedModel
from upriver.text import said
from upriver.types import require_finite

HELPERS = 32
"""Requests with ``hedge_s`` hedged at the same time. For further requests the device starts the rest after
``hedge_s`` as well."""

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestPatience:
    """Limits on the wait for a server.

    Attributes:
        deadline_s: From the start of a request until the device computes the rest itself.
        hedge_s: From sending until the device starts the rest in parallel with the server; None leaves that
            to the decision.
        helpers: Threads that wait for servers during a hedge; its own unless given.
        spare: Taken by the one request that the decision may hedge. More would compete for the device.
    """

    deadline_s: float
    hedge_s: float | None = None
    helpers: Executor | None = None
    spare: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value out of range."""
        require_finite("deadline_s", self.deadline_s, positive=True)
        if self.hedge_s is not None:
            require_finite("hedge_s", self.hedge_s)
        helpers = self.helpers or ThreadPoolExecutor(HELPERS, thread_name_prefix="upriver-hedge")
        object.__setattr__(self, "helpers", helpers)

    @contextmanager
    def hedging(self) -> Iterator[bool]:
        """Return whether the decision may hedge the request of this block."""
        mine = self.spare.acquire(blocking=False)
        try:
            yield mine
        finally:
            if mine:
                self.spare.release()

    def hedge_after(self, decided_s: float | None) -> float | None:
        """Return the time from sending until the device starts the rest; None for never.

        Args:
            decided_s: The decision's; 0 is a trial, whatever the setting.
        """
        return decided_s if self.hedge_s is None or decided_s == 0 else self.hedge_s


@dataclass(kw_only=True, slots=True)
class ServedRequest:
    """Record of how a request was answered.

    Attributes:
        cut: Cut of the request, even where the device also computed the rest.
        server: Address of the server that ran the rest; empty where the device did.
        total_s: Total time, including ``decide_s``.
        decide_s: Time to find the network and to decide the cut.
        device_s: Time of the device's stages, including the rest where no server answered.
        link_s: Time of the transfers up and down.
        server_s: Time on the server, including the wait in its queue.
        sent_bytes: Bytes that crossed the cut.
        hedged: Whether the device started the rest while the server worked.
        why_not: Why the server did not answer; empty where it did, or none was asked.
    """

    cut: int
    server: str = ""
    total_s: float = 0.0
    decide_s: float = 0.0
    device_s: float = 0.0
    link_s: float = 0.0
    server_s: float = 0.0
    sent_bytes: int = 0
    hedged: bool = False
    why_not: str = ""


class _Overtaken(Exception):
    """Raised when the server's answer has arrived, so that the device stops."""


def _start(future: Future[Tensors], work: Callable[[], Tensors]) -> None:
    """Run a function in a new thread, in the mode of this one; its result is the future's.

    Unlike a waiting thread, a new one has the floating-point environment of its creator. Without another
    thread the function runs here.
    """
    inference = torch.is_inference_mode_enabled()

    def run() -> None:
        try:
            with torch.inference_mode(inference):
                future.set_result(work())
        except _Overtaken:
            future.cancel()
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="upriver-device")
    try:
        thread.start()
    except RuntimeError:
        run()


@dataclass(kw_only=True)
class InferenceRequest:
    """One request in progress.

    Attributes:
        cut: Number of stages that the device runs.
        far: Server that runs the rest; None where the device does.
        process: Server process at the decision: no other process has passed the check.
        hedge_s: Time from sending until the device starts the rest as well; never if None.
        served: How the request was answered, complete once it is.
    """

    captured: CapturedModel
    tensors: Sequence[torch.Tensor]
    cut: int
    far: RemoteServer | None
    process: str
    deadline_s: float
    hedge_s: float | None
    helpers: Executor | None
    served: ServedRequest = field(init=False)

    def __post_init__(self) -> None:
        self.served = ServedRequest(cut=self.cut)

    def run(self) -> Tensors:
        """Compute the network's output.

        Raises:
            ProgramError: If the device cannot compute these inputs either.
        """
        began = time.perf_counter()
        crossing = self._here(self.tensors, 0, self.cut)
        if self.far is None or self.cut == self.captured.program.num_stages:
            return self._here(crossing, self.cut, self.captured.program.num_stages)
        sent = self._fetched(crossing)
        left_s = self.deadline_s - (time.perf_counter() - began)
        if left_s <= 0:
            self.served.why_not = "the deadline was over before the cut was reached"
            return self._here(crossing, self.cut, self.captured.program.num_stages)
        return self._there(self.far, crossing, sent, left_s)

    def _here(self, tensors: Sequence[torch.Tensor], start: int, stop: int) -> Tensors:
        began = time.perf_counter()
        done = self.captured.program.run(tensors, start, stop)
        self.served.device_s += time.perf_counter() - began
        return done

    def _fetched(self, tensors: Tensors) -> Tensors:
        """Copy tensors to main memory, and wait for an accelerator that computes asynchronously."""
        began = time.perf_counter()
        fetched = tuple(tensor.cpu() for tensor in tensors)
        self.served.device_s += time.perf_counter() - began
        return fetched

    def _there(self, far: RemoteServer, crossing: Tensors, sent: Tensors, left_s: float) -> Tensors:
        exchange = far.ask(self.captured, self.cut, sent, process=self.process)
        self.served.sent_bytes = exchange.sent_bytes
        try:
            with far.under_way():
                return self._asked(far, exchange, crossing, left_s)
        except UpriverError as error:
            # Compute first: an error in the caller's own input is raised here and is not blamed on the
            # server.
            done = self._here(crossing, self.cut, self.captured.program.num_stages)
            self._gave_up(far, error)
            return done

    def _asked(self, far: RemoteServer, exchange: Exchange, crossing: Tensors, left_s: float) -> Tensors:
        if self.hedge_s is None or self.helpers is None:
            return self._took(far, exchange.finish(left_s))
        try:
            waiting = self.helpers.submit(exchange.finish, left_s)
        except RuntimeError:  # closed meanwhile; the closed server raises an error that says so
            return self._took(far, exchange.finish(left_s))
        try:
            return self._took(far, waiting.result(timeout=self.hedge_s))
        except TimeoutError:
            return self._race(far, exchange, waiting, crossing)

    def _race(
        self, far: RemoteServer, exchange: Exchange, waiting: Future[ExchangeResult], crossing: Tensors
    ) -> Tensors:
        """Compute in parallel with the server; the first answer counts.

        A stage cannot be interrupted. So the device computes in another thread, which ends after the stage
        in which the server's answer comes.
        """
        self.served.hedged = True
        ours: Future[Tensors] = Future()

        def look(_position: int, _seconds: float) -> None:
            if waiting.done() and waiting.exception() is None:
                raise _Overtaken

        began = time.perf_counter()
        _start(ours, partial(self._rest, crossing, look))
        either: list[Future[Any]] = [waiting, ours]
        wait(either, return_when=FIRST_COMPLETED)
        try:
            if waiting.done() and waiting.exception() is None:
                return self._took(far, waiting.result())
            done = ours.result()
        finally:
            self.served.device_s += time.perf_counter() - began
        if not waiting.done():
            far.overtaken(self.captured)
        elif (error := waiting.exception()) is None:
            return self._took(far, waiting.result())
        elif isinstance(error, UpriverError):
            self._gave_up(far, error)
        exchange.close()
        return done

    def _rest(self, crossing: Tensors, look: Callable[[int, float], None]) -> Tensors:
        """Compute the stages from the cut on, to the end also on an accelerator."""
        program = self.captured.program
        done = program.run(crossing, self.cut, program.num_stages, on_stage=look)
        if program.device.type != "cpu":
            torch.accelerator.synchronize(program.device)  # the caller's stream may be another one
        return done

    def _took(self, far: RemoteServer, finished: ExchangeResult) -> Tensors:
        far.answered(self.captured, self.cut, finished)
        self.served.server = far.url
        self.served.link_s, self.served.server_s = finished.link_s, finished.server_s
        return finished.tensors

    def _gave_up(self, far: RemoteServer, error: UpriverError) -> None:
        far.failed(self.captured, error)
        self.served.why_not = said(str(error))
