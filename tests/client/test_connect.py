"""A connection over several jobs: what it keeps of them, and a server of its own that dies."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest

import upriver
from tests.client.training import BATCH, MICRO, optimizer_of, photos, run, same, train
from tests.program.nets import frozen_small


def test_an_embedded_server_that_died_is_replaced(tmp_path: Path) -> None:
    data = photos(tmp_path)
    plain = run(upriver.connect(), data, policy="nosplit", epochs=1)
    with upriver.connect(server_threads=1) as near:
        first = run(near, data, cut=2, epochs=1)
        [dead] = near._embedded.values()
        os.kill(dead.pid, signal.SIGKILL)
        dead._process.wait()
        second = run(near, data, cut=2, epochs=1)
        [server] = near._embedded.values()
        assert server is not dead and server.running
        assert dead._process.stdout is not None and dead._process.stdout.closed
        assert first[2].report.samples == {dead.url: 50}
        assert second[2].report.samples == {server.url: 50}
    assert same(first[:2], plain[:2])
    assert same(second[:2], plain[:2])
    assert not server.running


def test_a_connection_lets_go_of_what_a_closed_job_held(tmp_path: Path) -> None:
    data = photos(tmp_path)
    with upriver.connect(server_threads=1) as near:
        for options in ({"policy": "nosplit"}, {"cut": 2}, {"policy": "upriver"}):
            model = frozen_small()
            job = near.finetune(model, data, batch_size=BATCH, micro_batch=MICRO, **options)
            train(job, model, optimizer_of(model))
            kept = weakref.ref(model)
            job.close()
            del model, job
            gc.collect()
            assert kept() is None, options


def test_closing_a_connection_closes_its_jobs(tmp_path: Path) -> None:
    data = photos(tmp_path, 16)
    near = upriver.connect()
    jobs = [
        near.finetune(frozen_small(), data, batch_size=8, micro_batch=MICRO, policy="nosplit")
        for _ in range(3)
    ]
    jobs[1].close()
    jobs[1].close()
    near.close()
    near.close()
    assert all(job._closed for job in jobs)
    assert not near._jobs


def test_no_thread_outlives_a_closed_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe and a canary are under way, and take a moment to end after the pool has closed."""
    data = photos(tmp_path, 16)
    with upriver.connect(server_threads=1) as near:
        job = near.finetune(frozen_small(), data, batch_size=8, micro_batch=MICRO, policy="upriver")
        pool, quiet, replanner = job._pool, job._quiet, job._replanner
        assert pool is not None and quiet is not None and replanner is not None

        def linger(*_: object) -> int:
            while not pool._closed:
                time.sleep(0.01)
            time.sleep(0.5)
            return 1

        def prove(cuts: Sequence[int]) -> None:
            linger(cuts)

        monkeypatch.setattr("upriver.client.quiet.probed", linger)
        monkeypatch.setattr(replanner, "_prove", prove)
        quiet._after_s = 0.0
        quiet.look()
        assert not replanner._proved(frozenset({99}))
        names = {thread.name for thread in threading.enumerate()}
        assert {"upriver-probe", "upriver-replan"} <= names
        job.close()
        names = {thread.name for thread in threading.enumerate() if thread.name.startswith("upriver-")}
        assert names <= {"upriver-embedded-stderr"}
        job.close()
