"""Simulate jobs whose samples are made by two sides, batch by batch, without a loader or a clock."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from upriver.control.share_controller import BatchStep, EpochWaits, StepWindow

SAMPLES = 1000
"""Samples of a batch: enough for any ratio."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """MB/s of a plant's parts; a batch has 1 MB.

    Attributes:
        here: Batches made by the training node alone.
        there: Batches made by workers alone.
        model: Batches consumed.
        taking: Cost here of a batch made there, as a share of making it here.
        latency_s: Seconds from a finished batch there to its arrival.
        dead: Whether everything that is given away comes back.
    """

    here: float
    there: float
    model: float
    taking: float = 0.0
    latency_s: float = 0.0
    dead: bool = False


class Plant:
    """A job that makes batches at most ``ahead`` of the one that is consumed.

    Args:
        speeds: Speeds at first; may be replaced at any time.
        noise: Standard deviation of each batch's costs, relative to the mean.
        seed: Seed of the noise.
        ahead: Batches planned ahead.
    """

    def __init__(self, speeds: Speeds, *, noise: float = 0.0, seed: int = 0, ahead: int = 8) -> None:
        self.speeds, self._noise, self._random = speeds, noise, random.Random(seed)
        self._handed = [0.0] * ahead
        self._here_free = self._there_free = 0.0

    def _cost(self, seconds: float) -> float:
        return max(0.0, seconds * (1 + self._noise * self._random.gauss(0, 1)))

    def step(self, ratio: float) -> BatchStep:
        """Return the step of a batch that is made by a ratio, after all earlier ones."""
        speeds, planned_s, last_s = self.speeds, self._handed.pop(0), self._handed[-1]
        back = ratio if speeds.dead else 0.0
        here = 1 - ratio * (1 - speeds.taking) + back * (1 - speeds.taking)
        self._here_free = max(self._here_free, planned_s) + self._cost(here / speeds.here)
        there_s = planned_s
        if ratio > back:
            self._there_free = max(self._there_free, planned_s) + self._cost(ratio / speeds.there)
            there_s = self._there_free + speeds.latency_s
        asked_s = last_s + 1 / speeds.model
        handed_s = max(asked_s, self._here_free, there_s)
        self._handed.append(handed_s)
        both_s = max(0.0, min(self._here_free, there_s) - asked_s)
        wait_s = handed_s - asked_s
        late = "here_s" if self._here_free >= there_s else "elsewhere_s"
        given = round(SAMPLES * ratio)
        waits = EpochWaits(both_s=both_s, samples=SAMPLES, given=given, returned=given if speeds.dead else 0)
        return BatchStep(
            waited_s=wait_s,
            consumed_s=1 / speeds.model,
            nbytes=10**6,
            waits=replace(waits, **{late: wait_s - both_s}),
        )

    def throughput(self, ratio: float, *, batches: int = 120) -> float:
        """Return the MB/s of a fixed ratio, once the first batches are through."""
        window = StepWindow()
        for number in range(batches):
            step = self.step(ratio)
            if number >= batches // 4:
                window.add(step)
        return window.throughput


def best_throughput(speeds: Speeds, **how: float) -> float:
    """Return the MB/s of the best of all ratios in twentieths."""
    return max(Plant(speeds, **how).throughput(at / 20) for at in range(21))  # type: ignore[arg-type]
