"""Time epochs where one side computes much faster than the other, and compare plans with both extremes.

The claim: with a fast trainer and a slow server, or the reverse, an epoch by upriver's plan takes at most
1.05 times the better of two extremes. These are the plain way and all frozen work on the server. Where the
cost model predicts a gain of 5 % over both, the plan is ahead of both.

Run ``python -m benchmarks.device_mix`` as root. Shares of a core stand for the speeds. It takes about
25 minutes and may be ended at any moment: each run is a line of ``results/device_mix.jsonl``, and the next
start resumes there. ``--minutes 20`` ends it by itself; ``--report`` writes ``results/device_mix.md`` and
``.png`` from the existing runs.

``--device cuda`` measures with an accelerator on one side and processors on the other, both ways, and writes
``device_mix_cuda``. Settings without a limit of the link come first and need no rights. ``--minutes 8`` keeps
it under ten minutes. Without an accelerator it says so, and measures nothing.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.device_mix.report import Mix, plot, report
from benchmarks.harness.records import Deadline, Records
from benchmarks.harness.testbed import Testbed, Unavailable
from benchmarks.harness.training.loopback import Loopback
from benchmarks.harness.training.plans import Setting
from benchmarks.harness.training.rig import Rig, command
from benchmarks.harness.training.ways import measure_ways

QUICK = Setting(network="small", mbit=None, batch_size=8, samples=16, client_speed=0.5, repeats=1)
"""Setting of the quick form, which only shows that it works."""

SLOW_SERVER, SLOW_TRAINER = 0.2, 0.25
"""Shares of a core."""

SETTINGS = tuple(
    Setting(
        network=network,
        mbit=mbit,
        batch_size=16,
        samples=96,
        server_speed=server,
        client_speed=client,
        repeats=3,
    )
    for mbit in (200, 20)
    for network in ("resnet18", "vit_tiny")
    for server, client in ((SLOW_SERVER, 1.0), (1.0, SLOW_TRAINER))
)
"""Two links, two networks and both mixes."""

QUICK_CUDA = Setting(
    network="small", mbit=None, batch_size=8, samples=16, client_device="cuda", cores=2, repeats=1
)

SETTINGS_CUDA = tuple(
    Setting(
        network=network,
        mbit=mbit,
        batch_size=32,
        samples=384,
        server_device=server,
        client_device=client,
        cores=4,
        repeats=3,
    )
    for mbit in (None, 200)
    for network in ("resnet18", "vit_b_16")
    for server, client in (("cpu", "cuda"), ("cuda", "cpu"))
)
"""The accelerator on either side, first without a limit of the link, which needs no network namespaces."""


def measure(setting: Setting, records: Records, deadline: Deadline) -> None:
    """Run the missing parts of a setting: the plans, the loader's sweep, and all ways' repeats.

    Raises:
        TimeIsUp: If the deadline passes first.
    """
    deadline.check()
    hosts = Loopback if setting.mbit is None and not setting.one_device else Testbed
    try:
        with tempfile.TemporaryDirectory() as folder, Rig(setting, Path(folder), hosts) as rig:
            measure_ways(Mix, rig, records, deadline)
    except Unavailable as error:
        if setting.one_device:
            raise
        print(f"{setting.key}: skipped: {error}", file=sys.stderr)


def main() -> None:
    command(
        __doc__,
        "device_mix",
        SETTINGS,
        QUICK,
        found=Mix,
        measure=measure,
        report=report,
        plot=plot,
        devices={"cuda": (SETTINGS_CUDA, QUICK_CUDA)},
    )


if __name__ == "__main__":
    main()
