"""Check a connection over several jobs: the state it keeps, and its own server that dies."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import upriver
from tests.finetune.test_job_near import start
from tests.finetune.training import BATCH, MICRO, optimizer_of, photos, run, same, train
from tests.program.nets import frozen_small
from tests.rpc.scripted_http import Exchange, scripted
from tests.server.running import free_port, wait_for
from tests.terminal import on_terminal
from upriver.errors import ConfigError, NotAuthorized
from upriver.pipeline import Dataset
from upriver.rpc import discovery
from upriver.rpc.client import ServerClient
from upriver.rpc.discovery import LISTING_PATH, Listed, Listing


@pytest.mark.full
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
        with ServerClient(server.url) as stranger, pytest.raises(NotAuthorized):
            stranger.info()  # another user of this machine could read the store with this user's rights
        assert server is not dead and server.running
        assert dead._process.stdout is not None and dead._process.stdout.closed
        assert first[2].report.samples == {dead.url: 50}
        assert second[2].report.samples == {server.url: 50}
    assert same(first[:2], plain[:2])
    assert same(second[:2], plain[:2])
    assert not server.running


@pytest.mark.full
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
            until_s = time.monotonic() + 60  # threads that the job has ended may hold it for a moment
            while kept() is not None and time.monotonic() < until_s:
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


LASTING = {"upriver-server-stderr", "upriver-closing"}
"""Threads that outlive a job: one reads a server's output, one closes what is no longer used."""


@pytest.mark.full
def test_no_thread_outlives_a_closed_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe and a canary are running, and end shortly after the pool has closed."""
    data, before = photos(tmp_path, 16), set(threading.enumerate())
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

        monkeypatch.setattr("upriver.rpc.link_probe.probed", linger)
        monkeypatch.setattr(replanner, "_prove", prove)
        quiet._after_s = 0.0
        quiet.look()
        replanner._begin_proof(frozenset({99}))
        names = {thread.name for thread in threading.enumerate()}
        assert {"upriver-probe", "upriver-replan"} <= names
        job.close()
        left = {thread.name for thread in set(threading.enumerate()) - before}
        assert {name for name in left if name.startswith("upriver-")} <= LASTING
        job.close()


# ------------------------------------------------------------------------------ servers come and go


class Names:
    """A directory that lists the servers that a test names."""

    def __init__(self, *urls: str) -> None:
        self.urls = urls

    def respond(self, exchange: Exchange) -> None:
        assert (exchange.method, exchange.path) == ("GET", LISTING_PATH)
        listing = Listing(servers=tuple(Listed(url=url) for url in self.urls), lease_s=0.0)
        exchange.plain(200, msgspec.json.encode(listing))


@pytest.mark.full
@pytest.mark.slow
def test_a_job_uses_the_servers_that_a_directory_names_as_they_come_and_go(tmp_path: Path) -> None:
    data = photos(tmp_path, 200)
    plain = run(upriver.connect(), data, policy="nosplit")
    first, second = start(data, free_port()), start(data, free_port())
    names, model, before = Names(first.url), frozen_small(), set(threading.enumerate())
    served: dict[int, dict[str, int]] = {}
    with scripted(names.respond) as url, upriver.connect(url.replace("http", "ray+http", 1)) as near:
        options = {"policy": "freeze", "prefetch": upriver.Prefetch(window_bytes=1 << 15, per_request=1)}
        with near.finetune(model, data, batch_size=BATCH, micro_batch=MICRO, seed=7, **options) as job:
            assert [server.url for server in job.servers] == [first.url]

            def change(step: int) -> None:
                served[step] = dict(job.report.samples)
                if step == 5:
                    names.urls = (first.url, second.url)
                    wait_for(lambda: [server.health for server in job.servers] == ["up", "up"])
                if step == 17:
                    names.urls = (second.url,)
                    wait_for(lambda: [server.url for server in job.servers] == [second.url])

            losses = train(job, model, optimizer_of(model), epochs=2, after_step=change)
            report = job.report
        left = {thread.name for thread in set(threading.enumerate()) - before}
        assert not any(name.startswith(("upriver-following", "upriver-keeper")) for name in left)
    for server in (first, second):
        server.close()
    assert same((losses, model), plain[:2])
    assert set(served[5]) == {first.url} and set(served[17]) == {first.url, second.url}
    assert report.samples[first.url] < 250 and "local" not in report.samples
    assert sum(report.samples.values()) == 400


def test_a_directory_that_names_nobody_leaves_a_job_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery.DirectoryClient.wait, "__defaults__", (0.0,))
    data = photos(tmp_path, 16)
    with (
        scripted(Names().respond) as url,
        upriver.connect(url.replace("http", "ray+http", 1)) as near,
        near.finetune(frozen_small(), data, batch_size=8, micro_batch=MICRO, policy="freeze") as job,
    ):
        assert "no near-data server: the directory ray+http://" in job.plan.why
        assert sum(len(targets) for _, targets in job) == 16


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        (("ray+http://127.0.0.1:1", "http://127.0.0.1:2"), "give it alone"),
        (("http://127.0.0.1:2", "ray+https://127.0.0.1:1"), "give it alone"),
        (("ray+http://",), "a server is http://HOST:PORT"),
        (("ray://127.0.0.1:1",), "a server is http://HOST:PORT"),
        (("http://[",), "a server is http://HOST:PORT"),
    ],
)
def test_addresses_that_are_none_or_do_not_go_together(urls: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        upriver.connect(*urls)


# ------------------------------------------------------------------------------------- what it says


def prepared(data: Dataset, **options: Any) -> None:
    with upriver.connect() as near:
        near.finetune(
            frozen_small(), data, batch_size=BATCH, micro_batch=MICRO, policy="nosplit", **options
        ).close()


def test_a_job_says_by_default_what_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, told = photos(tmp_path), list[str]()
    prepared(data)
    said = capsys.readouterr()
    assert said.out == "" and said.err.splitlines()[0] == "tracing the model"
    prepared(data, on_progress=told.append)
    assert told == said.err.splitlines()
    prepared(data, sampling=upriver.Sampling(rank=1, num_ranks=2))
    assert capsys.readouterr() == ("", "")


def test_a_job_says_it_once_where_it_is_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="upriver"):
        prepared(photos(tmp_path))
    assert "tracing the model" in caplog.messages and capsys.readouterr().err == ""


def test_a_job_shows_it_in_one_line_of_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = photos(tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    with on_terminal(monkeypatch) as shown:
        prepared(data)
    assert "tracing the model" in shown() and "0:00:0" in shown()
