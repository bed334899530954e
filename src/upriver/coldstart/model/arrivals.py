"""Which weights of a model are there, and who waits for one."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Collection

from upriver.errors import UpriverError


class Arrivals:
    """Tensors by their numbers, each of which comes once, and callers who wait for them.

    Whoever waits for one that never comes gets the error that all others get.

    Args:
        count: How many are to come.
    """

    def __init__(self, count: int) -> None:
        self._here = bytearray(count)
        self._left = count
        self._error: UpriverError | None = None
        self._changed = threading.Condition()
        self._waited: Counter[int] = Counter()
        self._all_waited = 0

    def filled(self, index: int) -> bool:
        """One is there; True where it was the last.

        Whatever comes behind an error changes nothing.
        """
        with self._changed:
            if self._error is not None or self._here[index]:
                return False
            self._here[index] = True
            self._left -= 1
            if index in self._waited or (self._all_waited and not self._left):
                self._changed.notify_all()
            return not self._left

    def failed(self, error: UpriverError) -> bool:
        """The others will not come; False where all are there, or another error was first."""
        with self._changed:
            if self.over:
                return False
            self._error = error
            self._changed.notify_all()
            return True

    def forked(self) -> None:
        """In a child of this process, where nobody waits and nobody gives a lock back."""
        self._changed = threading.Condition()
        self._waited.clear()
        self._all_waited = 0

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return not self._left or self._error is not None

    @property
    def complete(self) -> bool:
        """Whether all are there."""
        return not self._left

    @property
    def error(self) -> UpriverError | None:
        """Why the others will not come; a new one each time, as callers raise it in threads of their own."""
        return None if self._error is None else copy.copy(self._error)

    def here(self, indices: Collection[int]) -> bool:
        """Whether these are there.

        Raises:
            UpriverError: If one does not come, of these or of all others.
        """
        self.check()
        return all(self._here[index] for index in indices)

    def wait(
        self, indices: Collection[int], hurry: Callable[[int], object], *, timeout_s: float | None = None
    ) -> bool:
        """Until these are there; False where that takes longer.

        Args:
            indices: Of those that something is about to read.
            hurry: Told of each that is not there yet.
            timeout_s: How long it may take; None for as long as it does.

        Raises:
            UpriverError: If one does not come: a model that failed answers nothing at all, even where what
                it would read is there.
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
        """Until everything is there.

        Raises:
            UpriverError: If something does not come.
        """
        with self._changed:
            self._all_waited += 1
            try:
                self._changed.wait_for(lambda: self.over)
            finally:
                self._all_waited -= 1
            self.check()

    def check(self) -> None:
        """Nothing, unless the others will not come.

        Raises:
            UpriverError: If they will not.
        """
        error = self.error
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback has this frame: what callers hold would stay until garbage is collected
