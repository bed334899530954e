"""Test what long work shows: on stderr alone, and nothing where there is none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.terminal import on_terminal
from upriver.progress import counted_steps, named_steps, note, progress_bar


def test_bar_leaves_stdout_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_terminal(monkeypatch) as shown, named_steps() as show:
        stdout = sys.stdout
        show("measuring http://[fe80::1]:7000")
        assert sys.stdout is stdout
    assert "measuring http://[fe80::1]:7000" in shown()


def test_forced_colours_make_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert progress_bar().disable
    with named_steps() as show:
        show("a step")
    assert capsys.readouterr().err == "a step\n"


@pytest.mark.parametrize("close", ["sys.stderr = None", "sys.stderr.close()"])
def test_without_stderr_nothing_is_shown_and_stdout_stays_clean(close: str) -> None:
    code = f"import sys\nfrom upriver.progress import named_steps, note\n{close}\nnote('a step')\n" + (
        "with named_steps() as show:\n    show('a step')\nprint('answer')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "answer\n", "")


def test_counted_work_prints_at_most_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with counted_steps("work") as show:
        for done in range(1, 101):
            show("timing", done, 100)
    note("end")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"timing: {10 * k} %" for k in range(1, 11)] + ["end"]
