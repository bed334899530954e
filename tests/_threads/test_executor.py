"""Check executors: an exiting process waits for running work, but not for threads that hang."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError

import pytest

from upriver._threads.executor import DaemonExecutor

BEGUN = """
import sys, threading, time
from upriver._threads.executor import DaemonExecutor

threads, begun = DaemonExecutor(1, name="reading"), threading.Event()

def work():
    begun.set()
    time.sleep(0.5)
    print("done", flush=True)

threads.begin(work)
threads.begin(lambda: print("begun too late", flush=True))
begun.wait()
"""


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def printed(script: str) -> str:
    """Return the output of a process that exits by itself, with success."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


SHUT_DOWN = "threads.shutdown(wait=False, cancel_futures=True)"


@pytest.mark.parametrize("shut_down", [SHUT_DOWN, f"{SHUT_DOWN}; del threads", ""])
def test_the_end_waits_for_what_is_under_way_and_begins_nothing_more(shut_down: str) -> None:
    assert printed(BEGUN + shut_down) == "done\n"


def test_the_end_does_not_wait_for_a_thread_that_hangs() -> None:
    hangs = BEGUN.replace("time.sleep(0.5)", "threading.Event().wait()")
    assert printed(hangs) == printed(hangs + SHUT_DOWN) == ""


def test_the_end_waits_when_what_hangs_has_been_broken_off() -> None:
    hangs = BEGUN.replace("time.sleep(0.5)", "broken_off.wait()")
    owned = """
from upriver._threads.closing import close_later

def close():
    broken_off.set()
    threads.shutdown(wait=False, cancel_futures=True)

broken_off = threading.Event()
owner = type("Owner", (), {})()
close_later(owner, close, at_exit=True)
"""
    head, work = hangs.split("def work")
    assert printed(f"{head}{owned}\ndef work{work}") == "done\n"


def test_what_nobody_has_begun_is_left_and_what_is_begun_is_done() -> None:
    threads, begun, goes_on = DaemonExecutor(1, name="reading"), threading.Event(), threading.Event()
    done: list[str] = []

    def work() -> None:
        begun.set()
        goes_on.wait()
        done.append("first")

    threads.begin(work)
    begun.wait()
    threads.begin(lambda: done.append("second"))
    (thread,) = [each for each in threading.enumerate() if each.name == "upriver-reading"]
    threads.shutdown(wait=False, cancel_futures=True)
    threads.begin(lambda: done.append("third"))
    goes_on.set()
    thread.join()
    assert done == ["first"]


def test_work_that_fails_ends_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    threads, done = DaemonExecutor(1, name="failing"), threading.Event()
    threads.begin(lambda: 1 / 0)
    threads.begin(done.set)
    assert done.wait(60)
    threads.shutdown(wait=False, cancel_futures=True)
    assert "a task of failing failed" in caplog.text and "ZeroDivisionError" in caplog.text


def test_tasks_take_turns_in_as_few_threads_as_suffice() -> None:
    threads_used: set[int] = set()
    with DaemonExecutor(3, name="few") as threads:
        for _ in range(5):  # each begins after the one before has ended
            threads.submit(lambda: threads_used.add(threading.get_ident())).result()
            wait_for(lambda: threads._free._value > 0)
    assert len(threads_used) == 1


def test_as_many_threads_as_tasks_run_up_to_the_limit() -> None:
    goes_on, running = threading.Event(), threading.Semaphore(0)

    def work() -> int:
        running.release()
        assert goes_on.wait(60)
        return threading.get_ident()

    with DaemonExecutor(3, name="three") as threads:
        futures = [threads.submit(work) for _ in range(5)]
        assert all(running.acquire(timeout=60) for _ in range(3))
        assert not running.acquire(blocking=False), "the others wait"
        goes_on.set()
        assert len({future.result() for future in futures}) <= 3


def test_a_result_or_an_error_comes_back_and_neither_is_kept() -> None:
    class Result:
        pass

    with DaemonExecutor(1, name="results") as threads:
        assert threads.submit(divmod, 7, 2).result() == (3, 1)
        with pytest.raises(ZeroDivisionError):
            threads.submit(lambda: 1 / 0).result()
        kept = weakref.ref(threads.submit(Result).result())
        wait_for(lambda: gc.collect() is not None and kept() is None)


def test_after_an_error_in_its_block_nothing_more_begins() -> None:
    begun, goes_on = threading.Event(), threading.Event()
    with pytest.raises(KeyError), DaemonExecutor(1, name="broken") as threads:
        threads.submit(lambda: begun.set() or goes_on.wait(60))
        waiting = threads.submit(begun.clear)
        assert begun.wait(60)
        raise KeyError
    goes_on.set()
    for future in (waiting, threads.submit(begun.clear)):
        with pytest.raises(CancelledError):
            future.result(60)
    assert begun.is_set()
