"""Measure one setting of `load_aware`: the cost of cutting first, then its phases, request by request.

A row holds every request as `job` reported it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from benchmarks.load_aware.schedule import CHOOSING, LOCAL, OURS, STEADY, Phase, Setting, Turns, way_of

LIKELY_LOADS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Load factors for the search for winning cuts, which are then tried throughout."""

MOST_FIXED = 4
"""Most of these cuts."""

FIRST, LATER = 1, 2
"""Requests at an unused cut: the first, which has to cut, and those it is compared with."""

WARM = 2
"""Uncounted first requests of every way with a link, which measure the link."""

DECISIONS = 200
"""Number of timed decisions."""

Tick = Callable[[str], None]
Told = dict[str, Any]


class OrderTaker(Protocol):
    """Execute orders; see ``job.Device``."""

    def ask(self, **order: Any) -> Told:
        """Execute an order, and return its answer."""


class Conditions(Protocol):
    """Begin phases; see ``bed.Bed``."""

    def begin(self, phase: Phase) -> None:
        """Begin a phase."""


def measure(
    device: OrderTaker,
    bed: Conditions,
    setting: Setting,
    tick: Tick,
    clock: Callable[[], float] = time.monotonic,
) -> Told:
    """Measure all of a setting.

    Args:
        device: Sends the requests.
        bed: The hosts.
        setting: The setting.
        tick: Called with each phase as it begins.
        clock: Seconds.
    """
    bed.begin(setting.phases[0])
    ways = (*CHOOSING, *STEADY)
    for way in ways:
        device.ask(do="open", way=way)
    cuts = fixed_cuts(device, setting)
    cutting = {str(cut): costs for cut in cuts if (costs := cutting_of(device, cut)) is not None}
    for way in (each for each in ways if each != LOCAL):
        for number in range(WARM):
            device.ask(do="request", way=way, number=number)
    decide_s = device.ask(do="decide", way=OURS, count=DECISIONS)["seconds"]
    phases = Phases(device, bed, setting, cuts, clock)
    for phase in setting.phases:
        tick(f"{setting.key}: load {phase.level}, {phase.mbit:g} Mbit/s")
        phases.run(phase)
    return {
        "fixed": cuts,
        "cutting": cutting,
        "decide_s": decide_s,
        "phases": phases.told,
        "requests": phases.requests,
    }


def fixed_cuts(device: OrderTaker, setting: Setting) -> list[int]:
    """Return cuts inside the network: the paper's, and the most frequent winners over loads and rates."""
    loads = LIKELY_LOADS if setting.part == "load" else LIKELY_LOADS[:1]
    rates = sorted({phase.mbit for phase in setting.phases})
    found = device.ask(do="likely", mbit=rates, loads=loads)
    return sorted({*found["cuts"][:MOST_FIXED], *found["named"]})


def cutting_of(device: OrderTaker, cut: int) -> Told | None:
    """Return the seconds of the first request at a cut and of the next ones; None if it was used before."""
    if not device.ask(do="open", way=way_of(cut))["new"]:
        return None
    told = [device.ask(do="request", way=way_of(cut), number=number) for number in range(FIRST + LATER)]
    return {
        "first_s": told[0]["seconds"],
        "later_s": statistics.median(each["seconds"] for each in told[FIRST:]),
    }


class Phases:
    """Run phases, and keep every request.

    Args:
        device: Sends the requests.
        bed: The hosts.
        setting: The setting of the phases.
        cuts: Fixed ones.
        clock: Seconds.

    Attributes:
        requests: All of them, in order.
        told: Of each phase, its start and its number of rounds.
    """

    def __init__(
        self,
        device: OrderTaker,
        bed: Conditions,
        setting: Setting,
        cuts: Sequence[int],
        clock: Callable[[], float],
    ) -> None:
        self._device, self._bed, self._cuts, self._clock = device, bed, cuts, clock
        self._began, self._rounds = clock(), 0
        self.requests: list[Told] = []
        self.told: list[Told] = []

    def run(self, phase: Phase) -> None:
        """Run one phase: rounds until its time is over and every way has had a turn."""
        self._bed.begin(phase)
        began, turns = self._clock(), Turns(self._cuts, self._rounds)
        while self._clock() - began < phase.seconds or not turns.complete:
            for way in turns.round():
                turns.took(way, self._request(way))
        self._rounds += turns.rounds
        self.told.append({"at_s": round(began - self._began, 3), "rounds": turns.rounds})

    def _request(self, way: str) -> float:
        at_s, number = self._clock() - self._began, len(self.requests)
        told = self._device.ask(do="request", way=way, number=number)
        self.requests.append({"phase": len(self.told), "way": way, "at_s": round(at_s, 3), **told})
        return float(told["seconds"])
