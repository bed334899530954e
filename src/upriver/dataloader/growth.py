"""How many workers a loader needs: decided once, by what one of them delivers.

FastFlow (PVLDB 16(5), section 9): with Rthp measured with one worker, n = ceil(Lower / Rthp of one worker)
equal ones make up for what the training node lacks.

Departures
    - Rthp of n workers is not taken to be n times that of one: once they are there the candidate is measured
      with all of them, and decided again.
    - Training goes on with the one while the others start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from upriver.dataloader.auto import Measured
from upriver.dataloader.hired import Hired
from upriver.errors import ConfigError
from upriver.policies import fastflow
from upriver.profile.metrics import SPEEDUP_THRESHOLD


def growth(hired: Hired | None, measured: Measured, *, offload: object) -> Growth | None:
    """What finds how many workers there are to be, where that was left open.

    Args:
        hired: None where nobody was named.
        offload: As the loader was told.

    Raises:
        ConfigError: If nothing is measured, and so nobody will know.
    """
    if hired is None or not hired.grows or offload == "never":
        return None
    if offload != "auto":
        raise ConfigError(
            "how many workers are needed shows with offload='auto' only, which measures what one delivers; "
            f"say how many, or leave out offload={offload!r}"
        )
    return Growth(hired, measured)


class Growth:
    """Starts as many workers as one epoch after another shows to be needed.

    Args:
        hired: Has one worker at first, and can start others.
        measured: What is known; when there are more workers what was measured with one is forgotten.
        threshold: FastFlow's SpeedUpThreshold.

    Attributes:
        candidates: What is measured: all that could be offloaded, then the one that was best with one worker.
        why: How many workers there are to be, in a sentence; empty where that is not decided.
    """

    def __init__(self, hired: Hired, measured: Measured, *, threshold: float = SPEEDUP_THRESHOLD) -> None:
        self._hired, self._measured, self._threshold = hired, measured, threshold
        self.candidates: tuple[str, ...] = hired.candidates
        self.why = ""
        self._joined = hired.joined

    def batches(self, begin: Callable[[Sequence[str]], Iterator[Any]]) -> Iterator[Any]:
        """All of an epoch.

        Args:
            begin: What is left of it, with candidates that were not measured yet measured first.
        """
        self._look()
        while True:
            for batch in begin(self.candidates):
                yield batch
                if self._look():
                    break
            else:
                return

    def _look(self) -> bool:
        """Whether workers have come since one was measured; how many are to come is decided when it was."""
        self._hired.come()
        if self.why and self._hired.joined != self._joined:
            self._joined = self._hired.joined
            self._measured.rthp.clear()
            self._measured.ocycles.clear()
            self._measured.decision = None
            return True
        if not self.why and self._measured.decision is not None:
            self._joined = self._hired.joined
            self._decide()
        return False

    def _decide(self) -> None:
        metrics = self._measured.metrics(self._threshold, self.candidates)
        if not metrics.candidates:  # nothing stalls, and so nothing was measured
            self.why = "no worker is needed"
            self._hired.release("not needed: nothing keeps the model waiting")
            return
        if not self._hired.count:
            self.why = "none of the workers can be used"
            self._hired.release("")
            return
        best = max(metrics.candidates, key=lambda candidate: fastflow.estimate(metrics, candidate))
        most = self._hired.most
        needed = max(1, fastflow.workers_needed(metrics, best, most=most))
        self.candidates = (best.name,)
        self.why = (
            f"{needed} of at most {most} workers, by Lower / Rthp of one = "
            f"{fastflow.lower(metrics, best):.4g} / {best.rthp:.4g} MB/s"
        )
        self._hired.grow_to(needed)
