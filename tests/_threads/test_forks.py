from __future__ import annotations

import gc
import threading
from functools import partial

from tests.finetune.children import ended, fork
from upriver._threads import forks
from upriver._threads.forks import ForkSafeLock, reset_in_child, unless_forked


class Counted:
    """Count its resets."""

    def __init__(self) -> None:
        self.resets = 0
        reset_in_child(self)

    def forked(self) -> None:
        self.resets += 1


def test_a_child_resets_what_lives_and_its_parent_does_not() -> None:
    counted = Counted()
    assert ended(fork(partial(was_reset, counted, 1))) == 0
    assert ended(fork(lambda thing=counted: ended(fork(partial(was_reset, thing, 2))) == 0)) == 0
    assert counted.resets == 0 and counted in forks._forked


class Unresettable:
    """Fail to be reset."""

    def __init__(self) -> None:
        reset_in_child(self)

    def forked(self) -> None:
        raise RuntimeError("it cannot be reset")


def test_one_that_cannot_be_reset_keeps_no_other_from_it() -> None:
    things = [Unresettable(), Counted(), Unresettable(), Counted()]
    counted = [thing for thing in things if isinstance(thing, Counted)]
    assert ended(fork(lambda: all(was_reset(thing, 1) for thing in counted))) == 0


def was_reset(counted: Counted, times: int) -> bool:
    return counted.resets == times


def test_what_is_gone_is_not_reset() -> None:
    before, counted = len(forks._forked), Counted()
    assert len(forks._forked) == before + 1
    del counted
    gc.collect()
    assert len(forks._forked) <= before


def test_a_lock_that_another_thread_holds_is_free_in_a_child() -> None:
    lock, held, over = ForkSafeLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            over.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)

    def child() -> bool:
        with lock:
            return True

    forked = fork(child)
    over.set()
    holder.join()
    assert ended(forked) == 0


def test_a_lock_that_the_forking_thread_holds_stays_its_own() -> None:
    lock = ForkSafeLock()

    def child() -> bool:
        tried: list[bool] = []
        other = threading.Thread(target=lambda: tried.append(lock._lock.acquire(blocking=False)))
        other.start()
        other.join()
        with lock:
            return tried == [False]

    with lock:
        child_id = fork(child)
    assert ended(child_id) == 0


def test_a_lock_excludes_other_threads_and_not_its_holder() -> None:
    lock, count = ForkSafeLock(), [0]

    def add() -> None:
        for _ in range(200):
            with lock, lock:
                before = count[0]
                threading.Event().wait(0)
                count[0] = before + 1

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count == [800]


def test_what_ends_something_does_nothing_in_a_fork() -> None:
    done: list[int] = []
    end = unless_forked(done.append, 3)

    def child() -> bool:
        end()
        return not done

    assert ended(fork(child)) == 0
    end()
    assert done == [3]
