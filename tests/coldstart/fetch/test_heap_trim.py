"""Check that memory freed by pieces goes back to the system during a load, at little cost of load time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from upriver.coldstart.fetch.heap_trim import FEWEST_BYTES, HEAP_BYTES, SHARE, HeapTrimmer


class Allocator:
    """Return memory to the system, in a set time by its own clock."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.now_s, self.times, self._takes_s = 100.0, 0, takes_s

    def trim(self, pad: int) -> int:
        assert pad == 0
        self.now_s += self._takes_s
        self.times += 1
        return 1

    def clock(self) -> float:
        return self.now_s

    def heap(self) -> HeapTrimmer:
        return HeapTrimmer(self.trim, self.clock)


def test_memory_is_given_back_each_time_that_so_much_has_come() -> None:
    allocator = Allocator()
    heap = allocator.heap()
    for number in range(16):
        heap.came(HEAP_BYTES // 4)
        assert allocator.times == (number + 1) // 4


def test_what_takes_long_is_done_less_often() -> None:
    allocator = Allocator(takes_s=0.5)
    heap, wall_s = allocator.heap(), 0.5 / SHARE
    for _ in range(1000):  # each in a second
        heap.came(HEAP_BYTES)
        allocator.now_s += 1.0
    assert allocator.times == pytest.approx(1000 / wall_s, abs=1)


@pytest.mark.parametrize(("nbytes", "times"), [(FEWEST_BYTES - 1, 0), (FEWEST_BYTES, 1), (HEAP_BYTES, 1)])
def test_the_end_gives_back_what_is_worth_it(nbytes: int, times: int) -> None:
    allocator = Allocator()
    heap = allocator.heap()
    heap.came(nbytes)
    heap.ended()
    heap.ended()
    assert allocator.times == times


@pytest.mark.parametrize("do", [HeapTrimmer.ended, lambda heap: heap.came(HEAP_BYTES)])
def test_a_c_library_that_cannot_is_left_alone(do: Callable[[HeapTrimmer], None]) -> None:
    heap = HeapTrimmer(None)
    heap.came(FEWEST_BYTES)
    do(heap)
