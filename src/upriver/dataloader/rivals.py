"""Candidates that promise about as much, tried in turns while training goes on.

What is measured of one candidate after another is not of one moment. Where machines are shared, a third of
their speed comes and goes meanwhile, and whichever candidate had luck would be taken. In turns all see the
same; every batch is handed out, at about the throughput that was promised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from upriver.dataloader.steer import Window
from upriver.policies import Offload, OffloadPolicy
from upriver.profile.metrics import Metrics

NEAR = 0.7
"""Of the most that any promises: whoever promises less is not tried."""

TURNS = 3
"""Of each, of one window."""

SAME = 0.02
"""Who gives so little more than the one that was decided for does not take its place."""


@dataclass(eq=False, slots=True)
class Rivals:
    """What they have given so far.

    Attributes:
        seen: MB/s of each one's turns.
        window: The turn that is not over.
    """

    seen: Mapping[str, list[float]] = field(default_factory=dict)
    window: Window | None = None

    @classmethod
    def of(cls, policy: OffloadPolicy, metrics: Metrics, decision: Offload) -> Rivals | None:
        """Candidates near to the one that was decided for; None where there are none."""
        if policy.promise is None or decision.candidate is None:
            return None
        least = NEAR * policy.promise(metrics, decision)
        names = [each.name for each in metrics.candidates if _promise(policy, metrics, each.name) >= least]
        return cls({name: [] for name in names}) if len(names) > 1 else None

    @property
    def next(self) -> str | None:
        """Whose turn it is; None once all have had theirs."""
        name = min(self.seen, key=lambda each: len(self.seen[each]))
        return name if len(self.seen[name]) < TURNS else None

    def add(self, name: str, window: Window) -> None:
        """One's turn is over."""
        self.seen[name].append(window.throughput)
        self.window = None

    def throughput(self, name: str) -> float:
        """MB/s of one, the median of its turns."""
        return median(self.seen[name])

    def best(self, before: str) -> str:
        """Whoever gives the most.

        Args:
            before: The one that was decided for.
        """
        found = max(self.seen, key=self.throughput)
        return found if self.throughput(found) > (1 + SAME) * self.throughput(before) else before

    def told(self, best: str) -> str:
        """What came of it, in words."""
        each = ", ".join(f"{name} {self.throughput(name):.4g}" for name in self.seen)
        return f"of those that promise about as much, tried in turns, {best} is taken ({each} MB/s)"


def _promise(policy: OffloadPolicy, metrics: Metrics, name: str) -> float:
    """MB/s that one promises at its own best ratio."""
    alone = replace(metrics, candidates=tuple(each for each in metrics.candidates if each.name == name))
    assert policy.promise is not None
    return policy.promise(alone, policy.decide(alone))
