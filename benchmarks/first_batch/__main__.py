"""Time how soon a job has its first batch, and compare jobs of a few epochs with an ordinary loop.

Run ``python -m benchmarks.first_batch`` as root. It takes about an hour and may be ended at any moment: each
run is a line of ``results/first_batch.jsonl``, and the next start resumes there. ``--minutes 20`` ends it by
itself; ``--report`` writes ``results/first_batch.md`` and ``.png`` from the existing runs.

The claim: the first batch comes within 5 s of the call of ``finetune()`` with cold caches and within 2 s with
warm ones, by the largest median of three networks. Jobs of one to five epochs of 300 samples take at most
1.05 times the plain loop's time, by the largest ratio of medians.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from benchmarks.first_batch.report import Runs, plot, report
from benchmarks.first_batch.rig import Rig
from benchmarks.first_batch.settings import ALONE, UNSPLIT, Setting, run_key
from benchmarks.harness.code_version import code
from benchmarks.harness.records import Deadline, Records
from benchmarks.harness.training.rig import command, record_run

QUICK = Setting(
    network="small",
    mbit=None,
    cores=1,
    batch_size=8,
    samples=32,
    epochs=2,
    ways=ALONE[:1],
    repeats=1,
    forced=True,
)
"""Setting of the quick form, which only shows that it works."""

SETTINGS = (
    *(
        Setting(network=network, mbit=200, cores=2, batch_size=16, samples=96)
        for network in ("resnet18", "vit_b_16", "bert_base")
    ),
    *(
        Setting(
            network="resnet18",
            mbit=mbit,
            cores=1,
            batch_size=32,
            samples=300,
            epochs=5,
            ways=ALONE,
            workers=(0, 1, 2),
        )
        for mbit in (20, 200, None)
    ),
)
"""The settings of the first batch, then those of short jobs."""


def measure(setting: Setting, records: Records, deadline: Deadline) -> None:
    """Run the missing parts of a setting: the reference, the loop's sweep, and all ways' repeats.

    Raises:
        TimeIsUp: If the deadline passes first.
    """
    with tempfile.TemporaryDirectory() as folder, Rig(setting, Path(folder)) as rig:

        def run(label: str, repeat: int) -> None:
            deadline.check()
            facts = {**rig.facts, "way": label, "repeat": repeat}
            record_run(
                records, run_key(setting, label, repeat), facts, partial(rig.run, label, swept=repeat == 0)
            )

        reference = Runs(setting, records).reference
        if reference is None or reference["code"] != code():
            run(UNSPLIT, 0)
        wanted = [(label, 0) for label in setting.sweep if len(setting.sweep) > 1]
        for label, repeat in wanted:
            if Runs(setting, records).row(label, repeat) is None:
                run(label, repeat)
        labels = Runs(setting, records).labels
        for repeat in setting.measured:
            for label in labels:
                if Runs(setting, records).row(label, repeat) is None:
                    run(label, repeat)


def main() -> None:
    command(
        __doc__,
        "first_batch",
        SETTINGS,
        QUICK,
        found=Runs,
        measure=measure,
        report=report,
        plot=plot,
        replans=False,
    )


if __name__ == "__main__":
    main()
