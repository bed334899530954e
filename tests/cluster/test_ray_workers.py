"""Test workers as actors of a real Ray: the same batches, whichever process dies, and no leftovers."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import upriver
from upriver.cluster.ray_workers import MOST, RayWorkers, document
from upriver.cluster.replica_config import token_hash
from upriver.errors import ConfigError, NotAuthorized
from upriver.rpc.client import ServerClient
from upriver.rpc.worker_fleet import Provider

CPUS = 3
"""CPUs of the cluster, as Ray counts them."""

with_ray = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    # `find_spec`, not an import: importing Ray changes the process.
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'upriver[ray]'"
    ),
]

CLUSTER = """
import json, sys
from upriver.cluster.deploy import before_import, start
before_import(local=False)
import ray
start(ray, num_cpus=int(sys.argv[1]), loopback=True, folder=sys.argv[2])
print(json.dumps({"address": ray.get_runtime_context().gcs_address}), flush=True)
sys.stdin.read()
ray.shutdown()
"""

DRIVER = """
import json, sys
import upriver
from tests.dataloader.toy_datasets import same
from upriver.dataloader import Offloading

COUNT = 60
address, steps = sys.argv[1:3]
data = upriver.dataset("tests.dataloader.toy_datasets:Slow", count=COUNT)
plain = upriver.DataLoader(data, batch_size=4, seed=3)
expected = [list(plain) for _ in range(3)]

def loader_of(workers, **arguments):
    return upriver.DataLoader(data, batch_size=4, seed=3, workers=workers, **arguments)

def tell(**found):
    print(json.dumps(found), flush=True)
    if not sys.stdin.readline():
        sys.exit()

def told(loader, **more):
    return {"made": loader.report.made, "why_not": loader.report.why_not, "why": loader.why, **more}

exec(steps)
"""


def until(condition: Callable[[], Any], seconds: float = 120) -> Any:
    """Wait until the condition is true; return its value."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not so within {seconds} s"
        time.sleep(0.1)
    return found


def environment(**more: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "UPRIVER_T"))}
    return {**ours, **more}


OF_CLUSTER = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""Variables for access to the cluster."""


class Started:
    """Python process that prints JSON lines, one for each line that it receives."""

    def __init__(self, script: str, *arguments: str, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(**variables),
        )

    def hear(self) -> dict[str, Any]:
        """Return the next JSON line; skip Ray's own lines."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise AssertionError(f"it ended with {self.process.wait()}")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> int:
        """Let the process end, and wait."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            return self.process.wait(timeout=120)
        finally:
            self.process.kill()
            if self.process.stdout is not None:
                self.process.stdout.close()

    def family(self) -> list[psutil.Process]:
        """Return all living descendants."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [one for one in psutil.Process(self.process.pid).children(recursive=True) if lives(one)]
        return []


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def servers(started: Started) -> list[psutil.Process]:
    """Return the fronts of all workers on a cluster that a process has started."""
    found = []
    for process in started.family():
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            parent = process.parent()
            if line[1:4] == ["-m", "upriver", "worker"] and parent and parent.cmdline() != line:
                found.append(process)
    return found


def with_children(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found += process.children(recursive=True)
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Started, str]]:
    folder = Path("/tmp") / f"upriver-test-{os.getpid()}"  # short: it holds sockets
    folder.mkdir()
    started = Started(CLUSTER, str(CPUS), str(folder), **OF_CLUSTER)
    try:
        yield started, started.hear()["address"]
    finally:
        family = started.family()
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.end()
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def driver(address: str, steps: str) -> Iterator[Started]:
    started = Started(DRIVER, address, steps, **({} if address == "local" else OF_CLUSTER))
    try:
        yield started
    finally:
        started.process.kill()
        started.end()


@pytest.mark.full
class TestOnACluster:
    pytestmark = with_ray

    def test_the_same_batches_and_nobody_is_left(self, cluster: tuple[Started, str]) -> None:
        """The workers serve the holder of the loader's token, and no other client."""
        started, address = cluster
        steps = """
loader = loader_of(upriver.ray_workers(2, address=address), offload="always")
found = [list(loader) for _ in range(2)]
tell(**told(loader, same=same(found, expected[:2])))
import ray
tell(cpus=ray.available_resources().get("CPU", 0))
del loader
tell()
"""
        with driver(address, steps) as training:
            found = training.hear()
            assert found["same"] and not found["why_not"]
            assert len(found["made"]) == 2 and sum(found["made"].values()) == 120
            fronts = servers(started)
            assert len(fronts) == 2
            everyone = with_children(fronts)
            for url in found["made"]:
                with ServerClient(url) as stranger, pytest.raises(NotAuthorized):
                    stranger.info()
            training.go_on()
            assert training.hear()["cpus"] == CPUS - 2
            training.go_on()
            training.hear()
            until(lambda: not any(map(lives, everyone)))
            assert lives(psutil.Process(training.process.pid)), "with the loader, not with its process"
            assert training.end() == 0

    def test_an_actor_that_is_killed_loses_nothing_and_is_replaced(
        self, cluster: tuple[Started, str]
    ) -> None:
        started, address = cluster
        steps = """
import time
import ray
ray.init(address, logging_level="WARNING", log_to_driver=False)
loader = loader_of(upriver.ray_workers(2), offload=Offloading(candidate="p1"), num_workers=1)
found = []
for number, batch in enumerate(loader):
    found.append(batch)
    if number == 2:
        tell()
assert same([found], expected[:1])
loader.epoch = 1
for _ in range(200):
    loader.epoch = 1
    assert same([list(loader)], expected[1:2])
    if len(loader.report.made.keys() - {"here"}) == 3:
        break
    time.sleep(0.5)
tell(**told(loader))
"""
        with driver(address, steps) as training:
            training.hear()
            before = servers(started)
            victim = before[0].parent()
            assert victim is not None and "RayWorker" in " ".join(victim.cmdline())
            everyone = with_children(before[:1])
            victim.send_signal(signal.SIGKILL)
            until(lambda: not any(map(lives, everyone)))
            training.go_on()
            found = training.hear()
            assert len(found["made"].keys() - {"here"}) == 3
            assert list(found["why_not"].values()) == ["it has ended"]
            now = with_children(servers(started))
            assert len(servers(started)) == 2
            assert training.end() == 0
        until(lambda: not any(map(lives, now)))

    def test_nobody_outlives_a_training_process_that_is_killed(self, cluster: tuple[Started, str]) -> None:
        started, address = cluster
        steps = """
loader = loader_of(upriver.ray_workers(1, cpus=2, address=address), offload="always")
iterator = iter(loader)
next(iterator)
tell()
"""
        with driver(address, steps) as training:
            training.hear()
            [front] = servers(started)
            everyone = with_children([front])
            assert sum("worker_entry.py" in " ".join(one.cmdline()) for one in everyone) == 2, (
                "one for each CPU"
            )
            training.process.send_signal(signal.SIGKILL)
            training.process.wait()
        until(lambda: not any(map(lives, everyone)))
        until(lambda: not servers(started))

    def test_as_many_as_are_needed(self, cluster: tuple[Started, str]) -> None:
        """The bound is the free part: of three CPUs, where four workers would be used."""
        started, address = cluster
        steps = """
def knowing(stalls):
    loader = upriver.DataLoader(
        upriver.dataset("tests.dataloader.toy_datasets:Noisy", count=300), batch_size=2, seed=3,
        num_workers=0, collate_fn=lambda rows: rows, workers=upriver.ray_workers("auto", most=4,
        address=address),
    )
    found = loader._measured
    found.gthp, found.lthp, found.pcycle = 100.0 if stalls else 1.0, 1.0, 1.0
    return loader

plain = upriver.DataLoader(
    upriver.dataset("tests.dataloader.toy_datasets:Noisy", count=300), batch_size=2, seed=3,
    collate_fn=lambda rows: rows,
)
loader = knowing(False)
assert same(list(loader), list(plain))
tell(**told(loader))
loader = knowing(True)
plain.epoch = 0
for epoch in range(10_000):
    assert same(list(loader), list(plain))
    if loader._hired.count == 3:
        break
tell(**told(loader))
"""
        with driver(address, steps) as training:
            found = training.hear()
            assert found["made"] == {"here": 300} and "no worker is needed" in found["why"]
            until(lambda: not servers(started))
            training.go_on()
            found = training.hear()
            assert "3 of at most 3 workers" in found["why"]
            assert len(servers(started)) == 3 and found["made"].keys() - {"here"}
            assert training.end() == 0
        until(lambda: not servers(started))

    def test_more_than_the_cluster_has(self, cluster: tuple[Started, str]) -> None:
        _, address = cluster
        steps = """
for workers in (upriver.ray_workers(1, cpus=4, address=address, start_timeout_s=3),):
    try:
        iter(loader_of(workers))
    except upriver.UpriverError as error:
        tell(kind=type(error).__name__, said=str(error))
try:
    loader_of(upriver.ray_workers(1, address="10.0.0.1:6379"))
except upriver.UpriverError as error:
    tell(kind=type(error).__name__, said=str(error))
"""
        with driver(address, steps) as training:
            found = training.hear()
            assert found["kind"] == "ServerUnavailable"
            assert "each takes 4 CPUs" in found["said"] and "of the cluster's 3 are free" in found["said"]
            training.go_on()
            found = training.hear()
            assert found["kind"] == "ConfigError" and "connected to a Ray cluster already" in found["said"]
            assert training.end() == 0


class TestOfOurOwn:
    pytestmark = with_ray

    @pytest.mark.full
    def test_a_cluster_that_ends_with_the_process(self) -> None:
        steps = """
loader = loader_of(upriver.ray_workers(1, address=address), offload="always")
found = [list(loader)]
import ray
folder = ray._private.worker._global_node.get_temp_dir_path()
tell(**told(loader, same=same(found, expected[:1]), folder=folder))
"""
        with driver("local", steps) as training:
            found = training.hear()
            assert found["same"] and len(found["made"]) == 1 and "here" not in found["made"]
            family = training.family()
            assert len(servers(training)) == 1 and Path(found["folder"]).exists()
            assert training.end() == 0
        until(lambda: not any(map(lives, family)))
        assert not Path(found["folder"]).exists()


# -------------------------------------------------------------------------------------------- without Ray


def test_without_a_cluster_the_error_says_how_to_have_one() -> None:
    data = upriver.dataset("tests.dataloader.toy_datasets:Plain", count=3)
    with pytest.raises(ConfigError, match=r"ray\.init.*address='local'"):
        upriver.DataLoader(data, workers=upriver.ray_workers(2))


def test_what_is_said_is_what_is_asked_for() -> None:
    assert upriver.ray_workers(3, cpus=4) == RayWorkers(number=3, most=3, cpus=4)
    assert upriver.ray_workers("auto") == RayWorkers(number=None, most=MOST)
    found = upriver.ray_workers("auto", most=2, address="h:1", start_timeout_s=9)
    assert found == RayWorkers(number=None, most=2, address="h:1", start_timeout_s=9)
    assert isinstance(found, Provider)


def test_what_ray_carries_holds_no_token() -> None:
    found = document(["a.b"], "sesame", 3)
    assert "sesame" not in json.dumps(found) and token_hash("sesame") in json.dumps(found)
    assert (found["allow"], found["workers"], found["threads"], found["max_admitted"]) == (["a.b"], 3, 1, 8)
    assert document(["a.b"], "sesame", 16)["max_admitted"] == 32


@pytest.mark.parametrize(
    ("number", "arguments", "says"),
    [
        (0, {}, "1..1024, or 'auto', got 0"),
        (True, {}, "got True"),
        ("some", {}, "'auto', got 'some'"),
        (2.0, {}, "got 2.0"),
        (2, {"most": 3}, "most bounds"),
        ("auto", {"most": 0}, "most must be"),
        (2, {"cpus": 0}, "cpus must be"),
        (2, {"cpus": 0.5}, "cpus must be"),
        (2, {"address": ""}, "address must be"),
        (2, {"address": 6379}, "ray://HOST:PORT"),
        (2, {"start_timeout_s": 0}, "start_timeout_s"),
        (2, {"start_timeout_s": float("nan")}, "start_timeout_s"),
        (2, {"start_timeout_s": "1"}, "start_timeout_s"),
    ],
)
def test_what_cannot_be_is_refused_by_name(number: Any, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        upriver.ray_workers(number, **arguments)
