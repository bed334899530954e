"""Track which weights of a model have arrived, and let callers wait for them."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Collection

from upriver.errors import UpriverError


class Arrivals:
    """Track numbered tensors, each of which arrives once, and the callers that wait for them.

    If a tensor never arrives, all waiting callers get the same error.
    """

    def __init__(self, count: int) -> None:
        self._here = bytearray(count)
        self._left = count
        self._error: UpriverError | None = None
        self._changed = threading.Condition()
        self._waited: Counter[int] = Counter()
        self._all_waited = 0

    def filled(self, index: int) -> None:
        """Mark a tensor as arrived; after an error this changes nothing."""
        with self._changed:
            if self._error is not None or self._here[index]:
                return
            self._here[index] = True
            self._left -= 1
            if index in self._waited or (self._all_waited and not self._left):
                self._changed.notify_all()

    def failed(self, error: UpriverError) -> bool:
        """Mark the remaining tensors as failed. Return False if all have arrived or the load has failed."""
        with self._changed:
            if self.over:
                return False
            self._error = error
            self._changed.notify_all()
            return True

    def forked(self) -> None:
        """Reset lock and waiting callers in a forked child, where no thread holds or releases them."""
        self._changed = threading.Condition()
        self._waited.clear()
        self._all_waited = 0

    @property
    def over(self) -> bool:
        """True if no more tensor will arrive."""
        return not self._left or self._error is not None

    @property
    def complete(self) -> bool:
        """True if all tensors have arrived."""
        return not self._left

    @property
    def error(self) -> UpriverError | None:
        """Return the error of the remaining tensors, as a copy: each calling thread raises its own."""
        return None if self._error is None else copy.copy(self._error)

    def here(self, indices: Collection[int]) -> bool:
        """Return True if these tensors have arrived.

        Raises:
            UpriverError: If the load has failed, for these tensors or others.
        """
        self.check()
        return all(self._here[index] for index in indices)

    def wait(
        self, indices: Collection[int], hurry: Callable[[int], object], *, timeout_s: float | None = None
    ) -> bool:
        """Wait until these tensors have arrived. Return False after a timeout.

        Args:
            hurry: Function to call with each tensor that has not arrived.

        Raises:
            UpriverError: If the load has failed. A failed model computes nothing, even if the tensors that it
                would read have arrived.
        """
        if self.here(indices):
            return True
        missing = [index for index in indices if not self._here[index]]
        for index in missing:
            hurry(index)
        with self._changed:
            self._waited.update(missing)
            try:
                in_time = self._changed.wait_for(
                    lambda: self._error is not None or all(self._here[index] for index in missing), timeout_s
                )
            finally:
                self._waited -= Counter(missing)
            self.check()
            return in_time

    def wait_for_all(self) -> None:
        """Wait until all tensors have arrived.

        Raises:
            UpriverError: If the load fails.
        """
        with self._changed:
            self._all_waited += 1
            try:
                self._changed.wait_for(lambda: self.over)
            finally:
                self._all_waited -= 1
            self.check()

    def check(self) -> None:
        """Raise the error of a failed load.

        Raises:
            UpriverError: If the load has failed.
        """
        if self._error is not None:
            # Without a name here: the traceback holds this frame, and with it the callers' objects.
            raise copy.copy(self._error)
