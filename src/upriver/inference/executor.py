"""One request, answered whatever happens: the device up to the cut, a server from there, or the device again.

A server that is late, refuses, breaks off or talks nonsense costs time, never the answer: the device still
has what crosses the cut and goes on from there. Where the answer is late the device may also begin before all
hope is gone; who is first then wins.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

import torch

from upriver.errors import UpriverError
from upriver.inference.exchange import Exchange, Finished
from upriver.inference.remote_server import Far
from upriver.program.capture.whole_model import CapturedModel
from upriver.text import said

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestPatience:
    """How long a server is waited for.

    Attributes:
        deadline_s: From the beginning of a request until the device does the rest itself.
        hedge_s: From the question until it begins to do so beside the server.
        helpers: Wait for servers meanwhile; None where ``hedge_s`` is.
    """

    deadline_s: float
    hedge_s: float | None = None
    helpers: Executor | None = None


@dataclass(kw_only=True, slots=True)
class Served:
    """How a request was answered.

    Attributes:
        cut: Where the device stopped, or was to.
        server: That ran the rest; empty where the device did.
        total_s: All of it, ``decide_s`` included.
        decide_s: Looking for the network and the cut.
        device_s: What the device computed, the rest included where no server did it.
        link_s: On the way there and back.
        server_s: There, waiting included.
        sent_bytes: What crossed the cut.
        hedged: Whether the device began with the rest while the server was at it.
        why_not: Why the server that was asked did not answer; empty where it did, or none was.
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
    """The server's answer is there: the device need not go on."""


@dataclass(kw_only=True)
class InferenceRequest:
    """A request on its way.

    Attributes:
        captured: The network.
        tensors: Its inputs.
        cut: Where the device stops.
        far: That runs the rest; None where the device does.
        process: Of that server, when the cut was chosen: no other one has shown what it computes.
        patience: With it.
        served: How it was answered, once it is.
    """

    captured: CapturedModel
    tensors: Sequence[torch.Tensor]
    cut: int
    far: Far | None
    process: str
    patience: RequestPatience
    served: Served = field(init=False)

    def __post_init__(self) -> None:
        self.served = Served(cut=self.cut)

    def run(self) -> Tensors:
        """What the network gives.

        Raises:
            ProgramError: If it cannot be computed on these inputs, on the device either.
        """
        began = time.perf_counter()
        crossing = self._here(self.tensors, 0, self.cut)
        if self.far is None or self.cut == self.captured.program.num_stages:
            return self._here(crossing, self.cut, self.captured.program.num_stages)
        sent = self._fetched(crossing)
        left_s = self.patience.deadline_s - (time.perf_counter() - began)
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
        """The same in the machine's memory; an accelerator is waited for, which computes after the call."""
        began = time.perf_counter()
        fetched = tuple(tensor.cpu() for tensor in tensors)
        self.served.device_s += time.perf_counter() - began
        return fetched

    def _there(self, far: Far, crossing: Tensors, sent: Tensors, left_s: float) -> Tensors:
        exchange = far.ask(self.captured, self.cut, sent, process=self.process)
        self.served.sent_bytes = exchange.sent_bytes
        try:
            with far.under_way():
                return self._asked(far, exchange, crossing, left_s)
        except UpriverError as error:
            # First: what is wrong with the caller's own input is raised here, and no server's fault.
            done = self._here(crossing, self.cut, self.captured.program.num_stages)
            self._gave_up(far, error)
            return done

    def _asked(self, far: Far, exchange: Exchange, crossing: Tensors, left_s: float) -> Tensors:
        if self.patience.hedge_s is None or self.patience.helpers is None:
            return self._took(far, exchange.finish(left_s))
        try:
            waiting = self.patience.helpers.submit(exchange.finish, left_s)
        except RuntimeError:  # closed meanwhile, as the server is: it says so
            return self._took(far, exchange.finish(left_s))
        try:
            return self._took(far, waiting.result(timeout=self.patience.hedge_s))
        except TimeoutError:
            return self._race(far, exchange, waiting, crossing)

    def _race(self, far: Far, exchange: Exchange, waiting: Future[Finished], crossing: Tensors) -> Tensors:
        """Compute beside the server; whose answer is there first counts."""
        self.served.hedged = True

        def look(_position: int, _seconds: float) -> None:
            if waiting.done() and waiting.exception() is None:
                raise _Overtaken

        began = time.perf_counter()
        program = self.captured.program
        try:
            done = program.run(crossing, self.cut, program.num_stages, on_stage=look)
        except _Overtaken:
            return self._took(far, waiting.result())
        finally:
            self.served.device_s += time.perf_counter() - began
        if waiting.done() and isinstance(error := waiting.exception(), UpriverError):
            self._gave_up(far, error)
        exchange.close()
        return done

    def _took(self, far: Far, finished: Finished) -> Tensors:
        far.answered(self.captured, self.cut, finished)
        self.served.server = far.url
        self.served.link_s, self.served.server_s = finished.link_s, finished.server_s
        return finished.tensors

    def _gave_up(self, far: Far, error: UpriverError) -> None:
        far.failed(self.captured, error)
        self.served.why_not = said(str(error))
