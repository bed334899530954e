"""Test replicas on a real Ray, started here: real jobs, a killed server, an orderly end, and growth."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import torch

import upriver
from tests.finetune.training import MICRO, optimizer_of, photos, run, same, train
from tests.program.nets import frozen_small
from tests.server.running import free_port
from upriver.errors import NotAuthorized, UpriverError
from upriver.pipeline import Dataset
from upriver.protocol import DatasetRef, RunRequest
from upriver.rpc.client import ServerClient
from upriver.rpc.discovery import DirectoryClient

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    # `find_spec`, not an import: importing Ray changes the process.
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'upriver[ray]'"
    ),
]

EPOCHS = 4
TOKEN = "sesame-of-ours"
STEPS = 17
"""Steps of an epoch: 200 samples in batches of 12."""

QUEUE_SCRIPT = """
import json, sys
from upriver.cli.serve.ray import run

document, least, most = json.loads(sys.argv[1])
run(document, address="local", replicas=(least, most), queue_bytes=1)
"""


def until(condition: Callable[[], Any], seconds: float = 180) -> Any:
    """Wait until the condition is true; return its value."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not so within {seconds} s"
        time.sleep(0.1)
    return found


@dataclass
class Cluster:
    """Process that serves with replicas, and all processes that it has started."""

    process: subprocess.Popen[str]
    url: str
    family: set[psutil.Process] = field(default_factory=set)

    def servers(self) -> list[str]:
        """Return the servers that the directory names; none where it does not answer."""
        with contextlib.suppress(UpriverError):
            return [server.url for server in DirectoryClient(self.url).listing().servers]
        return []

    def look(self) -> None:
        """Record the processes started so far."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.family |= set(psutil.Process(self.process.pid).children(recursive=True))

    def pid_of(self, url: str) -> int:
        """Return the process that listens at a server's address."""
        self.look()
        port = urlsplit(url).port
        for process in self.family:
            with contextlib.suppress(psutil.Error):
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                        return process.pid
        raise AssertionError(f"nobody listens at {url}")

    def end(self) -> int:
        """Send SIGTERM; return the exit code."""
        self.look()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=120)

    def left(self) -> list[str]:
        """Return the started processes that still live."""
        names = []
        for process in self.family:
            with contextlib.suppress(psutil.Error):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    names.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
        return names


@contextlib.contextmanager
def clustered(command: list[str], *, token: str | None = None) -> Iterator[Cluster]:
    """Start a cluster, wait for its line, and remove all of it."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "UPRIVER_TOKEN" and not name.startswith("RAY_")
    }
    if token is not None:
        environment["UPRIVER_TOKEN"] = token
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        cluster = Cluster(process, "")
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            assert said["pid"] == process.pid
            cluster.url = said["listening"]
            yield cluster
        finally:
            cluster.look()
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=120)
            process.kill()
            for started in cluster.family:
                with contextlib.suppress(psutil.Error):
                    started.kill()


def serve_command(store: str, *options: str) -> list[str]:
    command = [sys.executable, "-m", "upriver", "serve", "--engine", "ray", "--address", "local"]
    return [*command, "--port", str(free_port()), "--threads", "1", "--store", store, *options]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return photos(tmp_path_factory.mktemp("store"), 200)


@pytest.fixture(scope="module")
def two(data: Dataset) -> Iterator[Cluster]:
    """Share two replicas behind one token; the last of their tests ends them."""
    with clustered(serve_command(data.store.uri, "--replicas", "2"), token=TOKEN) as cluster:
        until(lambda: len(cluster.servers()) == 2)
        yield cluster


def request_of(data: Dataset, *micro_batches: tuple[int, ...]) -> RunRequest:
    return RunRequest(
        micro_batches=micro_batches,
        start=data.chain.start,
        stop=0,
        micro_batch=MICRO,
        dataset=DatasetRef(store=data.store.name, digest=data.digest),
        seed=7,
        epoch=0,
    )


# ------------------------------------------------------------------------------------------ which cluster


@pytest.mark.full
@pytest.mark.parametrize("address", ["auto", "127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_no_cluster_where_one_should_be(tmp_path: Path, address: str) -> None:
    """Run this before all others: ``auto`` finds any cluster that runs on this machine."""
    address = address.format(free_port())
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [*serve_command(tmp_path.as_uri()), "--address", address, "--host", "127.0.0.1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env={**environment, "RAY_TMPDIR": str(tmp_path)},  # where it would look for a cluster
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: no Ray cluster at '{address}'" in done.stderr


# ------------------------------------------------------------------------------------------------ work


@pytest.mark.full
def test_both_replicas_serve_a_real_job_bit_for_bit(two: Cluster, data: Dataset) -> None:
    assert two.url.startswith("ray+http://127.0.0.1:")
    plain = run(upriver.connect(), data, policy="nosplit")
    with upriver.connect(two.url, token=TOKEN) as near:
        losses, model, job = run(near, data, cut=4)
    assert same((losses, model), plain[:2])
    assert set(job.report.samples) == set(two.servers())
    assert sum(job.report.samples.values()) == 2 * len(data)


@pytest.mark.full
def test_a_replica_whose_server_is_killed_is_replaced_and_the_job_goes_on(
    two: Cluster, data: Dataset
) -> None:
    plain = run(upriver.connect(), data, policy="nosplit", epochs=EPOCHS)
    before = two.servers()
    victim, other = before
    new: list[str] = []

    with upriver.connect(two.url, token=TOKEN) as near:
        model = frozen_small()
        with near.finetune(model, data, batch_size=12, micro_batch=MICRO, seed=7, cut=4) as job:

            def after_step(step: int) -> None:
                if step == STEPS // 2:
                    os.kill(two.pid_of(victim), signal.SIGKILL)
                    until(lambda: victim not in two.servers())
                if step == 2 * STEPS:
                    new.extend(until(lambda: [url for url in two.servers() if url not in before]))
                    until(lambda: new[0] in [status.url for status in job.servers if status.health == "up"])

            losses = train(job, model, optimizer_of(model), epochs=EPOCHS, after_step=after_step)
            samples = job.report.samples
    assert same((losses, model), plain[:2])
    assert sum(samples.values()) == EPOCHS * len(data)
    assert {other, new[0]} <= set(samples), "the one that stayed and the one that came"
    assert sorted(two.servers()) == sorted([other, new[0]])


@pytest.mark.full
def test_a_token_opens_every_replica_and_is_not_to_be_seen(two: Cluster) -> None:
    for url in two.servers():
        with ServerClient(url) as stranger, pytest.raises(NotAuthorized):
            stranger.info()
        with ServerClient(url, token=TOKEN) as client:
            assert client.info().stores == ("default",)
        server = psutil.Process(two.pid_of(url))
        assert TOKEN not in Path(f"/proc/{server.pid}/environ").read_text()
    for process in two.family:
        with contextlib.suppress(psutil.Error, OSError):
            assert TOKEN not in " ".join(process.cmdline())


# ------------------------------------------------------------------------------------------------- end


@pytest.mark.full
def test_it_drains_and_nothing_is_left(two: Cluster, data: Dataset) -> None:
    data.publish()
    ids = tuple((number,) for number in range(len(data)))
    urls = two.servers()
    with ServerClient(urls[0], token=TOKEN) as client:
        answer = client.run(request_of(data, *ids))
        got = [next(answer)[0].ids]
        ended: list[int] = []
        ending = threading.Thread(target=lambda: ended.append(two.end()))
        ending.start()
        try:
            until(lambda: urls[0] not in two.servers())
            got += [batch.ids for batch, _ in answer]
        finally:
            ending.join()
    assert got == list(ids), "what was under way came to its end"
    assert ended == [0]
    until(lambda: two.left() == [], 30)
    for address in (*urls, two.url.removeprefix("ray+")):
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", urlsplit(address).port or 0)) != 0


@pytest.mark.full
def test_a_replica_that_cannot_start_is_an_error_that_says_why(tmp_path: Path) -> None:
    done = subprocess.run(
        serve_command((tmp_path / "nowhere").as_uri()),
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
    )
    assert (done.returncode, done.stdout) == (2, "")
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: no replica can serve: ") and "nowhere" in error


# ----------------------------------------------------------------------------------------------- growth


@pytest.mark.full
def test_a_queue_brings_a_second_replica(data: Dataset) -> None:
    data.publish()
    document = {
        "stores": {"default": data.store.uri},
        "port": free_port(),
        "threads": 1,
        "max_admitted": 1,
    }
    stop = threading.Event()
    ids = tuple(tuple(range(start, start + MICRO)) for start in range(0, 160, MICRO))

    def press(url: str) -> None:
        with ServerClient(url) as client:
            while not stop.is_set():
                with contextlib.suppress(UpriverError):  # refused, because so many requests wait already
                    for _ in client.run(request_of(data, *ids)):
                        pass

    with clustered([sys.executable, "-c", QUEUE_SCRIPT, json.dumps([document, 1, 2])]) as cluster:
        [url] = cluster.servers()
        crowd = [threading.Thread(target=press, args=(url,)) for _ in range(3)]
        for one in crowd:
            one.start()
        try:
            until(lambda: len(cluster.servers()) == 2)
        finally:
            stop.set()
            for one in crowd:
                one.join()
