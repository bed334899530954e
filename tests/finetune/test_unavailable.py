"""Check a job whose servers or store stop answering: the plan says so, and the job goes on, bit for bit."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import upriver
from tests.finetune.conftest import Reference
from tests.finetune.test_job_near import start
from tests.finetune.training import BATCH, MICRO, STAGES, images, optimizer_of, same, train
from tests.program.nets import frozen_small
from tests.rpc.scripted_http import Exchange, scripted
from tests.server.running import wait_for
from upriver.control.route_dealing import deal
from upriver.errors import NotAuthorized, Overloaded, StoreError
from upriver.finetune.job import FinetuneJob
from upriver.finetune.planning.plan_builder import with_notes
from upriver.finetune.prefetch.fetch_threads import STORE_BACKOFF
from upriver.pipeline import Dataset
from upriver.policies import POLICIES
from upriver.protocol import error_body
from upriver.rpc.local_server import EmbeddedServer
from upriver.types import Plan

pytestmark = pytest.mark.slow


@pytest.mark.full
@pytest.mark.parametrize("sign", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
def test_a_server_that_stops_is_named_by_the_plan(
    data: Dataset, plain: Reference, sign: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    server, model, whys = start(data, 0), frozen_small(), []
    with upriver.connect(server.url) as near:
        with near.finetune(
            model,
            data,
            batch_size=BATCH,
            micro_batch=MICRO,
            seed=7,
            cut={2: 0.5, 5: 0.5},
            prefetch=upriver.Prefetch(window_bytes=1 << 15),
        ) as job:
            asked = job.plan.why

            def stop(step: int) -> None:
                whys.append(job.plan.why)
                if step == 4:
                    os.kill(server.pid, sign)

            losses = train(job, model, optimizer_of(model), epochs=2, after_step=stop)
            report = job.report
        after = job.plan.why
    os.kill(server.pid, signal.SIGKILL)
    server.close()
    assert whys[0] == asked
    for said in (whys[-1], after):
        assert said.startswith(asked) and "no server answers now" in said and server.url in said
    assert report.samples["local"] > 0 and sum(report.samples.values()) == 400
    assert same((losses, model), plain)
    assert [record.levelname for record in caplog.records if "cannot be carried out" in record.message] == [
        "WARNING"
    ]


@pytest.mark.full
def test_what_is_added_to_a_plans_reason_is_joined_to_it(data: Dataset) -> None:
    server = start(data, 0)
    with (
        upriver.connect(server.url) as near,
        near.finetune(
            frozen_small(), data, batch_size=BATCH, micro_batch=MICRO, policy="freeze", exact="numeric"
        ) as job,
    ):
        asked = job.plan.why
        os.kill(server.pid, signal.SIGKILL)
        server.close()
        list(job)
        wait_for(lambda: job.plan.why != asked)
        assert job.plan.why.startswith(f"{asked}; no server answers now ({server.url}")
        assert "; exact='numeric'" in asked and ".;" not in asked


def test_a_reason_without_a_last_full_stop_is_joined_as_well() -> None:
    plan = Plan(policy="p", feasible=True, routes=(), predicted=None, table=(), why="One. Two (1.00 x).")
    assert with_notes(plan) is plan
    assert with_notes(plan, "three").why == "One. Two (1.00 x); three"
    assert with_notes(with_notes(plan, "three"), "four", "five").why == "One. Two (1.00 x); three; four; five"


def test_a_server_that_is_not_used_is_named_once(data: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    url = "http://127.0.0.1:9"
    with (
        upriver.connect(url) as near,
        near.finetune(frozen_small(), data, batch_size=BATCH, micro_batch=MICRO) as job,
    ):
        assert job.plan.why.count(url) == 1
    [said] = [record.getMessage() for record in caplog.records if "not used" in record.getMessage()]
    assert said.startswith(f"a server is not used for now: {url}: ") and said.count(url) == 1


@pytest.mark.full
def test_a_refused_token_is_named_by_log_and_plan_as_lasting(
    data: Dataset, plain: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(exchange: Exchange) -> None:
        body = error_body(NotAuthorized("the token is not valid here"))
        exchange.plain(401, json.dumps(body).encode())

    model = frozen_small()
    with (
        scripted(refuse) as url,
        upriver.connect(url, token="old") as near,
        near.finetune(model, data, batch_size=BATCH, micro_batch=MICRO, seed=7) as job,
    ):
        losses = train(job, model, optimizer_of(model), epochs=2)
        lasting = "the token is not valid here; the token was refused, which does not mend by itself"
        assert f"{url}: {lasting}" in job.plan.why and "for now" not in job.plan.why
    said = [record.getMessage() for record in caplog.records if "not used" in record.getMessage()]
    assert said == [f"a server is not used: {url}: {lasting}"]
    assert same((losses, model), plain)


@pytest.mark.full
def test_a_plan_that_needs_no_server_says_nothing(data: Dataset) -> None:
    server = start(data, 0)
    with (
        upriver.connect(server.url) as near,
        near.finetune(frozen_small(), data, batch_size=BATCH, micro_batch=MICRO, policy="nosplit") as job,
    ):
        server.close()
        assert len(list(job)) == len(job)
        assert "answers" not in job.plan.why


# ---------------------------------------------------------------------------- servers without room


@contextmanager
def without_room(server_url: str, refused: Callable[[], bool]) -> Iterator[str]:
    """Run a proxy that answers requests with 503 while ``refused()`` is true; yield its URL."""
    host = server_url.removeprefix("http://")

    def respond(exchange: Exchange) -> None:
        if exchange.path == "/v1/run" and refused():
            body = error_body(Overloaded("all of it is in use", retry_after_s=1))
            exchange.plain(503, json.dumps(body).encode(), Retry_After="1")
            return
        connection = http.client.HTTPConnection(host)
        try:
            headers = {name: exchange.headers[name] for name in exchange.headers if name != "Host"}
            connection.request(exchange.method, exchange.path, exchange.body, headers)
            answer = connection.getresponse()
            exchange.plain(answer.status, answer.read())
        finally:
            connection.close()

    with scripted(respond) as url:
        yield url


@pytest.mark.full
def test_a_server_that_has_no_room_for_a_while_is_named_by_log_and_plan(
    data: Dataset, plain: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    server, model, whys = start(data, 0), frozen_small(), []
    left = turned_away = 0

    def refused() -> bool:
        nonlocal left, turned_away
        if left == 0:
            return False
        left, turned_away = left - 1, turned_away + 1
        return True

    def fill(step: int) -> None:
        nonlocal left
        whys.append(job.plan.why)
        if step == 4:
            left = 3

    options: dict[str, Any] = {"cut": {2: 0.5, 5: 0.5}, "prefetch": upriver.Prefetch(window_bytes=1 << 15)}
    with without_room(server.url, refused) as url, upriver.connect(url) as near:
        with near.finetune(model, data, batch_size=BATCH, micro_batch=MICRO, seed=7, **options) as job:
            asked = job.plan.why
            losses = train(job, model, optimizer_of(model), epochs=2, after_step=fill)
            report = job.report
        after = job.plan.why
    server.close()
    assert whys[:4] == [asked] * 4 and "refused" not in asked
    assert 1 <= turned_away <= 3
    requests = "a request" if turned_away == 1 else f"{turned_away} requests"
    for said in (whys[-1], after):
        assert said.startswith(asked) and said.count(f"servers refused {requests} so far") == 1
        assert f"{url}, to be asked again after 1 s: all of it is in use" in said
    assert [
        (record.levelname, record.message) for record in caplog.records if "refused" in record.message
    ] == [("WARNING", f"{url} refused a request, to be asked again after 1 s: all of it is in use")]
    assert sum(report.samples.values()) == 400 and report.samples[url] > 0
    assert same((losses, model), plain)


# ------------------------------------------------------------ the store, as the training node reaches it


@dataclass
class Apart:
    """A store that a server sees as files and the training node over HTTP, through separate processes."""

    near: upriver.Near
    data: Dataset
    objects: subprocess.Popen[str]
    server: EmbeddedServer


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Apart]:
    images(tmp_path, 200)
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "harness" / "object_server.py"
    command = [sys.executable, str(script), str(tmp_path)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as objects,
        EmbeddedServer.start({"default": tmp_path.as_uri()}, threads=1) as server,
        upriver.connect(server.url) as near,
    ):
        assert objects.stdout is not None
        url = json.loads(objects.stdout.readline())["listening"]
        patience = {"read_timeout_s": "1.5", "timeout_s": "3", "max_retries": "1"}
        options = {"endpoint": url, "region": "none", "anonymous": "true", **patience}
        store = upriver.Store.open("s3://store", options=options)
        yield Apart(near, upriver.index(store, "photos", stages=STAGES), objects, server)
        objects.kill()


SMALL = {
    "batch_size": BATCH,
    "micro_batch": MICRO,
    "seed": 7,
    "prefetch": upriver.Prefetch(window_bytes=1 << 15),
}


@pytest.mark.full
def test_a_store_that_stops_is_named_and_servers_make_all(
    apart: Apart, plain: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    Rest(monkeypatch)  # the epoch never ends: while the store is tried again the plan does not name it
    model, whys = frozen_small(), []
    with apart.near.finetune(model, apart.data, cut={-4: 0.4, 2: 0.6}, **SMALL) as job:

        def stop(step: int) -> None:
            whys.append(job.plan.why)
            if step == 4:
                apart.objects.kill()

        losses = train(job, model, optimizer_of(model), epochs=2, after_step=stop)
        placed, report = job.placed, job.report
    assert "store" not in whys[0]
    assert "the store cannot be read from here now" in whys[-1]
    late = {each.cut for each in placed if each.epoch == 1}
    assert late == {2}, "at a cut of the plan, where servers have passed the canary"
    assert 0 < report.samples["local"] < 100 and sum(report.samples.values()) == 400
    assert same((losses, model), plain)


@pytest.mark.full
def test_a_plan_of_no_servers_turns_to_them_once_they_pass_the_canary(
    apart: Apart, plain: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsplit = {**POLICIES, "hapi": POLICIES["nosplit"]}
    for module in ("upriver.policies", "upriver.control.plan_switching"):
        monkeypatch.setattr(f"{module}.POLICIES", unsplit)
    model = frozen_small()
    with apart.near.finetune(model, apart.data, policy="hapi", **SMALL) as job:
        losses = train(
            job,
            model,
            optimizer_of(model),
            epochs=2,
            after_step=lambda step: apart.objects.kill() if step == 4 else None,
        )
        early = {each.source for each in job.placed[:4]}
        late = {each.cut for each in job.placed if each.epoch == 1}
    assert early == {"local"} and late == {6}
    assert same((losses, model), plain)


class Rest:
    """The clock of a lost store's pause: it stands still until a test advances it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(
            "upriver.finetune.prefetch.fetch_threads.time", SimpleNamespace(monotonic=lambda: self.now)
        )

    def end(self) -> None:
        self.now += STORE_BACKOFF.base_s


def as_dealt(job: FinetuneJob, epoch: int) -> bool:
    """Return whether each micro-batch of an epoch took the route of the plan."""
    placed = [-4 if each.source == "local" else each.cut for each in job.placed if each.epoch == epoch]
    return placed == [hand.cut for hand in deal(job.plan.routes, len(placed), start=-4)]


@pytest.mark.full
def test_a_store_that_stalls_is_named_servers_make_its_share_and_it_is_used_again(
    apart: Apart, plain: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store still accepts connections and says nothing, like a link that stops without a word."""
    model, whys, rest = frozen_small(), [], Rest(monkeypatch)
    with apart.near.finetune(model, apart.data, cut={-4: 0.4, 2: 0.6}, **SMALL) as job:

        def stall(step: int) -> None:
            whys.append(job.plan.why)
            if step == 4:
                os.kill(apart.objects.pid, signal.SIGSTOP)
            if step == 10:
                os.kill(apart.objects.pid, signal.SIGCONT)
                rest.end()

        losses = train(job, model, optimizer_of(model), epochs=2, after_step=stall)
        placed, report = job.placed, job.report
        assert as_dealt(job, epoch=1) and not as_dealt(job, epoch=0)
    assert "the store cannot be read from here now" in whys[9] and "servers make that share" in whys[9]
    assert whys[-1] == whys[0] and "store" not in whys[0]
    stalled, after = (
        [each.source == "local" for each in placed if each.epoch == 0 and each.index in indices]
        for indices in (range(9, 14), range(18, 25))
    )
    assert not any(stalled) and any(after)
    assert sum(report.samples.values()) == 400
    assert same((losses, model), plain)


@pytest.mark.full
def test_a_job_goes_on_when_store_and_server_have_both_stalled_and_come_back(
    apart: Apart, plain: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come back after the job gave one of them up, and before it gives the other one up."""
    model, rest = frozen_small(), Rest(monkeypatch)
    stalled, options = (
        (apart.objects.pid, apart.server.pid),
        {**SMALL, "prefetch": upriver.Prefetch(window_bytes=1 << 18)},
    )
    with apart.near.finetune(model, apart.data, cut={-4: 0.4, 2: 0.6}, **options) as job:
        asked = job.plan.why

        def come_back() -> None:
            wait_for(lambda: job.plan.why != asked)
            for pid in stalled:
                os.kill(pid, signal.SIGCONT)
            rest.end()

        returning = threading.Thread(target=come_back)

        def stall(step: int) -> None:
            if step == 4:
                for pid in stalled:
                    os.kill(pid, signal.SIGSTOP)
                returning.start()
            elif step > 4 and not returning.is_alive():
                rest.end()  # a read that began before they came back may fail after it
            if step == len(job):
                returning.join()
                wait_for(lambda: rest.end() or job.plan.why == asked)

        losses = train(job, model, optimizer_of(model), epochs=2, after_step=stall)
        sources = {each.source for each in job.placed if each.epoch == 1}
        report = job.report
    assert sources == {"local", apart.server.url}, "both are used again"
    assert set(report.samples) == {"local", apart.server.url} and sum(report.samples.values()) == 400
    assert same((losses, model), plain)


@pytest.mark.full
def test_where_neither_answers_it_is_an_error(apart: Apart) -> None:
    model = frozen_small()

    def stop(step: int) -> None:
        if step == 4:
            apart.objects.kill()
            os.kill(apart.server.pid, signal.SIGKILL)

    with (
        apart.near.finetune(model, apart.data, cut={-4: 0.4, 2: 0.6}, **SMALL) as job,
        pytest.raises(StoreError, match="cannot read"),
    ):
        train(job, model, optimizer_of(model), epochs=2, after_step=stop)


@pytest.mark.full
def test_a_plan_that_asks_no_server_has_none_to_turn_to(apart: Apart) -> None:
    model = frozen_small()
    with (
        apart.near.finetune(model, apart.data, policy="nosplit", **SMALL) as job,
        pytest.raises(StoreError, match="cannot read"),
    ):
        train(
            job,
            model,
            optimizer_of(model),
            epochs=2,
            after_step=lambda step: apart.objects.kill() if step == 4 else None,
        )
