"""Try candidates with similar promises in turns while training runs; offloading nothing is one of them.

Candidates measured one after another are not measured at the same moment. Shared machines gain and lose a
third of their speed meanwhile, so the luckiest candidate would win. In turns all candidates see the same
conditions. Every batch is handed out, at about the promised throughput. Each candidate has a ratio of its
own, steered by its own turns: a slow disk of one candidate's workers does not affect the others. The cost of
a batch made elsewhere for the training node (Ocycle) is known more precisely than throughputs. It decides
between candidates that turns do not separate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from upriver.dataloader.autotune.ratio_controller import RatioController, StepWindow
from upriver.policies import OffloadDecision, OffloadPolicy
from upriver.profile.throughput import Metrics

HERE = ""
"""Name of the candidate that offloads nothing."""

NEAR = 0.7
"""Share of the largest promise below which a candidate is not tried."""

TURNS, MORE_TURNS = 3, 6
"""Turns of each candidate, of one window each; and turns of those still near the best one after that."""

UNSURE = 0.1
"""Relative shortfall from the best throughput after `TURNS` beyond which a candidate has no further turns."""

SAME = 0.05
"""Relative shortfall from the best throughput up to which a candidate counts as equally good."""


@dataclass(eq=False, slots=True)
class CandidateTrials:
    """Throughputs of the candidates so far.

    Args:
        alone: MB/s with nothing offloaded, as measured before.
        promises: MB/s that each candidate promises; the first of several equal ones wins.
        ocycles: CPU seconds that a batch made elsewhere costs the training node, by candidate.
        steered: Controller of each candidate's ratio, except for the one that offloads nothing.

    Attributes:
        seen: MB/s in each candidate's turns.
        useless: Candidates that were steered to ratio 0 and have no further turn.
        window: Unfinished turn.
    """

    alone: float
    promises: Mapping[str, float]
    ocycles: Mapping[str, float]
    steered: Mapping[str, RatioController]
    seen: dict[str, list[float]] = field(init=False)
    useless: list[str] = field(default_factory=list)
    window: StepWindow | None = None

    def __post_init__(self) -> None:
        self.seen = {name: [] for name in self.promises}

    @classmethod
    def of(cls, policy: OffloadPolicy, metrics: Metrics, decision: OffloadDecision) -> CandidateTrials | None:
        """Return the candidates with promises near the decision's; None if there are no others."""
        if policy.promise is None or decision.candidate is None:
            return None
        alone = min(metrics.gthp, metrics.lthp)
        promises = {HERE: alone, decision.candidate: 0.0}
        steered = dict[str, RatioController]()
        for each in metrics.candidates:
            by_itself = replace(metrics, candidates=(each,))
            found = policy.decide(by_itself)
            promises[each.name] = policy.promise(by_itself, found)
            # A candidate that promises nothing is tried at the decision's ratio.
            ratio = found.ratio or decision.ratio
            steered[each.name] = RatioController(ratio, here=metrics.lthp, elsewhere=each.rthp)
        least = NEAR * max(promises.values())
        near = {name: promised for name, promised in promises.items() if promised >= least}
        ocycles = {each.name: each.ocycle for each in metrics.candidates}
        return cls(alone, near, ocycles, steered) if len(near) > 1 else None

    @property
    def next(self) -> str | None:
        """Return the candidate of the next turn; None once all had theirs, or one is far ahead."""
        if not self.seen.keys() - {HERE}:
            return None
        name = min(self.seen, key=self._turns)
        if self._turns(name) < TURNS:
            return name
        near = self._with(1 - UNSURE)
        name = min(near, key=self._turns)
        return name if len(near) > 1 and self._turns(name) < MORE_TURNS else None

    def add(self, name: str, window: StepWindow) -> None:
        """Record the end of a candidate's turn."""
        self.seen[name].append(window.throughput)
        self.window = None
        if name != HERE and not self.steered[name].turn(window):
            del self.seen[name]
            self.useless.append(name)

    def ratio(self, name: str) -> float:
        """Return a candidate's ratio, as steered."""
        return 0.0 if name == HERE else self.steered[name].ratio

    def throughput(self, name: str) -> float:
        """Return the median MB/s of a candidate's turns; without turns, the MB/s with nothing offloaded."""
        return median(self.seen.get(name) or [self.alone])

    @property
    def best(self) -> str:
        """Return the candidate with the least cost here among those near the highest throughput.

        Offloading nothing wins if it is among them. Work elsewhere costs machines and bandwidth, and delays
        an epoch's first batches, when none are made ahead.
        """
        near = self._with(1 - SAME) if self.seen else [HERE]
        return HERE if HERE in near else min(near, key=self.ocycles.__getitem__)

    def factor(self, name: str) -> float:
        """Return the factor on a candidate's Rthp that makes its promise match its turns.

        It is relative to the best candidate's promise, as turns are of another moment than Gthp and Lthp. A
        promise's excess over Lthp grows with Rthp.
        """
        gain, best = self.promises[name] - self.alone, self.throughput(self.best)
        if gain <= 0 or best <= 0:
            return 1.0
        return max(0.0, self.promises[self.best] * self.throughput(name) / best - self.alone) / gain

    def told(self) -> str:
        """Return the outcome in words."""
        each = ", ".join(f"{name or 'nothing'} {self.throughput(name):.4g}" for name in self.seen)
        best = f"{self.best} is taken" if self.best else "nothing is offloaded"
        if self.best and len(self._with(1 - SAME)) > 1:
            best += ", which costs the least here of those that give as much"
        found = "; ".join(filter(None, [f"{each} MB/s" if each else "", *map(_useless, self.useless)]))
        return f"of those that promise about as much, tried in turns, {best} ({found})"

    def _turns(self, name: str) -> int:
        return len(self.seen[name])

    def _with(self, share: float) -> list[str]:
        """Return the candidates with at least ``share`` of the highest throughput."""
        most = max(map(self.throughput, self.seen))
        return [name for name in self.seen if self.throughput(name) >= share * most]


def _useless(name: str) -> str:
    return f"{name} was of no use"
