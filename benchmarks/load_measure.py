"""What `load_aware.py` runs in one setting: what cutting costs first, then its phases, request by request.

A row holds every request as `load_job` told of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from load_schedule import CHOOSING, LOCAL, OURS, STEADY, Phase, Setting, Turns, way_of

LIKELY_LOADS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Load factors at which it is asked which cut would win, to find those that are worth trying throughout."""

MOST_FIXED = 4
"""Of those."""

FIRST, LATER = 1, 2
"""Requests at a cut that nobody has used yet: the first, which has to cut, and those it is compared with."""

WARM = 2
"""Requests of every way that has a link before any counts: it has to learn of it."""

DECISIONS = 200
"""That are timed."""

Tick = Callable[[str], None]
Told = dict[str, Any]


class Device(Protocol):
    """Takes orders; see ``load_job.Device``."""

    def ask(self, **order: Any) -> Told:
        """Do something, and tell of it."""


class Conditions(Protocol):
    """Lets a phase begin; see ``load_bed.Bed``."""

    def begin(self, phase: Phase) -> None:
        """From now on."""


def measure(
    device: Device,
    bed: Conditions,
    setting: Setting,
    tick: Tick,
    clock: Callable[[], float] = time.monotonic,
) -> Told:
    """All of a setting.

    Args:
        device: Whose requests they are.
        bed: Where.
        setting: What.
        tick: Told of each phase as it begins.
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


def fixed_cuts(device: Device, setting: Setting) -> list[int]:
    """Inside the network: those that would win most over loads and rates of the setting, and the paper's."""
    loads = LIKELY_LOADS if setting.part == "load" else LIKELY_LOADS[:1]
    rates = sorted({phase.mbit for phase in setting.phases})
    found = device.ask(do="likely", mbit=rates, loads=loads)
    return sorted({*found["cuts"][:MOST_FIXED], *found["named"]})


def cutting_of(device: Device, cut: int) -> Told | None:
    """Seconds of the first request at a cut, and of those right after; None if there was one before."""
    if not device.ask(do="open", way=way_of(cut))["new"]:
        return None
    told = [device.ask(do="request", way=way_of(cut), number=number) for number in range(FIRST + LATER)]
    return {
        "first_s": told[0]["seconds"],
        "later_s": statistics.median(each["seconds"] for each in told[FIRST:]),
    }


class Phases:
    """Goes through phases, and keeps every request.

    Args:
        device: Whose requests they are.
        bed: Where.
        setting: Whose phases they are.
        cuts: Fixed ones.
        clock: Seconds.

    Attributes:
        requests: All of them, in order.
        told: Of each phase, when it began and how many rounds it had.
    """

    def __init__(
        self,
        device: Device,
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
        """One phase: rounds until its time is over and everybody has had a turn."""
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
