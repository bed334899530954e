from __future__ import annotations

import threading

import pytest

from upriver._threads.background import BackgroundThread
from upriver.errors import UpriverError


def test_a_thread_runs_its_work_by_name_and_never_outlives_the_process() -> None:
    seen: list[object] = []
    thread = BackgroundThread(
        lambda *args: seen.extend([threading.current_thread().name, *args]), 1, "b", name="working"
    )
    thread.join()  # not started: nothing to wait for
    thread.start()
    thread.join()
    assert seen == ["upriver-working", 1, "b"] and thread.daemon and not thread.is_alive()


def test_a_thread_may_wait_for_itself() -> None:
    done = threading.Event()
    thread = BackgroundThread(lambda: (thread.join(), done.set()), name="itself")
    thread.start()
    assert done.wait(60)


def test_a_wait_ends_after_its_time() -> None:
    goes_on = threading.Event()
    thread = BackgroundThread(goes_on.wait, name="hanging")
    thread.start()
    thread.join(0.01)
    assert thread.is_alive()
    goes_on.set()
    thread.join()


def test_an_error_is_logged_by_name(caplog: pytest.LogCaptureFixture) -> None:
    thread = BackgroundThread(lambda: 1 / 0, name="failing")
    thread.start()
    thread.join()
    assert "the thread upriver-failing failed" in caplog.text and "ZeroDivisionError" in caplog.text


def test_a_thread_that_cannot_start_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    thread = BackgroundThread(print, name="never")
    with pytest.raises(UpriverError, match=r"no thread can be started: .*can't start new thread"):
        thread.start()
    thread.join()
