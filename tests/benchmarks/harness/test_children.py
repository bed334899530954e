"""Test how benchmarks start processes, give them orders and read their answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.harness.children import Child, Failed, Lines, ProcessLost, paths

ANSWERING = """
import os
from benchmarks.harness.children import answer_orders, by_name

class Adder:
    def __init__(self, spec):
        if "start" not in spec:
            raise ValueError("no start")
        self.total = spec["start"]

    def add(self, number):
        print("a library's noise")
        self.total += number
        return {"total": self.total}

    def leave(self):
        os._exit(0)

answer_orders(lambda spec: by_name(Adder(spec)))
"""


def begun(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=os.environ | paths(), **pipes)


def ended(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture
def adder() -> Iterator[Child]:
    process = begun(ANSWERING, json.dumps({"start": 1}))
    yield Child(process, "the adder")
    ended(process)


def test_orders_are_answered_one_by_one_and_a_failed_one_does_not_end_the_process(adder: Child) -> None:
    assert adder.answer(60) == {"ready": True}
    assert adder.ask(60, {"do": "add", "number": 2}) == {"total": 3}
    with pytest.raises(Failed, match=r"AttributeError: .* no attribute 'divide'") as error:
        adder.ask(60, {"do": "divide"})
    assert not isinstance(error.value, ProcessLost)
    assert adder.ask(60, {"do": "add", "number": 2}) == {"total": 5}
    with pytest.raises(ProcessLost, match="the adder has ended"):
        adder.ask(60, {"do": "leave"})


def test_a_process_that_cannot_begin_says_why() -> None:
    process = begun(ANSWERING, "{}")
    with pytest.raises(Failed, match="ValueError: no start"):
        Child(process, "the adder").answer(60)
    ended(process)


def test_a_process_that_ends_or_says_nothing_is_told() -> None:
    process = begun("print('one'); print('two')")
    lines = Lines(process)
    assert [lines.next(60), lines.next(60)] == [b"one", b"two"]
    with pytest.raises(ProcessLost, match="has ended"):
        lines.next(60)
    ended(process)
    process = begun("import time; time.sleep(60)")
    with pytest.raises(ProcessLost, match="said nothing for 0 s"):
        Lines(process).next(0)
    ended(process)
