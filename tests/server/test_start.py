"""Test workers that cannot start: a server that never had one ends; another waits and says why."""

import errno
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from tests.server.conftest import make_program
from tests.server.http.test_limits import same
from tests.server.running import SERVE, Running, ask, body_of, has_loaded, in_thread, run, running, wait_for
from upriver.errors import ConfigError
from upriver.program.graph.artifact_store import publish
from upriver.protocol import RunRequest, program_head
from upriver.server import Server, ServerConfig, serve
from upriver.store import Store

CLI = """
import sys
from upriver.cli import main

sys.executable = sys.argv.pop(1)  # what workers are started with
sys.exit(main())
"""


LATE_PYTORCH = """
import os, sys, time
from pathlib import Path
from upriver.cli import main

class Gate:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            Path(begun).touch()
            while not os.path.exists(gate):
                time.sleep(0.02)

begun, gate = sys.argv.pop(1), sys.argv.pop(1)
sys.meta_path.insert(0, Gate())  # of the front alone
sys.exit(main())
"""


class Python:
    """Start Python for the workers, unless it is broken."""

    def __init__(self, folder):
        self.path = folder / "python"
        self._broken = folder / "broken"
        self._starts = folder / "starts"
        self.greet("")
        self.path.chmod(0o755)

    def greet(self, line):
        """Print a line at each start."""
        self.path.write_text(
            f"#!/bin/sh\necho >>{self._starts}\necho '{line}'\n"
            f"if [ -e {self._broken} ]; then echo 'libxyz is broken' >&2; exit 3; fi\n"
            f'exec {sys.executable} "$@"\n'
        )

    @property
    def starts(self):
        return self._starts.stat().st_size if self._starts.exists() else 0

    def wait(self):
        """Hang at each start."""
        self.path.write_text(f"#!/bin/sh\necho >>{self._starts}\nexec sleep 600\n")

    def damage(self):
        self._broken.touch()

    def repair(self):
        self._broken.unlink()


@pytest.fixture
def python(tmp_path):
    (tmp_path / "bin").mkdir()
    return Python(tmp_path / "bin")


@pytest.mark.parametrize("device", ["cuda:99", "meta", "no device"])
def test_a_device_that_is_not_there_is_an_error_before_anything_is_bound(device):
    with pytest.raises(ConfigError, match=rf"device '{device}' .* cpu"):
        Server(ServerConfig(stores={"default": "memory://start"}, port=0, device=device))


@pytest.mark.slow
def test_a_server_whose_workers_never_start_gives_up(world, python):
    python.damage()
    done = subprocess.run(
        [sys.executable, "-c", CLI, python.path, "serve", "--store", world.store.uri, "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == (
        "error: no worker can start here, 3 were tried: it ended with exit code 3: libxyz is broken\n"
    )
    assert (done.returncode, done.stdout, python.starts) == (2, "", 3)


@pytest.mark.full
@pytest.mark.slow
def test_a_server_of_many_workers_ends_while_they_are_starting(world, python):
    python.wait()
    config = {"stores": {"default": world.store.uri}, "port": 0, "workers": 16, "sandbox": "none"}
    command = [sys.executable, "-c", SERVE, json.dumps({**config, "python": str(python.path)})]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            wait_for(lambda: python.starts == 16)
            started = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
            wait_for(lambda: not any(child.is_running() for child in started))
            assert process.stdout.read() == b""
            assert python.starts == 16
        finally:
            process.kill()


@pytest.mark.full
@pytest.mark.slow
def test_a_python_that_is_not_there_is_named(world, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CLI, tmp_path / "none", "serve", "--store", world.store.uri, "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.startswith("error: no worker can start here, 3 were tried: ")
    assert str(tmp_path / "none") in done.stderr
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.slow
def test_a_server_is_ready_when_a_worker_is_and_not_before(world, tmp_path, monkeypatch):
    gate, slow = tmp_path / "gate", tmp_path / "python"
    slow.write_text(f'#!/bin/sh\nwhile [ ! -e {gate} ]; do sleep 0.05; done\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    with in_thread(world.store.uri, threads=1, sandbox="none") as server:
        try:
            assert ask(server, "GET", "/livez")[0] == 200
            for method, path in (("GET", "/readyz"), ("GET", "/v1/info"), ("POST", "/v1/run")):
                status, headers, body = ask(server, method, path)
                assert (status, json.loads(body)["error"]["message"]) == (503, "workers are starting")
                assert int(headers["retry-after"]) >= 1
        finally:
            gate.touch()
        server.wait_ready()
        assert len(run(server, world.request((0, 1)))) == 1


@pytest.mark.full
def test_workers_that_stop_starting_are_tried_again_and_the_reason_is_told(world, python):
    def why():
        status, _, body = ask(server, "GET", "/readyz")
        return "" if status == 200 else json.loads(body)["error"]["message"]

    with running(world.store.uri, python=str(python.path)) as server:
        (worker,) = server.workers()
        python.damage()
        os.kill(worker, signal.SIGKILL)
        assert wait_for(lambda: "libxyz" in why() and why()) == (
            "the last worker did not start: it ended with exit code 3: libxyz is broken"
        )
        wait_for(lambda: python.starts > 3)  # a server that never had a worker tries fewer times
        assert ask(server, "GET", "/livez")[0] == 200
        python.repair()
        server.wait_ready()
        assert len(run(server, world.request((0, 1)))) == 1


def refuse_pidfds(monkeypatch, numbers):
    """Fail to open the pidfds with these numbers, counted from 0; return the processes in order."""
    pids, pidfd_open = [], os.pidfd_open

    def refusing(pid, flags=0):
        pids.append(pid)
        if len(pids) - 1 in numbers:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return pidfd_open(pid, flags)

    monkeypatch.setattr(os, "pidfd_open", refusing)
    return pids


@pytest.mark.slow
@pytest.mark.full
def test_a_server_that_cannot_watch_its_workers_gives_up_and_leaves_none(world, monkeypatch):
    def listening(found):
        raise AssertionError(f"it says it works: {found}")

    pids = refuse_pidfds(monkeypatch, range(10))
    config = ServerConfig(stores={"default": world.store.uri}, port=0, threads=1)
    with ThreadPoolExecutor(1) as threads:  # the thread stays: workers would end with it
        serving = threads.submit(serve, config, on_listening=listening)
        with pytest.raises(ConfigError, match=r"no worker can start here, 3 were tried: .* open files$"):
            serving.result()
        assert [psutil.pid_exists(pid) for pid in pids] == [False, False, False]


@pytest.mark.full
def test_a_later_worker_that_cannot_be_watched_is_replaced(world, monkeypatch):
    def num_workers():
        return len(json.loads(ask(server, "GET", "/v1/load")[2])["workers"])

    pids = refuse_pidfds(monkeypatch, [2])
    with in_thread(world.store.uri, workers=2, threads=1) as server:
        server.wait_ready()
        wait_for(lambda: num_workers() == 2)
        os.kill(pids[0], signal.SIGKILL)
        wait_for(lambda: len(pids) == 4 and num_workers() == 2)
        assert not psutil.pid_exists(pids[2])
        for batch in run(server, world.request((0, 1), (2, 3))):
            same(batch, world.here(batch.ids, 0))


@pytest.mark.slow
@pytest.mark.full
def test_a_front_loads_pytorch_for_tensors_alone_and_a_worker_no_http(world):
    """Check the front's libraries before and after a request that sends tensors, and both requests' bits."""
    program = make_program(11)
    command = [sys.executable, "-c", CLI, sys.executable, "serve", "--store", world.store.uri, "--port", "0"]
    with subprocess.Popen([*command, "--threads", "1"], stdout=subprocess.PIPE, text=True) as process:
        try:
            server = Running(process, json.loads(process.stdout.readline())["listening"]).wait_ready()
            assert ask(server, "GET", "/metrics")[0] == 200
            assert ask(server, "HEAD", f"/v1/programs/{program.digest}")[0] == 404
            sent = world.here((0, 1, 2, 3), 0)
            for unwanted in ((sent,), (world.request(sent.ids), sent)):  # refused before memory is taken
                assert ask(server, "POST", "/v1/run", body_of(*unwanted))[0] == 400
            assert not has_loaded(process.pid, "libtorch") and has_loaded(process.pid, "httptools")
            below = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
            assert any(has_loaded(pid, "libtorch") for pid in below)
            assert not any(has_loaded(pid, "httptools") for pid in below)
            body = program_head(len(program.graph_bytes)) + program.graph_bytes + bytes(program.weights_bytes)
            assert ask(server, "PUT", f"/v1/programs/{program.digest}", body)[0] == 201
            request = RunRequest(
                micro_batches=(sent.ids,),
                start=0,
                stop=program.num_stages,
                micro_batch=len(sent.ids),
                program=program.digest,
            )
            [batch] = run(server, request, [sent])
            wanted = program.run(sent.tensors, 0, program.num_stages)
            assert all(map(torch.equal, batch.tensors, wanted)) and len(batch.tensors) == len(wanted)
            assert has_loaded(process.pid, "libtorch")
            [batch] = run(server, world.request(sent.ids))
            same(batch, sent)
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.full
def test_a_front_answers_while_many_first_requests_wait_for_pytorch(world, tmp_path):
    program, begun, gate = make_program(12), tmp_path / "begun", tmp_path / "gate"
    (tmp_path / "store").mkdir()
    publish(program, Store.open(tmp_path / "store"))
    command = [sys.executable, "-c", LATE_PYTORCH, begun, gate, "serve", "--store", tmp_path / "store"]
    options = ["--port", "0", "--threads", "1"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            server = Running(process, json.loads(process.stdout.readline())["listening"]).wait_ready()
            sent = world.here((0, 1, 2, 3), 0)
            request = RunRequest(
                micro_batches=(sent.ids,),
                start=0,
                stop=program.num_stages,
                micro_batch=len(sent.ids),
                program=program.digest,
            )
            with ThreadPoolExecutor(40) as threads:  # more than a loop's default threads
                waiting = [threads.submit(run, server, request, [sent]) for _ in range(40)]
                try:
                    wait_for(lambda: begun.exists() and server.metric("upriver_running_requests") == 40)
                    for path in ("/livez", "/readyz", "/v1/info", "/v1/load", "/ui"):
                        assert ask(server, "GET", path)[0] == 200
                    assert not any(each.done() for each in waiting)
                finally:
                    gate.touch()
                wanted = program.run(sent.tensors, 0, program.num_stages)
                for [batch] in (each.result() for each in waiting):
                    assert all(map(torch.equal, batch.tensors, wanted)) and len(batch.tensors) == len(wanted)
        finally:
            process.kill()


@pytest.mark.full
@pytest.mark.slow
def test_what_a_worker_prints_is_passed_on_and_stdout_stays_clean(world, python):
    python.greet("warning of a library")
    command = [sys.executable, "-c", CLI, python.path, "serve", "--store", world.store.uri, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert "listening" in json.loads(process.stdout.readline())
            assert process.stderr.readline() == "warning of a library\n"
            process.send_signal(signal.SIGTERM)
            assert process.communicate(timeout=60)[0] == ""
        finally:
            process.kill()
