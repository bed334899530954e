"""Run every legal cut, and compare each policy's choice with the best one.

Run ``python -m benchmarks.plan_quality`` as root. It takes about three hours and may be ended at any moment:
each run is a line of ``results/plan_quality.jsonl``, and the next start resumes there. ``--minutes 20`` ends
it by itself; ``--report`` writes ``results/plan_quality.md`` and ``.png`` from the existing runs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.harness.records import Deadline, Records
from benchmarks.harness.training.plans import Found, Setting
from benchmarks.harness.training.rig import Rig, command, run_once
from benchmarks.plan_quality.report import POLICIES, plot, report

QUICK = Setting(network="resnet18", mbit=None, batch_size=8, samples=16, cap_share=0.2, repeats=1)
"""Setting of the quick form, which only shows that it works."""

SETTINGS = (
    Setting(network="alexnet", stored="jpeg", mbit=5, batch_size=32, samples=64),
    Setting(network="resnet18", stored="tensor", mbit=80, batch_size=32, samples=128, cap_share=0.5),
    Setting(network="densenet121", stored="jpeg", mbit=20, batch_size=32, samples=64),
    Setting(network="alexnet", stored="tensor", mbit=20, batch_size=64, samples=128),
    Setting(network="resnet18", stored="jpeg", mbit=20, batch_size=32, samples=96),
    Setting(network="densenet121", stored="tensor", mbit=80, batch_size=32, samples=64, server_speed=0.5),
    Setting(network="alexnet", stored="jpeg", mbit=80, batch_size=64, samples=256, server_speed=0.5),
    Setting(network="resnet18", stored="tensor", mbit=40, batch_size=64, samples=128, server_speed=0.5),
    Setting(network="densenet121", stored="tensor", mbit=None, batch_size=64, samples=128, cap_share=0.5),
    Setting(network="alexnet", stored="tensor", mbit=80, batch_size=32, samples=192, cap_share=0.5),
    Setting(network="resnet18", stored="jpeg", mbit=None, batch_size=64, samples=192),
    Setting(network="alexnet", stored="tensor", mbit=None, batch_size=32, samples=384, server_speed=0.5),
)
"""Settings, declared before any measurement. Their order lets a part of them cover all networks.

A core here is about a hundred times slower than the T4 of the papers, so 10 Mbit/s stands for their 1 Gbit/s.
"""


def measure(setting: Setting, records: Records, deadline: Deadline) -> None:
    """Run the missing parts of a setting: the plans, every legal cut once, and the finalists' repeats.

    Raises:
        TimeIsUp: If the deadline passes first.
    """
    with tempfile.TemporaryDirectory() as folder, Rig(setting, Path(folder)) as rig:
        deadline.check()
        rig.plan(records)
        found = Found(setting, records)
        for label in found.sweep_labels:
            run_once(rig, records, label, 0, deadline)
        labels = Found(setting, records).finalists
        for repeat in setting.measured:
            for label in labels:
                run_once(rig, records, label, repeat, deadline)


def main() -> None:
    command(
        __doc__,
        "plan_quality",
        SETTINGS,
        QUICK,
        found=Found,
        measure=measure,
        report=lambda found, name: report(found, POLICIES, name),
        plot=lambda found, path: plot(found, POLICIES, path),
    )


if __name__ == "__main__":
    main()
