"""Drive the real decisions through changes of load and link, and hold each request against local and full.

The clock, the link and the server are made up; `RemoteServer`, `choose` and the server's `LoadMeter` are the
real ones. A request is late if it takes more than 3 % longer than the better one of local and full offload
under the conditions in which it was made.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.inference.asking import bitwise
from upriver.control.partition import (
    BEHIND,
    LATE,
    TRIAL_S,
    CutChoice,
    PartitionRule,
    choose,
    kept_away,
    kept_away_by_link,
)
from upriver.inference import remote_server as far_module
from upriver.inference import uplink as uplink_module
from upriver.inference.costs import CutCosts
from upriver.inference.exchange import ExchangeResult
from upriver.inference.remote_server import OffloadTuning, RemoteServer
from upriver.inference.server_check import PROBES, AdmittedNetwork
from upriver.link import LEAST_PROBE, MOST_PROBE_SHARE, PROBE_SHARE, ROUND_TRIPS, LinkEstimator
from upriver.program.capture.whole_model import CapturedModel, capture_whole
from upriver.program.example_inputs import Example
from upriver.server.observability.load import LoadMeter
from upriver.types import Timings

RTT_S, LOOK_S, ROWS = 0.005, 1.0, 800
"""Round trip, the server's looks at its machine, and the rows of an input."""

WORKER = 1

TUNING = OffloadTuning()


@functools.cache
def captured_of(widths: tuple[int, ...]) -> CapturedModel:
    """Return linear layers with outputs of these widths."""
    torch.manual_seed(0)
    layers = [nn.Linear(wide, narrow) for wide, narrow in pairwise(widths)]
    return capture_whole(nn.Sequential(*layers), Example.of(torch.randn(ROWS, widths[0])))


NETWORKS = ((64, 40, 24, 12, 3), (16, 64, 32, 8, 3), (48, 48, 6, 48, 2))
"""Widths of networks: one whose outputs shrink, one that sends least from its input, and one with a neck."""


@dataclass
class Conditions:
    """State of the link and the server.

    Attributes:
        rate: Bytes per second.
        k: Factor of the server's stages.
        machine: Utilisation of the server's machine.
    """

    rate: float
    k: float
    machine: float


@dataclass
class Request:
    """A request that was made.

    Attributes:
        at_s: When it began.
        took_s: Seconds.
        least_s: Seconds of the better one of local and full offload.
    """

    at_s: float
    choice: CutChoice
    took_s: float
    least_s: float

    def is_late(self, by: float = 1 + BEHIND) -> bool:
        return self.took_s > by * self.least_s * (1 + 1e-9)


@dataclass
class World:
    """A device, a link and a server, in simulated time.

    Attributes:
        noise: Returns the factor of each transfer and each stretch on the server.
    """

    captured: CapturedModel
    costs: CutCosts
    true: Conditions
    noise: Callable[[], float] = lambda: 1.0
    now_s: float = 1000.0
    turn_at_s: float = -math.inf
    looks_at_s: float = 1000.0
    url: str = "http://there"
    meter: Any = field(default_factory=lambda: SimpleNamespace(observed_bandwidth=lambda: None))

    def __post_init__(self) -> None:
        self.load_meter = LoadMeter(1, now=lambda: self.now_s)
        self.load_meter.came(WORKER)
        self.alone_s = dict(enumerate(self.costs.server_s, start=1))
        agreement = bitwise()
        self.far = RemoteServer(self, TUNING, agreement=agreement)  # type: ignore[arg-type]
        self.far._thread = SimpleNamespace(ident=1, join=lambda: None)  # type: ignore[assignment]

    def let_in(self) -> None:
        """Have the server let in, and every cut used before."""
        self.far.serve(self.captured, self.costs.device_s)
        self.pass_time(0.0)
        self.far._looked_up = {(self.captured.program.digest, cut) for cut in range(self.last)}

    @property
    def last(self) -> int:
        return self.captured.program.num_stages

    # ------------------------------------------------------------------------- what the device asks

    def load(self, **_: Any) -> Any:
        return self.load_meter.load(running=0)

    def probe(self, _: Any, link: LinkEstimator, *, small: int, large: int, every_s: float = 5.0) -> None:
        for size in [1] * small + [0] * large:
            num_bytes = size or link.probe_bytes(every_s)
            link.add_transfer(num_bytes, RTT_S + num_bytes / self.true.rate * (self.noise() if large else 1))

    def admit(self, *_: Any, link: LinkEstimator, **__: Any) -> AdmittedNetwork:
        self.probe(None, link, small=ROUND_TRIPS, large=PROBES)
        self.compute(0, self.noise())
        return AdmittedNetwork(costs=self.costs, provisional=False, cuts=(0,), load=self.load())

    def close(self) -> None:
        pass

    # ------------------------------------------------------------------------------------- the time

    def compute(self, cut: int, noise: float) -> dict[int, float]:
        """Run the stages after a cut on the server, which knows how long they take at best."""
        stages = {at: self.true.k * noise * self.alone_s[at] for at in range(cut + 1, self.last + 1)}
        self.load_meter.saw(WORKER, "network", stages, self.alone_s)
        return stages

    def pass_time(self, seconds: float) -> None:
        """Let time pass in which the device's thread works and the server looks at its machine."""
        until_s = self.now_s + seconds
        while True:
            if self.far._wake.is_set():
                self.far._wake.clear()
                self.turn_at_s = self.now_s
            next_s = min(self.turn_at_s, self.looks_at_s)
            if next_s > until_s:
                break
            self.now_s = max(self.now_s, next_s)
            if self.looks_at_s <= self.turn_at_s:
                self.load_meter.looked(self.true.machine)
                self.looks_at_s += LOOK_S
            else:
                self.turn_at_s = self.now_s + self.far._turn()
        self.now_s = until_s

    # ------------------------------------------------------------------------------------- requests

    def seconds_at(self, cut: int) -> float:
        """Return the true seconds of a request at a cut."""
        sums, true = self.costs.sums, self.true
        if cut == self.last:
            return float(sums.device_s[-1])
        there_s = true.k * sums.server_s[cut] + sums.sent_bytes[cut] / true.rate + RTT_S
        return float(sums.device_s[cut] + there_s)

    def request(self) -> Request:
        """Make a request, as `Offload` and `InferenceRequest` do."""
        sums, state, began_s = self.costs.sums, self.far.now(self.costs), self.now_s
        least_s = min(self.seconds_at(0), self.seconds_at(self.last))
        offers, device_s = [(sums, state)], float(sums.device_s[-1])
        choice = choose(PartitionRule(), device_s, self.last, offers)
        for _ in kept_away(PartitionRule(), choice, offers):
            self.far.ask_load_soon()
        for _ in kept_away_by_link(PartitionRule(), choice, offers):
            self.far.probe_soon()
        self.pass_time(float(sums.device_s[choice.cut]))
        if choice.server is not None:
            self.send(choice)
        return Request(began_s, choice, self.now_s - began_s, least_s)

    def send(self, choice: CutChoice) -> None:
        cut, sums = choice.cut, self.costs.sums
        sent_s = float(sums.sent_bytes[cut]) / self.true.rate * self.noise()
        there_noise = self.noise()
        there_s = self.true.k * float(sums.server_s[cut]) * there_noise
        took_s = RTT_S + sent_s + there_s
        here_s = math.inf if choice.hedge_s is None else choice.hedge_s + self.rest_s(cut)
        with self.far.under_way():
            self.pass_time(min(took_s, here_s))
            if here_s < took_s:
                self.far.overtaken(self.captured)
                return
            stages = self.compute(cut, there_noise)
            phases = {"receive": sent_s, "forward": sum(stages.values())}
            timings = Timings(phases=phases, stages=stages, k=self.load_meter.k)
            self.far.answered(self.captured, cut, ExchangeResult(tensors=(), timings=timings, took_s=took_s))

    def rest_s(self, cut: int) -> float:
        return float(self.costs.sums.device_s[-1] - self.costs.sums.device_s[cut])


@contextmanager
def world(
    number: int, device_s: Sequence[float], server_s: Sequence[float], true: Conditions, **options: Any
) -> Iterator[World]:
    captured = captured_of(NETWORKS[number])
    costs = CutCosts(program=captured.program, device_s=tuple(device_s), server_s=tuple(server_s))
    with pytest.MonkeyPatch.context() as patched:
        of = World(captured, costs, true, **options)
        clock = SimpleNamespace(monotonic=lambda: of.now_s)
        for module in (far_module, uplink_module):
            patched.setattr(module, "time", clock)
        patched.setattr(far_module, "admit", of.admit)
        patched.setattr(far_module, "probe", of.probe)
        of.let_in()
        try:
            yield of
        finally:
            of.far.close()


STAGES = st.lists(st.floats(0.005, 1.0), min_size=4, max_size=4)
RATES = st.floats(14.0, 24.0).map(lambda power: 2.0**power)
LOADS = st.one_of(
    st.just((1.0, 0.1)),
    st.tuples(st.floats(1.0, 2.5), st.just(0.6)),
    st.tuples(st.floats(1.0, 40.0), st.just(0.97)),
)
"""Factor of the stages, with a utilisation of the machine that allows it."""

CONDITIONS = st.builds(lambda rate, load: Conditions(rate, *load), RATES, LOADS)
PHASES = st.lists(
    st.tuples(CONDITIONS, st.integers(1, 8), st.sampled_from([0.0, 0.3, 4.0, 45.0])), min_size=2, max_size=6
)
"""Conditions, the number of requests in them, and the pause after each request."""


def notice_s(of: World) -> float:
    """Return the longest time until anything that has become better is noticed."""
    widest = float(of.costs.sums.sent_bytes[:-1].max())
    return max(TRIAL_S, widest / of.true.rate / PROBE_SHARE) + 2 * TUNING.load_s


def late_ones(of: World, phases: Any, by: float = 1 + BEHIND) -> list[list[Request]]:
    """Run phases; return the late requests of each, without those soon after something became better."""
    better_at_s, before, found = -math.inf, of.true, []
    for conditions, count, pause_s in phases:
        of.true = conditions
        if conditions.rate > before.rate or conditions.k < before.k:
            better_at_s = of.now_s
        before, late = conditions, []
        for _ in range(count):
            made = of.request()
            if made.is_late(by) and made.at_s > better_at_s + notice_s(of):
                late.append(made)
            of.pass_time(pause_s)
        found.append(late)
    return found


@given(number=st.integers(0, 2), device_s=STAGES, server_s=STAGES, first=CONDITIONS, phases=PHASES)
def test_after_each_change_at_most_one_answer_is_late(
    number: int, device_s: list[float], server_s: list[float], first: Conditions, phases: Any
) -> None:
    with world(number, device_s, server_s, first) as of:
        for late in late_ones(of, phases):
            assert len(late) <= 1, late


@given(
    number=st.integers(0, 2),
    device_s=STAGES,
    server_s=STAGES,
    first=CONDITIONS,
    phases=PHASES,
    seed=st.integers(0, 99),
)
def test_with_noise_at_most_one_answer_is_late_by_more_than_the_noise(
    number: int, device_s: list[float], server_s: list[float], first: Conditions, phases: Any, seed: int
) -> None:
    """Each transfer and stretch differs by up to a twentieth, and so do what was seen and what comes next."""
    rng, off = random.Random(seed), 0.05
    with world(number, device_s, server_s, first, noise=lambda: rng.uniform(1 - off, 1 + off)) as of:
        for late in late_ones(of, phases, by=(1 + BEHIND) * (1 + off) ** 2 / (1 - off)):
            assert len(late) <= 1, late


@given(number=st.integers(0, 2), device_s=STAGES, server_s=STAGES, first=CONDITIONS, phases=PHASES)
def test_no_answer_takes_longer_than_the_hedge_allows(
    number: int, device_s: list[float], server_s: list[float], first: Conditions, phases: Any
) -> None:
    with world(number, device_s, server_s, first) as of:
        alone_s = of.seconds_at(of.last)
        for conditions, count, pause_s in phases:
            of.true = conditions
            for _ in range(count):
                assert of.request().took_s <= (1 + LATE) * alone_s * (1 + 1e-9)
                of.pass_time(pause_s)


# ------------------------------------------------------------------------------ how soon, and how often


SHRINKING, LIKE_A_DEVICE, LIKE_A_SERVER = 0, (0.3,) * 4, (0.01,) * 4
"""The device takes 1.2 s, the idle server 0.04 s and 0.2 s for the input at 1 MB/s."""

FAST, THIN = 1e6, 1e5
IDLE, BUSY = (1.0, 0.1), (37.0, 0.97)


@pytest.fixture
def of() -> Iterator[World]:
    with world(SHRINKING, LIKE_A_DEVICE, LIKE_A_SERVER, Conditions(FAST, *IDLE)) as found:
        for _ in range(5):
            assert found.request().choice.cut == 0
        yield found


def places(of: World, count: int, pause_s: float = 0.0) -> str:
    """Return where each request was computed: on the server, on the device, or as a trial on both."""
    found = ""
    for _ in range(count):
        made = of.request().choice
        found += "d" if made.server is None else "t" if made.hedge_s == 0 else "s"
        of.pass_time(pause_s)
    return found


@pytest.mark.parametrize("pause_s", [0.0, 1.0, 7.0])
def test_a_load_that_comes_costs_one_late_answer_and_one_trial(of: World, pause_s: float) -> None:
    of.true = Conditions(FAST, *BUSY)
    late = of.request()
    assert late.is_late() and late.choice.cut == 0
    of.pass_time(pause_s)
    assert places(of, 3, pause_s) == "tdd"


def test_a_link_that_becomes_thin_costs_one_late_answer_and_one_trial(of: World) -> None:
    of.true = Conditions(THIN, *IDLE)
    assert of.request().is_late()
    assert places(of, 60) == "t" + "d" * 59, "over such a link no idle server is worth a trial"


@pytest.mark.parametrize("k", [30.0, 37.0])
def test_an_answer_that_was_late_by_chance_keeps_no_request_away(k: float, of: World) -> None:
    """The first load lets the server answer before the device does."""
    of.true = Conditions(FAST, k, BUSY[1])
    assert of.request().is_late()
    of.true = Conditions(FAST, *IDLE)
    assert places(of, 5) == "tssss"


def test_a_server_that_is_free_again_is_asked_within_four_seconds(of: World) -> None:
    of.true = Conditions(FAST, *BUSY)
    assert places(of, 20) == "st" + "d" * 18
    of.true = Conditions(FAST, *IDLE)
    began_s = of.now_s
    while of.request().choice.server is None:
        assert of.now_s - began_s < 4.0
    assert places(of, 3) == "sss"


@pytest.mark.parametrize("pause_s", [0.0, 1.0, 7.0])
@pytest.mark.parametrize(("thin", "wide"), [(THIN, FAST), (0.13 * FAST, 0.17 * FAST)])
def test_a_link_that_is_wide_again_costs_one_late_answer_and_one_trial(
    thin: float, wide: float, pause_s: float, of: World
) -> None:
    """Over the second thin link, too, no cut takes less than the device."""
    of.true = Conditions(thin, *IDLE)
    assert of.request().is_late() and of.request().choice.hedge_s == 0
    assert places(of, 20, pause_s) == "d" * 20
    of.true = Conditions(wide, *IDLE)
    assert places(of, 4, pause_s) == "dtss"


def test_probes_take_a_tenth_of_a_thin_link_at_most(of: World) -> None:
    of.true = Conditions(THIN, *IDLE)
    of.request()
    sent, began_s = 0, of.now_s
    send = of.far.link.add_transfer

    def add(num_bytes: int, seconds: float) -> None:
        nonlocal sent
        sent += num_bytes + (LEAST_PROBE if num_bytes > 1 else 0)  # as many precede it
        send(num_bytes, seconds)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(of.far.link, "add_transfer", add)
        assert places(of, 100) == "t" + "d" * 99
    assert 0 < sent <= MOST_PROBE_SHARE * THIN * (of.now_s - began_s)


def test_a_load_that_only_lessens_is_found_by_a_trial(of: World) -> None:
    """The machine stays busy, so that nothing but a request can tell."""
    of.true = Conditions(FAST, *BUSY)
    assert places(of, 20) == "st" + "d" * 18
    of.true = Conditions(FAST, 2.0, BUSY[1])
    began_s = of.now_s
    while (made := of.request()).choice.server is None:
        assert of.now_s - began_s < TRIAL_S
    assert made.choice.hedge_s == 0 and places(of, 3) == "sss"


def test_a_load_that_only_lessens_is_noticed_by_the_answers_of_others(of: World) -> None:
    """The machine stays busy, and the server tells of the requests of another device."""
    of.true = Conditions(FAST, *BUSY)
    assert places(of, 2) == "st"
    of.compute(0, 1.0)
    assert places(of, 10) == "d" * 10
    of.true = Conditions(FAST, 2.0, BUSY[1])
    of.compute(0, 1.0)
    assert places(of, 4) == "dtss"


def test_trials_take_a_hundredth_of_the_link_at_most(of: World) -> None:
    of.true = Conditions(FAST, *BUSY)
    assert places(of, 2) == "st"
    began_s, sent_s = of.now_s, 0.0
    while of.now_s < began_s + 1000.0:
        choice = of.request().choice
        if choice.server is not None:
            assert choice.hedge_s == 0
            sent_s += float(of.costs.sums.sent_bytes[choice.cut]) / FAST
    assert 0 < sent_s <= PROBE_SHARE * (of.now_s - began_s)


def test_a_load_that_was_there_from_the_start_is_known_by_the_prediction() -> None:
    with world(SHRINKING, LIKE_A_DEVICE, LIKE_A_SERVER, Conditions(FAST, *BUSY)) as of:
        assert of.load_meter.k == pytest.approx(BUSY[0])
        assert places(of, 5) == "ddddd"
        of.true = Conditions(FAST, *IDLE)
        of.pass_time(4.0)
        assert places(of, 3).endswith("ss")
