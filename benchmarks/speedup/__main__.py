"""Time an epoch by each policy's plan and in the plain way, and compare it with the bound.

Run ``python -m benchmarks.speedup`` as root. It may be ended at any moment: each run is a line of
``results/speedup.jsonl``, and the next start resumes there. ``--minutes 20`` ends it by itself; ``--report``
writes ``results/speedup.md`` and ``.png`` from the existing runs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.harness.records import Deadline, Records
from benchmarks.harness.training.plans import Setting
from benchmarks.harness.training.rig import Rig, command
from benchmarks.harness.training.ways import measure_ways
from benchmarks.speedup.report import Speeds, plot, report

QUICK = Setting(network="resnet18", mbit=None, batch_size=8, samples=16, cap_share=0.2, repeats=1)
"""Setting of the quick form, which only shows that it works."""

SETTINGS = (
    *(
        Setting(network=network, mbit=mbit, batch_size=32, samples=samples)
        for mbit, samples in ((5, 256), (20, 384), (80, 384), (None, 384))
        for network in ("alexnet", "resnet18")
    ),
    Setting(network="alexnet", mbit=20, batch_size=32, samples=384, client_speed=0.5),
    Setting(network="resnet18", mbit=20, batch_size=32, samples=384, client_speed=0.5),
    Setting(network="alexnet", mbit=20, batch_size=8, samples=384),
    Setting(network="alexnet", mbit=20, batch_size=32, samples=384, stored_scale=2),
    Setting(network="alexnet", mbit=20, batch_size=32, samples=192, stored_scale=8),
)
"""The settings vary the bandwidth, then halve the client's speed, then have a small training batch or larger
stored images.

An epoch has a dozen training steps: with fewer, filling and draining the pipeline alone would miss the goal.
"""


def measure(setting: Setting, records: Records, deadline: Deadline) -> None:
    """Run the missing parts of a setting: the plans, the loader's sweep, and all ways' repeats.

    Raises:
        TimeIsUp: If the deadline passes first.
    """
    with tempfile.TemporaryDirectory() as folder, Rig(setting, Path(folder)) as rig:
        measure_ways(Speeds, rig, records, deadline)


def main() -> None:
    command(__doc__, "speedup", SETTINGS, QUICK, found=Speeds, measure=measure, report=report, plot=plot)


if __name__ == "__main__":
    main()
