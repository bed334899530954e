"""Check plans for shared servers: work leaves a busy server, and returns when the server has room."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import upriver
from tests.finetune.conftest import Reference
from tests.finetune.prefetch.test_prefetcher import pool_of
from tests.finetune.test_job_near import start
from tests.finetune.test_replanner import keep_profile
from tests.finetune.training import BATCH, MICRO, optimizer_of, same, train
from tests.planning import alexnet, cluster
from tests.program.nets import frozen_small
from tests.rpc.scripted_transport import ScriptedServer
from upriver.control.plan_switching import PlanSwitcher
from upriver.control.server_choice import Health
from upriver.errors import Overloaded, ServerUnavailable
from upriver.finetune.calibration import measurement, time_budget
from upriver.finetune.calibration.server_gate import ServerGate
from upriver.finetune.planner import Planner
from upriver.finetune.planning.idle_waits import IdleWaits
from upriver.pipeline import Dataset
from upriver.policies import POLICIES
from upriver.profile.live_profile import AtServers, LiveProfile
from upriver.protocol import DatasetRef, Load, RunRequest
from upriver.rpc.client import ServerClient
from upriver.rpc.link_meter import LinkMeter
from upriver.rpc.server_pool import ServerStatus
from upriver.types import Plan, Profile, Tier, Timings, Workload

BANDWIDTH = 2.5e6
WORK = Workload(batch_size=64, num_samples=12_800)
IN_FLIGHT = 4
PER_STEP = 4
"""Responses per training step: micro-batches of 16 in batches of 64."""

TOOK_S = 0.0625


def machine() -> Profile:
    """Return a machine whose storage is the busiest at the freeze point once others use half of it."""
    return alexnet(storage_s=2.4e-4, compute_s=1.2e-4, stored_bytes=110_000)


def fresh(load: float) -> Plan:
    return POLICIES["upriver"](machine(), cluster(bandwidth=BANDWIDTH, micro_batch=16, load=load), WORK)


def wait_s(slowed: float) -> float:
    """Return the wait of one more request when all requests take ``slowed`` times as long as alone.

    The factor includes this job's own requests.
    """
    return (IN_FLIGHT - 1) * TOOK_S + (slowed - 1) * IN_FLIGHT * TOOK_S


class Job:
    """A job's decisions, which get responses whose waits a test sets."""

    def __init__(self) -> None:
        at = AtServers(in_flight=IN_FLIGHT, micro_batch_s=TOOK_S)
        machines = cluster(bandwidth=BANDWIDTH, micro_batch=16)
        self.live = LiveProfile(machine(), machines, samples=16, at_servers=at)
        self.switcher = PlanSwitcher("upriver", fresh(1.0), self.live, WORK, gain=0.05, patience=3)

    def iterations(self, most: int, slowed: float | None) -> list[int]:
        """Return the iterations that leave the plan; no responses come if ``slowed`` is None."""
        left = []
        for number in range(most):
            for _ in range(PER_STEP if slowed is not None else 0):
                waited = Timings(phases={"forward": TOOK_S}, expected_wait_s=wait_s(slowed or 1.0))
                self.live.saw(Tier.STORAGE, waited)
            if self.switcher.consider(BANDWIDTH, now=number).switch is not None:
                left.append(number)
            self.switcher.proof_ended(None, number)
        return left


def alike(plan: Plan, other: Plan) -> bool:
    """Check for the same cuts, and for shares equal within rounding."""
    shares = [{route.cut: route.share for route in each.routes} for each in (plan, other)]
    return shares[0] == pytest.approx(shares[1], abs=1e-9)


@pytest.mark.parametrize("slowed", [4.0, 10.0])
def test_the_plan_moves_to_this_side_and_back_as_servers_are_busy_and_are_not(slowed: float) -> None:
    assert not alike(fresh(slowed), fresh(1.0)), "or this shows nothing"
    job = Job()
    assert job.iterations(20, 1.0) == [], "alone, whatever waits is this job's own"
    left = job.iterations(10, slowed)
    assert len(left) == 1 and alike(job.switcher.plan, fresh(slowed))
    assert job.iterations(20, slowed) == []
    assert len(job.iterations(10, 1.0)) == 1
    assert alike(job.switcher.plan, fresh(1.0))


def test_a_short_rush_changes_nothing() -> None:
    job = Job()
    assert job.iterations(10, 1.0) == []
    for _ in range(5):
        assert job.iterations(2, 10.0) == []
        assert job.iterations(6, 1.0) == []


def test_a_plan_that_asks_no_server_comes_back_by_what_they_say_unasked() -> None:
    job = Job()
    job.iterations(10, 1.0)
    job.iterations(10, 10.0)
    assert alike(job.switcher.plan, fresh(10.0))
    assert job.iterations(20, None) == [], "nothing has been heard"
    for _ in range(3):
        job.live.waits(0.0)
    assert len(job.iterations(10, None)) == 1
    assert alike(job.switcher.plan, fresh(1.0))


# ------------------------------------------------------------------------------- servers that refuse


def capacity(*servers: tuple[Health, float]) -> float:
    """Return the capacity that a planner computes from servers of 2, 1 and 1 workers."""
    planner = Planner.__new__(Planner)
    planner.measured = SimpleNamespace(at_once={"s0": 2, "s1": 1, "s2": 1})  # type: ignore[assignment]
    return planner._capacity(
        [
            ServerStatus(url=f"s{n}", health=health, reason="", in_flight=0, served=0, available=available)
            for n, (health, available) in enumerate(servers)
        ]
    )


def test_a_server_that_refuses_counts_for_the_time_in_which_it_does_not() -> None:
    up, resting, down = Health.UP, Health.RESTING, Health.DOWN
    assert capacity((up, 1.0), (up, 1.0), (up, 1.0)) == 1.0
    assert capacity((up, 1.0), (down, 1.0), (up, 1.0)) == 0.75
    assert capacity((resting, 0.5), (up, 1.0), (up, 1.0)) == 0.75
    assert capacity((resting, 0.01), (resting, 0.01), (down, 1.0)) == pytest.approx(0.0075)
    assert capacity((down, 1.0), (Health.OUT, 1.0), (Health.JOINING, 1.0)) == 0.0
    assert capacity((up, 1.0), (up, 1.0), (up, 1.0), (up, 1.0)) == 1.25, "one that has joined since"


# ------------------------------------------------------------------------- questions to idle servers


class Telling(ScriptedServer):
    """A server that states how long one more micro-batch would wait."""

    def __init__(self, url: str, wait_s: float | None) -> None:
        super().__init__(url)
        self.wait_s, self.asked = wait_s, 0

    def load(self) -> Load:
        self.asked += 1
        if self.wait_s is None:
            raise ServerUnavailable("does not say")
        return Load(
            window_s=60,
            utilisation=1,
            running=9,
            queue=0,
            expected_wait_s=self.wait_s,
            k=1,
            workers=(1.0,),
        )


def looked(waits: IdleWaits) -> float | None:
    """Return the result of a look after the question of the look before was answered."""
    waits.look()
    assert waits._thread is not None
    waits._thread.join()
    return waits.look()


def test_servers_are_asked_where_they_owe_nothing_and_give_nothing() -> None:
    answers = 0
    servers = [Telling("a", 2.0), Telling("b", 4.0), Telling("c", None)]
    with pool_of(*servers) as pool:
        waits = IdleWaits(pool, lambda: answers, after_s=0.0)
        assert looked(waits) == 3.0, "on average over those that say"
        lease = pool.borrow()
        assert lease is not None
        waits.close()
        asked = servers[0].asked
        with lease:
            assert looked(waits) is None
            waits.close()
        assert servers[0].asked == asked, "they would tell of this job's own work"
        assert looked(waits) == 3.0
        waits.close()
        waits._found = [3.0]
        answers = 1
        assert waits.look() is None, "an answer says more"
        waits.close()


def test_while_answers_come_nobody_is_asked() -> None:
    answers, server = 0, Telling("a", 2.0)
    with pool_of(server) as pool:
        waits = IdleWaits(pool, lambda: answers, after_s=60.0)
        for _ in range(5):
            answers += 1
            assert waits.look() is None
        waits.close()
    assert server.asked == 0


# ----------------------------------------------------------------------------------- real servers


@contextmanager
def greedy(url: str, data: Dataset, *, at_once: int) -> Iterator[None]:
    """Run another client that always has that many requests at the server, each for large micro-batches."""
    ids = tuple(range(64))
    request = RunRequest(
        micro_batches=(ids,) * 8,
        start=data.chain.start,
        stop=0,
        micro_batch=len(ids),
        dataset=DatasetRef(store=data.store.name, digest=data.digest),
    )
    over, first = threading.Event(), threading.Semaphore(0)

    def ask() -> None:
        with ServerClient(url) as client:
            while not over.is_set():
                try:
                    with client.run(request) as answer:
                        for _ in answer:
                            first.release()
                            if over.is_set():
                                return
                except Overloaded:
                    over.wait(0.05)

    threads = [threading.Thread(target=ask) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    try:
        for _ in threads:
            assert first.acquire(timeout=60)
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.full
def test_a_greedy_neighbour_is_noticed_and_forgotten_and_no_bit_shows_it(
    data: Dataset,
    plain: Reference,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path))
    monkeypatch.setattr(time_budget, "SHARE", 0.0)  # otherwise stages may be measured at a second size
    monkeypatch.setattr(measurement, "slowdown", lambda *args, **kwargs: 1.0)
    server, model = start(data, 0), frozen_small()
    options: dict[str, Any] = {
        "batch_size": BATCH,
        "micro_batch": MICRO,
        "seed": 7,
        "prefetch": upriver.Prefetch(connections=2),
    }
    try:
        with upriver.connect(server.url, meter=LinkMeter(25e6)) as near:
            keep_profile(near, data, tmp_path, storage_s=1e-9, compute_s=1e-3)
            with near.finetune(model, data, policy="exhaustive", **options) as job:
                assert job.plan.cut >= 1
                replanner = job._replanner
                assert replanner is not None
                live = replanner._live
                epoch, losses = job_epochs(job, model)
                epoch()
                alone = live.slowed
                with greedy(server.url, data, at_once=6):
                    until(lambda: live.slowed > 2 * max(1.0, alone), epoch)
                    busy = live.slowed
                until(lambda: live.slowed - 1 < (busy - 1) / 4, epoch)
                report = job.report
    finally:
        server.close()
    wanted, _ = plain
    assert all(map(torch.equal, losses, wanted)), "of the epochs that both have"
    assert sum(report.samples.values()) == 200 * (len(losses) // 17)


def job_epochs(job: upriver.FinetuneJob, model: Any) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """Train one more epoch at each call; return all losses so far."""
    losses: list[torch.Tensor] = []
    optimizer = optimizer_of(model)

    def epoch() -> None:
        losses.extend(train(job, model, optimizer, first=len(losses)))

    return epoch, losses


def until(condition: Callable[[], bool], epoch: Callable[[], None]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        epoch()


@pytest.mark.full
def test_a_server_without_room_for_a_canary_at_another_cut_is_named_by_the_plan(
    data: Dataset, near: upriver.Near, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(gate: ServerGate, server: ServerClient, *, stop: int) -> Timings:
        raise Overloaded(f"no room at cut {stop}", retry_after_s=3)

    options: dict[str, Any] = {"batch_size": BATCH, "micro_batch": MICRO, "policy": "upriver"}
    with near.finetune(frozen_small(), data, **options) as job:
        [server] = job.servers
        replanner = job._replanner
        assert replanner is not None and "refused" not in job.plan.why
        monkeypatch.setattr(ServerGate, "measure", full)
        assert not replanner.opened(2)
        assert "servers refused a request so far" in job.plan.why and "no room at cut 2" in job.plan.why
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning == f"{server.url} refused a request, to be asked again after 3 s: no room at cut 2"


@pytest.mark.full
def test_a_job_says_what_it_has_at_servers_and_hears_of_it_by_each_answer(
    data: Dataset, plain: Reference, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waits of a real server's responses, scaled by a factor, reach the plan's load."""
    said: list[float] = []
    real = LiveProfile.saw

    def saw(live: LiveProfile, tier: Tier, timings: Timings, *, sent_bytes: float = 0.0) -> None:
        if tier is Tier.STORAGE:
            said.append(timings.expected_wait_s)
            timings = Timings(phases=timings.phases, stages=timings.stages, expected_wait_s=1000.0)
        real(live, tier, timings, sent_bytes=sent_bytes)

    monkeypatch.setattr(LiveProfile, "saw", saw)
    model = frozen_small()
    with near.finetune(
        model,
        data,
        batch_size=BATCH,
        micro_batch=MICRO,
        seed=7,
        policy="upriver",
        prefetch=upriver.Prefetch(connections=3),
    ) as job:
        replanner = job._replanner
        assert replanner is not None and near.measured is not None
        live = replanner._live
        at = live._at
        assert (at.in_flight, at.at_once) == (3, 1)
        assert at.slowed == near.measured.slowed and at.micro_batch_s == near.measured.micro_batch_s > 0
        losses = train(job, model, optimizer_of(model), epochs=2)
        if len(said) >= 4:  # a plan may have left all work to this side
            assert live.now()[1].storage.load > 10 * near.measured.cluster.storage.load
    assert same((losses, model), plain)
