"""Kill one process after another of two servers: their job loses no sample and no bit."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.kills.job import BATCH, MICRO_BATCH, SEED, Difference, make_data, through_servers, train
from benchmarks.kills.killer import Servers, drawn
from upriver.control.server_choice import Health
from upriver.finetune.job import FinetuneJob
from upriver.finetune.prefetch.sampler import epoch_order

EVERY = 8
"""Steps from one kill to the next."""

PACE_S = 0.15
"""Added time per step while processes are killed: 1 to 2 s from one kill to the next."""

SAMPLES = 244
"""Thirteen steps an epoch; the last micro-batch and the last batch of an epoch are short."""

WORKER_S = 120.0
"""Longest wait for a worker to kill: restarted servers may need 20 s each."""


def until(condition: Callable[[], bool], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def is_up(job: FinetuneJob, urls: Sequence[str]) -> bool:
    """Return whether a job can use any of these servers."""
    return any(server.health == Health.UP and server.url in urls for server in job.servers)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kills", "epochs", "seed"),
    [
        pytest.param(2, 3, 1, marks=pytest.mark.full),  # a front process, and a worker of the other server
        pytest.param(6, 8, 0, marks=pytest.mark.full),
    ],
)
def test_a_job_whose_servers_are_killed_all_the_time_is_the_undisturbed_one(
    tmp_path: Path, kills: int, epochs: int, seed: int
) -> None:
    data = make_data(tmp_path / "store", SAMPLES)
    rng = random.Random(seed)
    targets = drawn(rng, kills)
    noted: list[Mapping[str, int]] = []
    with Servers(data.store.uri, tmp_path) as servers:
        servers.wait_ready()
        wanted = train(servers.urls, data, epochs=epochs)
        assert wanted.through_servers == 1

        def disturb(step: int, job: FinetuneJob) -> None:
            """Kill a process every few steps, once the job can use the other server."""
            number, rest = divmod(step, EVERY)
            if step in (EVERY, (kills + 1) * EVERY):
                noted.append(job.report.samples)
            if rest == 0 and number <= kills:
                until(lambda: is_up(job, [servers.urls[1 - targets[number - 1].server]]))
                servers.kill(targets[number - 1], rng, patience_s=WORKER_S)
            if rest == 0 and number == kills + 1:
                until(lambda: is_up(job, servers.urls))
            if number <= kills:
                time.sleep(PACE_S)

        got = train(servers.urls, data, epochs=epochs, after_step=disturb)
        killed = [kill.target for kill in servers.kills]
        servers.wait_ready()
        fronts = sum(target.kind == "front" for target in killed)
        assert servers.ended == [-signal.SIGKILL] * fronts, "a front ends when it is killed, and only then"
        assert servers.stop() == [0, 0]
        assert servers.left() == {}

    assert killed == targets
    assert not Difference.of(got, wanted)
    assert len(got.losses) == epochs * -(-SAMPLES // BATCH)
    for epoch, came in enumerate(got.epochs):
        order = epoch_order(
            SAMPLES, seed=SEED, epoch=epoch, batch_size=BATCH, micro_batch=MICRO_BATCH, shuffle=True
        )
        assert tuple(came) == order.ids
        assert Counter(came) == Counter(range(SAMPLES))
    assert sum(got.samples.values()) == epochs * SAMPLES
    before, after = noted
    under_kills = {source: count - before.get(source, 0) for source, count in after.items()}
    assert through_servers(under_kills) > 0.5
    assert all(got.samples.get(url, 0) > 0 for url in servers.urls)
    # Processes must have been seen, or the check for leftover processes would prove nothing.
    assert len(servers.seen.fronts) == 2 + fronts
    assert len(servers.seen.processes) >= len(servers.seen.fronts) + len(killed) - fronts
    assert servers.seen.memory
