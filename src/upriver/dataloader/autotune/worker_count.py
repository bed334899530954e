"""Decide once how many workers a loader needs, by the throughput of one of them.

FastFlow (PVLDB 16(5), section 9): with Rthp measured with one worker, n = ceil(Lower / Rthp of one worker)
equal workers supply what the training node lacks.

Departures
    - Rthp of n workers is not assumed to be n times that of one: with all of them running, the candidate is
      measured again, and decided again.
    - Training continues with the one worker while the others start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from upriver.dataloader.autotune.offload_tuner import TunerMeasurements
from upriver.dataloader.remote.provisioning import ProvisionedWorkers
from upriver.errors import ConfigError
from upriver.policies import fastflow
from upriver.profile.throughput import SPEEDUP_THRESHOLD, Metrics


def growth(
    hired: ProvisionedWorkers | None, measured: TunerMeasurements, *, offload: object
) -> WorkerGrowth | None:
    """Return the object that decides the number of workers; None if the number is given.

    Args:
        hired: Workers; None if the user named none.
        offload: The loader's argument.

    Raises:
        ConfigError: If nothing is measured, so that the number stays unknown.
    """
    if hired is None or not hired.grows or offload == "never":
        return None
    if offload != "auto":
        raise ConfigError(
            "how many workers are needed shows with offload='auto' only, which measures what one delivers; "
            f"say how many, or leave out offload={offload!r}"
        )
    return WorkerGrowth(hired, measured)


class WorkerGrowth:
    """Start as many workers as the throughput of one shows to be needed.

    Args:
        hired: Has one worker at first, and can start others.
        measured: Measurements; those with fewer workers are discarded when more have joined.

    Attributes:
        candidates: Candidates to measure: at first all, then the one that was best with one worker.
        why: The number of workers and its reason; empty if undecided.
    """

    def __init__(
        self, hired: ProvisionedWorkers, measured: TunerMeasurements, *, threshold: float = SPEEDUP_THRESHOLD
    ) -> None:
        self._hired, self._measured, self._threshold = hired, measured, threshold
        self.candidates: tuple[str, ...] = hired.candidates
        self.why = ""
        self._known, self._released = hired.joined, False

    def batches(self, begin: Callable[[Sequence[str]], Iterator[Any]]) -> Iterator[Any]:
        """Return an epoch's batches.

        Args:
            begin: Return an iterator over the rest of the epoch that first measures candidates without
                measurements.
        """
        return _Batches(self, begin)

    def look(self) -> bool:
        """Decide between batches, once there are measurements; return whether to measure again."""
        self._hired.come()
        if self.why and self._hired.joined != self._known:
            self._begin_anew()
            return True
        if self._measured.measuring:
            if self._hired.released:  # the tuner has found that it must decide again
                self._hired.hire_again()
        elif not self.why:
            self._known = self._hired.joined
            self._decide()
        return False

    def _begin_anew(self) -> None:
        """Measure again with other workers; if all had been released, their number is open again."""
        if self._released:
            self.candidates, self.why, self._released = self._hired.candidates, "", False
        self._known = self._hired.joined
        self._measured.forget_candidates()

    def _decide(self) -> None:
        metrics = self._measured.metrics(self._threshold, self.candidates)
        if self._measured.nobody:
            self._release("none of the workers can be used", "not used")
        elif not metrics.candidates:  # nothing stalls, so nothing was measured
            self._release("no worker is needed", "not needed: nothing keeps the model waiting")
        elif not self._hired.count:
            self._release("none of the workers can be used", "not used")
        else:
            self._grow(metrics)

    def _grow(self, metrics: Metrics) -> None:
        best = max(metrics.candidates, key=lambda candidate: fastflow.estimate(metrics, candidate))
        most = self._hired.most
        needed = max(1, fastflow.workers_needed(metrics, best, most=most))
        self.candidates = (best.name,)
        self.why = (
            f"{needed} of at most {most} workers, by Lower / Rthp of one = "
            f"{fastflow.lower(metrics, best):.4g} / {best.rthp:.4g} MB/s"
        )
        self._hired.grow_to(needed)

    def _release(self, why: str, why_not: str) -> None:
        self.why = why
        self._released = True
        self._hired.release(why_not)


class _Batches(Iterator[Any]):
    """Iterator over an epoch that measures again after workers have joined."""

    def __init__(self, growth: WorkerGrowth, begin: Callable[[Sequence[str]], Iterator[Any]]) -> None:
        self._growth, self._begin = growth, begin
        self._batches: Iterator[Any] | None = None

    def __next__(self) -> Any:
        anew = self._growth.look()
        if self._batches is None or anew:
            self._batches = self._begin(self._growth.candidates)
        return next(self._batches)
