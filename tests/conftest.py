"""What holds for every test."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests import forked

# Proofs are not remembered from test to test: each makes its own. Processes that tests start inherit this.
os.environ["UPRIVER_CACHE"] = os.devnull

# Tests run side by side, and start processes by the dozen. OpenMP's threads that spin while they wait for the
# next operator take the cores from all of these: tests of whole jobs took a quarter more processor time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Servers have it, and their workers must not.
os.environ["SOME_SECRET"] = "known to the front alone"

# Tests assert results, never seconds: a busy machine is no failure. A tree is asked the same questions every
# time, so that it passes or fails for what it is; ``--hypothesis-profile=search`` asks more, others each run.
# ``make test`` asks fewer, by the profile ``quick``.
settings.register_profile("search", deadline=None, max_examples=1000)
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("upriver", deadline=None, derandomize=True)
settings.load_profile("upriver")

TOGETHER = "tests/cluster/"
"""Some of its files start Ray, one at a time: beside each other they would only wait."""


class Files(LoadFileScheduling):
    """A file at a time to each process, and a folder of them to one."""

    def _split_scope(self, nodeid: str) -> str:
        return TOGETHER if nodeid.startswith(TOGETHER) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Files | None:
    """Where files are tested side by side."""
    return Files(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Look for garbage seldom, and not among modules and 10,000 tests, which took half a second each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 50)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Ask for a ledger, and for servers that start sooner."""
    parser.addoption("--ledger", type=Path, help="write what each test costs into this file")
    parser.addoption("--fork", action="store_true", help="fork servers from a process that imported upriver")


def pytest_configure(config: pytest.Config) -> None:
    """Keep a ledger, where one is asked for: a worker of xdist measures, and the process above it writes."""
    worker, above = hasattr(config, "workerinput"), bool(config.getoption("numprocesses", None))
    if config.getoption("fork") and (worker or not above):
        forked.install()
    if path := config.getoption("ledger"):
        from tests.ledger import Ledger

        config.pluginmanager.register(Ledger(path, runs_tests=worker or not above, reports=not worker))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a file system of its own with room for 1 MiB, whose writes fail with ENOSPC beyond."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("a small disk needs mount(8)")
    if done.returncode:
        pytest.skip(f"a small disk needs a user who may mount: {done.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path, leave: int = 0) -> Path:
    """Take all room of a small disk but some bytes, in whole pages; give the file that takes it."""
    filler = disk / "filler"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    filler.write_bytes(bytes(max(0, free - leave)))
    return filler
