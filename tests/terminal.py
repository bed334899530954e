"""A terminal in place of stderr."""

from __future__ import annotations

import os
import pty
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Let stderr be a terminal. Yield a function that returns its text without colours, after the block."""
    ours, theirs = pty.openpty()
    shown = list[bytes]()

    def read() -> None:
        try:
            while piece := os.read(ours, 4096):
                shown.append(piece)
        except OSError:  # the other end is closed
            return

    reader = threading.Thread(target=read, name="terminal")
    reader.start()
    try:
        with open(theirs, "w") as stderr, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stderr)
            yield lambda: re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(shown).decode())
    finally:
        reader.join(60)
        os.close(ours)
