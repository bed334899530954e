"""Configure every test."""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests import commands, forked, recording
from tests.examples import FEW

# The cache of proofs is off: each test makes its own. Processes that tests start inherit this.
os.environ["UPRIVER_CACHE"] = os.devnull

# Tests run in parallel, and start processes by the dozen. OpenMP threads that spin while they wait for the
# next operator take the cores from all of these: tests of whole jobs took a quarter more processor time.
# OpenMP reads this when torch is imported.
assert "torch" not in sys.modules
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Servers have this variable, and their workers must not.
os.environ["SOME_SECRET"] = "known to the front alone"

# Tests assert results, never seconds: a busy machine is no failure. Each run of a tree uses the same
# examples, so that the result depends on the tree alone; ``--hypothesis-profile=search`` tries more, others
# each run. ``make test`` tries fewer, by the profile ``quick``. `scripts/mutate.py` asks only whether a
# property fails, so ``unshrunk`` looks for no smaller example.
settings.register_profile("search", deadline=None, max_examples=1000)
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=FEW)
settings.register_profile("unshrunk", settings.get_profile("quick"), phases=(Phase.explicit, Phase.generate))
settings.register_profile("upriver", deadline=None, derandomize=True)
settings.load_profile("upriver")

TOGETHER = ("tests/cluster/", "tests/benchmarks/cold_start/")
"""Folders whose files run one at a time: some start Ray, and in parallel they would only wait. Others tell
the version of a benchmark's code, which takes 4 s once in each process."""


class Files(LoadFileScheduling):
    """Schedule a file at a time to each process, and the files of some folders to the same process."""

    def _split_scope(self, nodeid: str) -> str:
        together = next((folder for folder in TOGETHER if nodeid.startswith(folder)), None)
        return super()._split_scope(nodeid) if together is None else together


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Files | None:
    """Use the scheduler where files are tested in parallel."""
    return Files(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import this worker's share of the test files first.

    All workers of xdist import all files. Rewriting the assertions of a file takes most of its import, and
    happens once where Python may write bytecode. So each worker begins with other files.
    """
    worker: dict[str, Any] | None = getattr(session.config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode:
        return
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    first = int(worker["workerid"].removeprefix("gw"))
    for file in files[first :: worker["workercount"]]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection reports it
            importlib.import_module(".".join(file.relative_to(session.config.rootpath).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Collect garbage seldom, and not among modules and 10,000 tests, which took half a second each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 50)


def pytest_runtest_teardown() -> None:
    """Remove the log handler of a command that ran in this process: its stream ends with the test."""
    configured: Any = sys.modules.get("upriver.server.observability.logging")
    if configured is not None and configured._handler is not None:
        logging.getLogger().removeHandler(configured._handler)
        configured._handler = None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for a ledger and for forked servers."""
    parser.addoption("--ledger", type=Path, help="write what each test costs into this file")
    parser.addoption("--fork", action="store_true", help="fork servers from a process that imported upriver")


def pytest_configure(config: pytest.Config) -> None:
    """Keep a ledger, where one is asked for: a worker of xdist measures, and the process above it writes."""
    worker, above = hasattr(config, "workerinput"), bool(config.getoption("numprocesses", None))
    if config.getoption("fork") and (worker or not above):
        forked.install()
        recording.install()
        commands.install()
    if path := config.getoption("ledger"):
        from tests.ledger import Ledger

        config.pluginmanager.register(Ledger(path, runs_tests=worker or not above, reports=not worker))


@pytest.fixture(scope="module", autouse=True)
def process_as_found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Leave the process to the next file as this one found it: which files share a process differs by run.

    Commands that run in the tests' process set what a process of their own would keep to itself.
    """
    import torch  # not above: see OMP_WAIT_POLICY

    variables, path, log = dict(os.environ), list(sys.path), logging.getLogger("upriver")
    modules, level, threads = set(sys.modules), log.level, torch.get_num_threads()
    yield
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    sys.path[:] = path
    log.setLevel(level)
    torch.set_num_threads(threads)
    # Packages that a test wrote: another test's may have the same name.
    written, new = str(tmp_path_factory.getbasetemp()), sys.modules.keys() - modules
    packages = {name.partition(".")[0] for name in new if place_of(sys.modules[name]).startswith(written)}
    for name in new:
        if name.partition(".")[0] in packages:
            del sys.modules[name]


@pytest.fixture(autouse=True)
def prepared_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare jobs before their first batch unless a test asks for more: the time of a trace would decide."""
    session: Any = sys.modules.get("upriver.finetune.session")
    if session is not None:
        monkeypatch.setattr(session, "WORTH_A_PROCESS_S", float("inf"))


def place_of(module: Any) -> str:
    """Return the path of a module, or the folder of a namespace package, which has no file."""
    names = getattr(module, "__dict__", {})  # an object in a module's place may answer to any attribute
    return str(names.get("__file__") or next(iter(names.get("__path__") or ()), ""))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system with room for 1 MiB, whose writes fail with ENOSPC beyond."""
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
    """Fill a small disk except for some bytes, in whole pages; return the file that fills it."""
    filler = disk / "filler"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    filler.write_bytes(bytes(max(0, free - leave)))
    return filler


@pytest.fixture(scope="session", autouse=True)
def delivered_keep() -> Iterator[object]:
    """Let jobs keep nothing unless a test says otherwise, and return what they keep by default.

    Most tests count what each epoch computes.
    """
    from upriver.finetune.session import Near

    defaults = inspect.unwrap(Near.finetune).__kwdefaults__ or {}
    with pytest.MonkeyPatch.context() as patched:
        delivered = defaults["keep"]
        patched.setitem(defaults, "keep", None)
        yield delivered
