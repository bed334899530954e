"""Check that a server with a full disk answers as before, and reports what it cannot keep."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress

import pytest

import upriver
from tests.conftest import fill
from tests.finetune.training import photos, same
from tests.finetune.training import run as train_job
from tests.server.conftest import make_program, make_world
from tests.server.http.test_limits import upload
from tests.server.running import Running, ask, run, wait_for

pytestmark = pytest.mark.slow


@contextmanager
def serving(config, log):
    """Run ``upriver serve`` with its log in a file, as a service manager starts it."""
    command = [sys.executable, "-m", "upriver", "serve", "--port", "0", "--threads", "1", "--config", config]
    with open(log, "ab") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr)
    try:
        server = Running(process, json.loads(process.stdout.readline())["listening"])
        yield server.wait_ready()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def put(server, program):
    status, _, answer = ask(server, "PUT", f"/v1/programs/{program.digest}", upload(program))
    return status, answer.decode()


def listed(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.full
def test_a_server_goes_on_with_store_audit_log_and_log_on_a_full_disk(tmp_path, small_disk):
    world = make_world(small_disk / "store")
    audit, log = small_disk / "audit", small_disk / "log"
    config = tmp_path / "serve.toml"
    config.write_text(
        f'audit_log = "{audit}"\nlog_format = "json"\n[stores]\ndefault = "{world.store.uri}"\n'
    )
    new = make_program(9)

    def answered(server):
        [found] = run(server, world.request((0, 1), stop=3))
        return [tensor.tolist() for tensor in found.tensors]

    with serving(config, log) as server:
        assert put(server, world.program)[0] == 201
        first = answered(server)
        wait_for(lambda: len(audit.read_text().splitlines()) == 2)
        lose_worker(server)
        wait_for(lambda: whole(log))
        logged = len(whole(log))
        filler = fill(small_disk)
        # Appending files fill the rest of their last pages before writes to them fail.
        while not server.metric("upriver_audit_failures_total"):
            assert answered(server) == first
        log_before = log.read_bytes()
        before = listed(small_disk)
        status, text = put(server, new)
        assert (status, '"storage_full"' in text, "No space left on device" in text) == (507, True, True)
        lose_worker(server)
        for _ in range(5):
            assert answered(server) == first
        assert ask(server, "GET", "/v1/nothing")[0] == 404
        after = listed(small_disk)
        assert {path: after[path][: len(old)] for path, old in before.items()} == before
        assert after.keys() == before.keys()
        failures = server.metric("upriver_audit_failures_total")
        filler.unlink()
        assert put(server, new)[0] == 201
        assert answered(server) == first
        wait_for(lambda: [line["what"] for line in whole(audit)[-2:]] == ["upload", "run"])
        assert server.metric("upriver_audit_failures_total") == failures
        assert log.read_bytes().startswith(log_before)
        lose_worker(server)
        wait_for(lambda: len(whole(log)) > logged)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def lose_worker(server):
    """Kill a worker, which the log reports, and wait for the next one."""
    [worker] = server.wait_workers()
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: server.wait_workers() not in ([], [worker]))


def whole(path):
    """Return the lines of JSON, without those cut off where the disk was full."""
    found = []
    for line in path.read_text().splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


@pytest.mark.full
def test_training_goes_on_where_a_program_does_not_fit_into_the_store(small_disk, tmp_path):
    dataset = photos(small_disk)
    losses, model, _ = train_job(upriver.connect(), dataset, policy="nosplit")
    config = tmp_path / "serve.toml"
    config.write_text(f'[stores]\ndefault = "{dataset.store.uri}"\n')
    with serving(config, tmp_path / "log") as server:
        filler = fill(small_disk)
        before = listed(small_disk)
        with upriver.connect(server.url) as near:
            got, trained, job = train_job(near, dataset)
        assert same((got, trained), (losses, model))
        assert "No space left on device" in " ".join(str(job.plan).split())
        assert listed(small_disk) == before
        filler.unlink()
        with upriver.connect(server.url) as near:
            got, trained, job = train_job(near, dataset)
        assert same((got, trained), (losses, model))
        assert "No space" not in str(job.plan)


@pytest.mark.full
@pytest.mark.parametrize("command", ["serve", "worker"])
def test_a_server_that_cannot_say_where_it_listens_ends(tmp_path, small_disk, command):
    fill(small_disk)
    given = {"serve": ["--store", tmp_path.as_uri()], "worker": ["--allow", "json"]}[command]
    with (small_disk / "out").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "upriver", command, "--port", "0", *given],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "error: cannot write to stdout: No space left on device",
    )
    assert "Traceback" not in done.stderr
