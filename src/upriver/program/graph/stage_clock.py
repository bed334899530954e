"""Time the stages of a run by the clock of their device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class StageClock:
    """Report the seconds of each stage when it is over.

    Args:
        tell: Called with the position after each stage and the stage's seconds. None for no report.
        at_the_end: On an accelerator, report all stages at the end instead of waiting for each.
    """

    def __init__(
        self, tell: Callable[[int, float], None] | None, device: torch.device, *, at_the_end: bool
    ) -> None:
        self._tell, self._device = tell, device
        self._at_the_end = at_the_end and device.type == "cuda"
        self._began: Any = None
        self._laps: list[tuple[int, Any, Any]] = []

    def begin(self) -> None:
        """Record the start of a stage."""
        if self._tell is not None:
            self._began = self._now()

    def end(self, position: int) -> None:
        """Record the end of a stage, after all its operators were called."""
        if self._tell is not None:
            self._laps.append((position, self._began, self._now()))
            if not self._at_the_end:
                self.tell()

    def tell(self) -> None:
        """Report the stages not reported yet. Wait until they are over."""
        while self._tell is not None and self._laps:
            position, began, ended = self._laps.pop(0)
            self._tell(position, self._between(began, ended))

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        return torch.cuda.current_stream(self._device).record_event(event)

    def _between(self, began: Any, ended: Any) -> float:
        if self._device.type != "cuda":
            return float(ended - began)
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000
