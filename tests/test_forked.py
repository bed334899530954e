"""Check that forked servers end, print and fail as executed ones do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import forked

SERVE = [sys.executable, "-m", "upriver", "serve"]


@pytest.fixture(autouse=True)
def forks() -> None:
    if forked.Popen.at_start is None:
        pytest.skip("servers are not forked without --fork")


def test_a_forked_command_prints_where_it_is_told_and_has_its_exit_code(tmp_path: Path) -> None:
    wrong = subprocess.run([*SERVE, "--no-such-option"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "") and "--no-such-option" in wrong.stderr
    (tmp_path / "here.toml").write_text("nonsense = 1\n")
    found = subprocess.run([*SERVE, "--config", "here.toml"], stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert found.returncode == 2 and "nonsense" in found.stderr


def test_a_forked_server_is_a_child_that_can_be_killed(tmp_path: Path) -> None:
    with subprocess.Popen([*SERVE, "--store", tmp_path.as_uri(), "--port", "0"], text=True) as process:
        found = psutil.Process(process.pid)
        assert found.ppid() == os.getpid() and "tests.forked" in found.cmdline()
        process.kill()
        assert process.wait(60) == -signal.SIGKILL


def test_only_servers_in_the_environment_of_the_start_are_forked() -> None:
    assert forked.Popen.at_start is not None
    env = {**forked.Popen.at_start, "UPRIVER_TOKEN": "sesame"}
    assert forked._forkable(SERVE, env)
    assert not forked._forkable(SERVE, {**env, "OMP_NUM_THREADS": "7"})
    assert not forked._forkable([sys.executable, "-m", "upriver", "train"], env)
    assert not forked._forkable(["python", "-m", "upriver", "serve"], env)
