"""Check whether a job notices killed servers: SIGKILL every 5 seconds for a minute, with two servers.

Run with ``python -m benchmarks.kills``. Each run is a line of ``results/kills.jsonl``, and the next start
resumes there. ``--minutes 5`` begins no further run after that, ``--quick`` is a small form that shows
little, ``--report`` only writes ``results/kills.md`` from the existing runs.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.code_version import code, commit
from benchmarks.harness.measuring import let_threads_sleep
from benchmarks.harness.records import Deadline, Output, command_line, exit_on_faults, until_time_is_up
from benchmarks.kills.job import BATCH, Difference, make_data, through_servers, train
from benchmarks.kills.killer import Killer, NotWell, Servers, drawn
from benchmarks.kills.report import faults, report, wrong
from upriver.finetune.job import FinetuneJob

OUTLAST = 1.25
"""Duration of the job over that of the kills: a quarter follows the kills, so that restarted servers are
used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The length of a run.

    Attributes:
        kills: Number of killed processes.
        every_s: Seconds between two kills.
        samples: Samples of an epoch.
        epochs: Epochs of the job.
        seeds: One run each.
    """

    kills: int
    every_s: float
    samples: int
    epochs: int
    seeds: tuple[int, ...]

    @property
    def steps(self) -> int:
        """Return the training steps of the job."""
        return self.epochs * -(-self.samples // BATCH)

    @property
    def least_s(self) -> float:
        """Return the least seconds of the job."""
        return OUTLAST * self.kills * self.every_s


FULL = Setting(kills=12, every_s=5.0, samples=1004, epochs=15, seeds=(0, 1, 2))
"""A minute, and 0.1 s a step. The last micro-batch and the last training batch of an epoch are short ones."""

QUICK = Setting(kills=4, every_s=1.5, samples=244, epochs=3, seeds=(0,))


class Pace:
    """Give each step a minimum duration, and record the origin of samples during the kills.

    The record runs from the first kill to one interval after the last. The time before and after shows
    nothing about kills.

    Args:
        setting: Total duration, and times of the kills.
        killer: Begins after the first step.
    """

    def __init__(self, setting: Setting, killer: Killer) -> None:
        self._step_s, self._killer = setting.least_s / setting.steps, killer
        self._first_s, self._last_s = setting.every_s, (setting.kills + 1) * setting.every_s
        self._next = 0.0
        self._before: Mapping[str, int] = {}
        self._since: Mapping[str, int] = {}

    def __call__(self, step: int, job: FinetuneJob) -> None:
        """Wait and record after a step."""
        if step == 1:
            self._killer.begin()
        self._note(job.report.samples)
        time.sleep(max(0.0, self._next - time.monotonic()))
        self._next = time.monotonic() + self._step_s

    @property
    def samples(self) -> dict[str, int]:
        """Return server or ``local`` to the number of samples from there during the kills."""
        return {source: count - self._before.get(source, 0) for source, count in self._since.items()}

    def _note(self, samples: Mapping[str, int]) -> None:
        after_s = time.monotonic() - self._killer.began
        if after_s <= self._first_s:
            self._before = samples
        if after_s <= self._last_s:
            self._since = samples


def run(setting: Setting, seed: int) -> dict[str, Any]:
    """Run the job undisturbed and with kills. Return both and the leftovers as a record."""
    rng = random.Random(seed)
    targets = drawn(rng, setting.kills)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = make_data(folder / "store", setting.samples)
        with Servers(data.store.uri, folder) as servers:
            servers.wait_ready()
            began = time.monotonic()
            wanted = train(servers.urls, data, epochs=setting.epochs)
            between = time.monotonic()
            with Killer(servers, targets, every_s=setting.every_s, rng=rng) as killer:
                pace = Pace(setting, killer)
                got = train(servers.urls, data, epochs=setting.epochs, after_step=pace)
            ended = time.monotonic()
            servers.wait_ready()
            killed_fronts = sum(kill.target.kind == "front" for kill in servers.kills)
            codes = Counter(servers.ended) - Counter({-9: killed_fronts})
            codes += Counter(code for code in servers.stop() if code != 0)
            left = servers.left()
    difference = Difference.of(got, wanted)
    return {
        "seed": seed,
        "wanted_kills": setting.kills,
        "kills": [
            {"at_s": round(kill.at - killer.began, 2), "server": kill.target.server, "kind": kill.target.kind}
            for kill in servers.kills
        ],
        "ended_by_themselves": sorted(codes.elements()),
        "lost": difference.lost,
        "doubled": difference.doubled,
        "moved": difference.moved,
        "losses": difference.losses,
        "weights": len(difference.weights),
        "steps": len(got.losses),
        "samples": dict(got.samples),
        "samples_under_kills": pace.samples,
        "through_servers": through_servers(pace.samples),
        "whole_through_servers": got.through_servers,
        "undisturbed_through_servers": wanted.through_servers,
        "retried": got.retried,
        "undisturbed_s": between - began,
        "least_s": setting.least_s,
        "seconds": ended - between,
        "fronts": len(servers.seen.fronts),
        "processes": len(servers.seen.processes),
        "memory": len(servers.seen.memory),
        "groups": len(servers.seen.groups),
        "left": left,
    }


def main() -> None:
    options = command_line(__doc__, resumable=True).parse_args()
    os.environ["UPRIVER_CACHE"] = os.devnull  # proofs and profiles are made anew, and none are left behind
    setting, output = QUICK if options.quick else FULL, Output.of(options, "kills")
    records, deadline = output.records(), Deadline(options.minutes)
    with until_time_is_up():
        for seed in setting.seeds:
            if options.report or records.rows.get(f"seed{seed}", {}).get("code") == code():
                continue
            deadline.check()
            load = round(os.getloadavg()[0], 2)
            try:
                row = {"commit": commit(), "code": code(), "load": load, **run(setting, seed)}
            except NotWell as error:
                sys.exit(f"error: {error}")
            records.add(f"seed{seed}", row)
            said = "; ".join(faults(row)) or f"no fault, {row['through_servers']:.0%} through servers"
            print(f"seed {seed}: {said} ({row['seconds']:.0f} s)", file=sys.stderr, flush=True)
    rows = [records.rows[f"seed{seed}"] for seed in setting.seeds if f"seed{seed}" in records]
    output.write(report(rows, len(setting.seeds), every_s=setting.every_s))
    exit_on_faults([f"seed {row['seed']}: {fault}" for row in rows for fault in wrong(row)])


if __name__ == "__main__":
    let_threads_sleep()
    main()
