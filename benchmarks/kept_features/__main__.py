"""Time jobs that keep frozen features, and compare them with features that are kept by hand.

The claim: with ``keep="auto"`` a job is not behind the best of all other ways from three epochs on: a plain
``DataLoader``, features kept by hand, and upriver with ``keep=None``. Five epochs at 20 Mbit/s are at least
1.2 times as fast as by hand, and 3 times as fast as version 0.1.0. A sweep of four jobs counts as a job.

Run ``python -m benchmarks.kept_features`` as root. It takes some hours and may be ended at any
moment: each run is a line of ``results/kept_features.jsonl``, and the next start resumes there. Settings
take turns, so that all have equally many pairs of runs when ``--minutes 120`` ends it. ``--report`` writes
``results/kept_features.md`` and ``.png`` from the existing runs.
"""

from __future__ import annotations

from functools import partial

from benchmarks.harness.code_version import code
from benchmarks.harness.records import Deadline, Records
from benchmarks.harness.training.rig import command, record_run
from benchmarks.kept_features.report import plot, report
from benchmarks.kept_features.rig import Rig
from benchmarks.kept_features.runs import Runs
from benchmarks.kept_features.settings import LEAST_PAIRS, NONE, Setting, run_key

QUICK = Setting(
    network="small",
    mbit=None,
    views=2,
    jobs=2,
    epochs=3,
    batch_size=32,
    samples=76,
    workers=(1,),
    repeats=1,
)
"""Setting of the quick form, which only shows that it works. Its last micro-batch is short."""

SETTINGS = (
    *(
        Setting(network=network, mbit=mbit, views=views)
        for network in ("resnet18", "vit_tiny")
        for mbit in (20, 200)
        for views in (None, 4)
    ),
    Setting(network="resnet18", mbit=20, jobs=4, epochs=3),
    Setting(network="vit_tiny", mbit=200, views=4, jobs=4, epochs=3),
)
"""The settings of one job, then those of a sweep of heads and learning rates."""


def measure(setting: Setting, records: Records, deadline: Deadline) -> None:
    """Run the missing parts of a setting's sweep of forms, and of its next repeat.

    Raises:
        TimeIsUp: If the deadline passes first.
    """
    deadline.check()
    with Rig(setting) as rig:

        def run(label: str, repeat: int, ends: int) -> None:
            deadline.check()
            name = setting.key if repeat else setting.sweep_key
            facts = {**rig.facts, "setting": name, "way": label, "repeat": repeat}
            once = partial(rig.run, label, ends=ends, swept=repeat == 0)
            record_run(records, run_key(setting, label, repeat), facts, once)

        while unswept := Runs(setting, records).unswept:
            for label in unswept:
                run(label, 0, setting.ends)
        reference = Runs(setting, records).reference
        if reference is None or reference["code"] != code():
            run(NONE, 1, setting.ends_of(NONE))
        for label, repeat, ends in Runs(setting, records).next_turn:
            run(label, repeat, ends)


def main() -> None:
    command(
        __doc__,
        "kept_features",
        SETTINGS,
        QUICK,
        found=Runs,
        measure=measure,
        report=report,
        plot=plot,
        turns=LEAST_PAIRS,
        replans=False,
    )


if __name__ == "__main__":
    main()
