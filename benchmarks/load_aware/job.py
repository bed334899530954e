"""Run the device of `load_aware`: read orders as JSON lines, and answer each with one line.

A way is an `upriver.Offload` of the device's only network: its policy, and its own knowledge of the link and
of the server. All ways share the captured network and its stage times, which are made once. The device is
slow: each stage sleeps the rest of its time.

Ways
    ours                    upriver's policy
    loadpart                LoADPart's
    neurosurgeon            LoADPart's with k = 1 always
    local, full             everything here, everything there
    cut 8                   always after that many stages
"""

from __future__ import annotations

import math
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from benchmarks.harness.children import answer_orders, by_name
from benchmarks.harness.loadpart_networks import NAMED, model_of, paper_numbers
from benchmarks.harness.netns import PAYLOAD_SHARE
from benchmarks.load_aware.schedule import FULL, LOADPART, LOCAL, NEUROSURGEON, OURS, cut_of
from upriver.coldstart.load_program import publish
from upriver.control.partition import ESTIMATES, PartitionRule, ServerConditions
from upriver.inference.capture_cache import CaptureCache, Network
from upriver.inference.change_detection import ChangeDetector
from upriver.inference.executor import RequestPatience
from upriver.inference.offload import Offload
from upriver.inference.remote_server import OffloadTuning, RemoteServer
from upriver.latency import last_of_least
from upriver.program.capture.whole_model import capture_whole
from upriver.program.example_inputs import Example
from upriver.program.graph.executor import Program
from upriver.program.models.loadpart_nodes import paper_nodes
from upriver.rpc.client import Probe, ServerClient
from upriver.rpc.tolerance import Agreement, tolerance_of
from upriver.store import Store

RULES: Mapping[str, PartitionRule] = {
    OURS: PartitionRule(policy="inference"),
    LOADPART: PartitionRule(policy="loadpart"),
    NEUROSURGEON: PartitionRule(policy="neurosurgeon"),
    LOCAL: PartitionRule(policy="local"),
    FULL: PartitionRule(policy="remote"),
}

NEVER_S = 1e6
"""Probe interval of a way that chooses nothing: its probes would disturb the others."""

DEADLINE_S = 200.0
"""Longer than the slowest request, so that full offload is never cut short: by default upriver has the device
go on after 10 s. So no way gives up for lack of time, and the cost of a deadline does not show."""

OPEN_LIMIT_S = 120.0

INPUTS = 4
"""Number of different inputs, used in turn."""

RUNS = 9
"""Runs that measure the times of the stages."""

LEAST_SLEEP_S = 2e-4
"""A shorter rest of a stage's time is slept with the next stage's, because a sleep ends some microseconds
late."""


class Slowness:
    """Make the stages of a program take a multiple of their times on this core.

    The times were measured beforehand, so that a disturbance of this machine does not affect the device: a
    stage sleeps until its time is over.

    Args:
        program: The program.
        seconds: Seconds of each stage on this core.
        factor: Factor on the times.

    Attributes:
        stages_s: Seconds of each stage on the device.
    """

    def __init__(self, program: Program, seconds: Sequence[float], factor: float) -> None:
        self.stages_s = tuple(factor * each for each in seconds)
        self._program, self._on = program, False

    def begin(self) -> None:
        """Slow down every run of the program from now on."""
        self._on = True
        original = Program.run

        def run(
            program: Program,
            tensors: Sequence[torch.Tensor],
            start: int,
            stop: int,
            *,
            on_stage: Callable[[int, float], None] | None = None,
        ) -> tuple[torch.Tensor, ...]:
            if not self._on or program is not self._program:
                return original(program, tensors, start, stop, on_stage=on_stage)
            due = time.perf_counter()

            def wait(position: int, _seconds: float) -> None:
                nonlocal due
                due += self.stages_s[position - 1]
                left_s = due - time.perf_counter()
                if left_s > (0.0 if position == stop else LEAST_SLEEP_S):
                    time.sleep(left_s)
                if on_stage is not None:
                    on_stage(position, self.stages_s[position - 1])

            return original(program, tensors, start, stop, on_stage=wait)

        Program.run = run  # type: ignore[method-assign, assignment]

    @contextmanager
    def away(self) -> Iterator[None]:
        """Run at this core's speed, for work that is no request."""
        before, self._on = self._on, False
        try:
            yield
        finally:
            self._on = before


def stage_seconds(program: Program, example: torch.Tensor) -> list[float]:
    """Return the seconds of each stage on this core in the shortest of some runs.

    Other load only adds time.
    """
    runs: list[list[float]] = []
    for _ in range(RUNS):
        runs.append([])
        program.run((example,), 0, program.num_stages, on_stage=lambda _, seconds: runs[-1].append(seconds))
    return min(runs, key=sum)


class OneWay:
    """Let one way at a time use the link: a device with one way has no others.

    A way's own probe and request may be in flight together, as in real use. But a probe that another way has
    held up does not begin during a request: without others it would have been sent before.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._way, self._users, self._requests = "", 0, 0

    @contextmanager
    def of(self, way: str, *, request: bool = False, probe: bool = False) -> Iterator[None]:
        """Wait until no other way uses the link, and block other ways while the block runs.

        Args:
            way: The way.
            request: Whether the block sends a request.
            probe: Whether the block sends a probe, which waits for the way's requests.
        """
        with self._free:
            self._free.wait_for(
                lambda: not self._users or (self._way == way and not (probe and self._requests))
            )
            self._way = way
            self._users += 1
            self._requests += request
        try:
            yield
        finally:
            with self._free:
                self._users -= 1
                self._requests -= request
                self._free.notify_all()


class Client(ServerClient):
    """Probe the link only while no other way uses it.

    Args:
        url: URL of the server.
        token: Token for the server.
        link: The lock that the way's requests use, too.
        way: Name of the client's way.
    """

    def __init__(self, url: str, *, token: str, link: OneWay, way: str) -> None:
        super().__init__(url, token=token)
        self._link, self._way = link, way

    def probe_upload(self, num_bytes: int) -> Probe:
        """Probe the upload as any client does, in its way's turn."""
        with self._link.of(self._way, probe=True):
            return super().probe_upload(num_bytes)


class Device:
    """Keep the state that lasts from order to order.

    Args:
        spec: ``network``, ``factor``, ``url`` of the server, ``store``, the URI of its store.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._url, self._token = spec["url"], os.environ["UPRIVER_TOKEN"]
        model, example = model_of(spec["network"])
        self._inputs = [example, *(torch.randn_like(example) for _ in range(INPUTS - 1))]
        with torch.no_grad():
            self._answers = [model(each) for each in self._inputs]
        self._captured = capture_whole(model, example)
        self.program = self._captured.program
        publish(self.program, Store.open(spec["store"]))
        numbers = paper_numbers(self.program.stages, paper_nodes(model, example))
        self._numbers = {cut: number for cut, number in numbers.items() if 0 < cut < self.program.num_stages}
        self._named = [
            cut for cut, number in self._numbers.items() if number in NAMED.get(spec["network"], ())
        ]
        self._slowness = Slowness(self.program, stage_seconds(self.program, example), spec["factor"])
        self._slowness.begin()
        self._ways: dict[str, Offload] = {}
        self._fars: dict[str, RemoteServer] = {}
        self._link = OneWay()

    # ---------------------------------------------------------------------------------------- orders

    def open(self, way: str) -> dict[str, Any]:
        """Make a way, unless it exists, and have the server admit it. Return whether it is new."""
        if way in self._ways:
            return {"new": False}
        rule = RULES.get(way) or PartitionRule(cut=cut_of(way))
        chooses = rule.cut_of(self.program.num_stages) is None
        agreement = Agreement("bitwise", tolerance_of(self.program))
        tuning = OffloadTuning() if chooses else OffloadTuning(probe_s=NEVER_S, load_s=NEVER_S)
        client = Client(self._url, token=self._token, link=self._link, way=way)
        fars = [] if way == LOCAL else [RemoteServer(client, tuning, push=False, agreement=agreement)]
        unchanged = ChangeDetector()
        unchanged.watch(self._captured.weights)

        def make(_: Example) -> Network:
            stages_s = self._slowness.stages_s
            for far in fars:
                far.serve(self._captured, stages_s)
            return Network(captured=self._captured, device_s=stages_s, total_s=sum(stages_s))

        with self._link.of(way), self._slowness.away():
            self._ways[way] = Offload(
                CaptureCache(self._captured.example, make),
                fars,
                list,  # this process has no children
                unchanged,
                agreement=agreement,
                autocast=None,
                rule=rule,
                patience=RequestPatience(deadline_s=DEADLINE_S),
                cached_cuts=0,
            )
            for far in fars:
                far.wait(OPEN_LIMIT_S)
                if far.costs(self._captured) is None:
                    raise RuntimeError(far.why_not(self._captured) or f"{way}: the server is not ready")
                self._fars[way] = far
        return {"new": True}

    def facts(self) -> dict[str, Any]:
        """Return the facts of a row on the network and its two machines, with `ours` open."""
        costs = self._fars[OURS].costs(self._captured)
        assert costs is not None
        return {
            "stages": self.program.num_stages,
            "paper": {str(cut): number for cut, number in self._numbers.items()},
            "device_s": round(sum(self._slowness.stages_s), 6),
            "server_s": round(sum(costs.server_s), 6),
        }

    def likely(self, mbit: Sequence[float], loads: Sequence[float]) -> dict[str, Any]:
        """Return likely cuts inside the network for ours or LoADPart, most frequent first, and the paper's.

        Args:
            mbit: Rates of the link.
            loads: Load factors; each is tried with each rate.
        """
        costs = self._fars[OURS].costs(self._captured)
        assert costs is not None
        won = Counter(
            last_of_least(ESTIMATES[RULES[way].policy](costs.sums, now))
            for way in (OURS, LOADPART)
            for now in (
                ServerConditions(upload_bytes_per_s=rate * 1e6 / 8 * PAYLOAD_SHARE, load=load)
                for rate in mbit
                for load in loads
            )
        )
        inside = [cut for cut, _ in won.most_common() if 0 < cut < self.program.num_stages]
        return {"cuts": inside, "named": self._named}

    def decide(self, way: str, count: int) -> dict[str, Any]:
        """Return the median seconds of a decision."""
        answer, seconds = self._ways[way], []
        for _ in range(count):
            began = time.perf_counter()
            answer.decide()
            seconds.append(time.perf_counter() - began)
        return {"seconds": statistics.median(seconds)}

    def request(self, way: str, number: int) -> dict[str, Any]:
        """Send one request. Return its time, its cut, the knowledge at its choice, and whether it is right.

        Args:
            way: As above.
            number: Selects the input.
        """
        answer, wanted = self._ways[way], self._answers[number % INPUTS]
        with self._link.of(way, request=True):
            began = time.perf_counter()
            given = answer(self._inputs[number % INPUTS])
            seconds = time.perf_counter() - began
        served, decision = answer.last, answer.decision
        assert served is not None
        now = decision.now
        return {
            "seconds": round(seconds, 6),
            "cut": served.cut,
            "equal": torch.equal(given, wanted),
            "hedged": served.hedged,
            "why": served.why_not or "; ".join(decision.not_used),
            "device_s": round(served.device_s, 6),
            "link_s": round(served.link_s, 6),
            "server_s": round(served.server_s, 6),
            "predicted_s": round(decision.predicted_s, 6) if math.isfinite(decision.predicted_s) else None,
            "k": None if now is None else round(now.load, 3),
            "wait_s": None if now is None else round(now.wait_s, 6),
            "upload_bytes_per_s": None if now is None else round(now.upload_bytes_per_s),
        }

    def end(self) -> None:
        """Close all ways."""
        for answer in self._ways.values():
            answer.close()


def main() -> None:
    """Execute orders until the input ends."""
    torch.set_num_threads(1)
    with ExitStack() as stack:

        def device(spec: dict[str, Any]) -> Callable[[dict[str, Any]], Mapping[str, Any]]:
            made = Device(spec)
            stack.callback(made.end)
            return by_name(made)

        answer_orders(device)


if __name__ == "__main__":
    main()
