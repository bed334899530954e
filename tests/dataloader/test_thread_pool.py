"""Check the loader's threads: an exiting process waits for running work, but not for threads that hang."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from upriver.dataloader.thread_pool import ThreadPool

BEGUN = """
import sys, threading, time
from upriver.dataloader.thread_pool import ThreadPool

threads, begun = ThreadPool(1, "reading"), threading.Event()

def work():
    begun.set()
    time.sleep(0.5)
    print("done", flush=True)

threads.submit(work)
threads.submit(lambda: print("begun too late", flush=True))
begun.wait()
"""


def printed(script: str) -> str:
    """Return the output of a process that exits by itself, with success."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize("shut_down", ["threads.shutdown()", "threads.shutdown(); del threads", ""])
def test_the_end_waits_for_what_is_under_way_and_begins_nothing_more(shut_down: str) -> None:
    assert printed(BEGUN + shut_down) == "done\n"


def test_the_end_does_not_wait_for_a_thread_that_hangs() -> None:
    hangs = BEGUN.replace("time.sleep(0.5)", "threading.Event().wait()")
    assert printed(hangs) == printed(hangs + "threads.shutdown()") == ""


def test_the_end_waits_when_what_hangs_has_been_broken_off() -> None:
    hangs = BEGUN.replace("time.sleep(0.5)", "broken_off.wait()")
    owned = """
from upriver.dataloader.deferred_close import closed_with

def close():
    broken_off.set()
    threads.shutdown()

broken_off = threading.Event()
owner = type("Owner", (), {})()
closed_with(owner, close, at_exit=True)
"""
    head, work = hangs.split("def work")
    assert printed(f"{head}{owned}\ndef work{work}") == "done\n"


def test_what_nobody_has_begun_is_left_and_what_is_begun_is_done() -> None:
    threads, begun, goes_on = ThreadPool(1, "reading"), threading.Event(), threading.Event()
    done: list[str] = []

    def work() -> None:
        begun.set()
        goes_on.wait()
        done.append("first")

    threads.submit(work)
    begun.wait()
    threads.submit(lambda: done.append("second"))
    (thread,) = [each for each in threading.enumerate() if each.name == "reading_0"]
    threads.shutdown()
    threads.submit(lambda: done.append("third"))
    goes_on.set()
    thread.join()
    assert done == ["first"]


def test_work_that_fails_ends_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    threads, done = ThreadPool(1, "failing"), threading.Event()
    threads.submit(lambda: 1 / 0)
    threads.submit(done.set)
    assert done.wait(60)
    threads.shutdown()
    assert "a thread of the loader failed" in caplog.text
