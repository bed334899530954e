"""Candidates that promise about as much, tried in turns while training goes on; to offload nothing is one.

What is measured of one candidate after another is not of one moment. Where machines are shared, a third of
their speed comes and goes meanwhile, and whichever candidate had luck would be taken. In turns all see the
same; every batch is handed out, at about the throughput that was promised. Each has a ratio of its own,
steered by its own turns: that the workers of one wait for a slow disk is nothing to another. What a batch
made elsewhere still costs the training node (Ocycle) is known better than throughputs are: it decides between
those that turns do not tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from upriver.dataloader.autotune.ratio_controller import Steering, StepWindow
from upriver.policies import OffloadDecision, OffloadPolicy
from upriver.profile.throughput import Metrics

HERE = ""
"""Among the candidates: nothing is offloaded."""

NEAR = 0.7
"""Of the most that any promises: whoever promises less is not tried."""

TURNS, MORE_TURNS = 3, 6
"""Of each, of one window; and of those that are near the best one after so many."""

UNSURE = 0.1
"""Of the most that any gives: whoever gives less by more after `TURNS` has no further ones."""

SAME = 0.05
"""Of the most: whoever gives less by no more is as good, as far as turns tell."""


@dataclass(eq=False, slots=True)
class Rivals:
    """What they have given so far.

    Args:
        alone: MB/s with nothing offloaded, as it was measured before.
        promises: MB/s that each one promises; of equals in all the first is taken.
        ocycles: CPU seconds that a batch which is made elsewhere costs the training node.
        steered: The ratio of each one but nothing.

    Attributes:
        seen: MB/s of each one's turns.
        useless: Who was steered to nothing, and has no further turn.
        window: The turn that is not over.
    """

    alone: float
    promises: Mapping[str, float]
    ocycles: Mapping[str, float]
    steered: Mapping[str, Steering]
    seen: dict[str, list[float]] = field(init=False)
    useless: list[str] = field(default_factory=list)
    window: StepWindow | None = None

    def __post_init__(self) -> None:
        self.seen = {name: [] for name in self.promises}

    @classmethod
    def of(cls, policy: OffloadPolicy, metrics: Metrics, decision: OffloadDecision) -> Rivals | None:
        """Those that promise about as much as the one decided for; None where there are no others."""
        if policy.promise is None or decision.candidate is None:
            return None
        alone = min(metrics.gthp, metrics.lthp)
        promises = {HERE: alone, decision.candidate: 0.0}
        steered = dict[str, Steering]()
        for each in metrics.candidates:
            by_itself = replace(metrics, candidates=(each,))
            found = policy.decide(by_itself)
            promises[each.name] = policy.promise(by_itself, found)
            # Who promises nothing is tried at the ratio of the one that promises the most.
            ratio = found.ratio or decision.ratio
            steered[each.name] = Steering(ratio, here=metrics.lthp, elsewhere=each.rthp)
        least = NEAR * max(promises.values())
        near = {name: promised for name, promised in promises.items() if promised >= least}
        ocycles = {each.name: each.ocycle for each in metrics.candidates}
        return cls(alone, near, ocycles, steered) if len(near) > 1 else None

    @property
    def next(self) -> str | None:
        """Whose turn it is; None once all have had theirs, or one is far ahead."""
        if not self.seen.keys() - {HERE}:
            return None
        name = min(self.seen, key=self._turns)
        if self._turns(name) < TURNS:
            return name
        near = self._with(1 - UNSURE)
        name = min(near, key=self._turns)
        return name if len(near) > 1 and self._turns(name) < MORE_TURNS else None

    def add(self, name: str, window: StepWindow) -> None:
        """One's turn is over."""
        self.seen[name].append(window.throughput)
        self.window = None
        if name != HERE and not self.steered[name].turn(window):
            del self.seen[name]
            self.useless.append(name)

    def ratio(self, name: str) -> float:
        """Of one, as it is steered."""
        return 0.0 if name == HERE else self.steered[name].ratio

    def throughput(self, name: str) -> float:
        """MB/s of one, the median of its turns; of nothing as it was measured before, where it had none."""
        return median(self.seen.get(name) or [self.alone])

    @property
    def best(self) -> str:
        """Of those that give about the most the one that costs the least here.

        Nobody, where nothing offloaded is among them: what others make is not free, on their machines and
        on the link, and the first batches of an epoch, when nothing is made ahead yet, are later for it.
        """
        near = self._with(1 - SAME) if self.seen else [HERE]
        return HERE if HERE in near else min(near, key=self.ocycles.__getitem__)

    def factor(self, name: str) -> float:
        """What a candidate's Rthp is to be multiplied by, for its promise to be what turns have shown of it.

        Relative to what the best one promises: turns are of another moment than Gthp and Lthp. What a promise
        is above Lthp grows with Rthp.
        """
        gain, best = self.promises[name] - self.alone, self.throughput(self.best)
        if gain <= 0 or best <= 0:
            return 1.0
        return max(0.0, self.promises[self.best] * self.throughput(name) / best - self.alone) / gain

    def told(self) -> str:
        """What came of it, in words."""
        each = ", ".join(f"{name or 'nothing'} {self.throughput(name):.4g}" for name in self.seen)
        best = f"{self.best} is taken" if self.best else "nothing is offloaded"
        if self.best and len(self._with(1 - SAME)) > 1:
            best += ", which costs the least here of those that give as much"
        found = "; ".join(filter(None, [f"{each} MB/s" if each else "", *map(_useless, self.useless)]))
        return f"of those that promise about as much, tried in turns, {best} ({found})"

    def _turns(self, name: str) -> int:
        return len(self.seen[name])

    def _with(self, share: float) -> list[str]:
        """Those that give at least such a share of the most."""
        most = max(map(self.throughput, self.seen))
        return [name for name in self.seen if self.throughput(name) >= share * most]


def _useless(name: str) -> str:
    return f"{name} was of no use"
