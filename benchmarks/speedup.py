"""How long does an epoch take, by each policy's plan and the plain way, and how far is that from the bound?

Run ``python benchmarks/speedup.py`` as root; it may be ended at any moment: each run is a line of
``results/speedup.jsonl``, and the next start goes on from there. ``--minutes 20`` ends it by itself;
``--report`` writes ``results/speedup.md`` and ``.png`` from what is there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from _planned import Deadline, Records, Rig, Setting, command, run_once
from _speedup_report import REPEATS, SWEEP, Speeds, plot, report

QUICK = Setting(network="alexnet", mbit=20, batch_size=32, samples=64)
"""To see that it works."""

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
"""Over bandwidth; then the client's speed halved, a small training batch, and larger stored images.

A dozen training steps an epoch: in fewer, filling and draining the pipeline alone would miss the goal.
"""


def measure(setting: Setting, records: Records, deadline: Deadline) -> None:
    """Whatever of a setting is not there yet: the plans, the loader's sweep, and everybody's repeats.

    Raises:
        TimeIsUp: If the deadline comes first.
    """
    with tempfile.TemporaryDirectory() as folder, Rig(setting, Path(folder)) as rig:
        deadline.check()
        rig.plan(records)
        for label in (Speeds(setting, records).unsplit, *SWEEP):
            run_once(rig, records, label, 0, deadline)
        labels = Speeds(setting, records).labels
        for repeat in range(1, REPEATS + 1):
            for label in labels:
                run_once(rig, records, label, repeat, deadline)


def write(settings: Sequence[Setting], records: Records, folder: Path, name: str) -> str:
    """The report's two files; what the page says."""
    found = [Speeds(setting, records) for setting in settings]
    text = report(found, name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    plot(found, folder / f"{name}.png")
    return text


def main() -> None:
    command(__doc__, "speedup", SETTINGS, QUICK, found=Speeds, measure=measure, write=write)


if __name__ == "__main__":
    main()
