"""Check that a separate thread closes what is no longer used, in each process, and at its end."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import pytest

from tests.finetune.children import ended, fork
from upriver._threads.closing import close_later


class Owner:
    """Own something that is to be closed."""


def test_another_thread_closes_once_the_owner_is_gone() -> None:
    owner, closed, names = Owner(), threading.Event(), set[str]()
    close_later(owner, lambda: (names.add(threading.current_thread().name), closed.set()))
    assert not closed.is_set()
    del owner
    assert closed.wait(60) and names == {"upriver-closing"}


def test_what_cannot_be_closed_is_logged_and_the_next_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    first, second, closed = Owner(), Owner(), threading.Event()
    close_later(first, lambda: 1 / 0)
    close_later(second, closed.set)
    with caplog.at_level(logging.ERROR, "upriver"):
        del first, second
        assert closed.wait(60)
    assert "could not be closed" in caplog.text


def test_a_child_closes_its_own_and_leaves_to_its_parent_what_is_its_parents() -> None:
    theirs, closed = Owner(), threading.Event()
    close_later(theirs, closed.set)
    owners = [theirs]

    def child() -> bool:
        owners.clear()
        mine, done = Owner(), threading.Event()
        close_later(mine, done.set)
        del mine
        return done.wait(60)

    del theirs
    assert ended(fork(child)) == 0
    assert not closed.is_set()
    owners.clear()
    assert closed.wait(60)


AT_EXIT = """
import os
from upriver._threads.closing import close_later

class Owner:
    pass

kept, dropped, silent = Owner(), Owner(), Owner()
close_later(kept, lambda: os.write(1, b"kept\\n"), at_exit=True)
close_later(silent, lambda: os.write(1, b"silent\\n"))
close_later(dropped, lambda: os.write(1, b"dropped\\n"))
del dropped
"""


FORK = """
import warnings
warnings.simplefilter("ignore")
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("more", ["", "import sys; sys.exit(0)", FORK])
def test_the_end_of_the_process_closes_what_asks_for_it_and_all_that_waits(more: str) -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT + more], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr
    assert sorted(done.stdout.split()) == ["dropped", "kept"]
