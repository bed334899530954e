"""Measure how soon a running job has the right plan after a link change, and whether it ignores jitter.

Run ``python -m benchmarks.link_change`` as root; it writes ``benchmarks/results/link_change.md``, ``--quick``
is a small form that shows nothing. A job with ``policy="upriver"`` trains over 200 Mbit/s. In the middle of
an epoch the link drops to 20 Mbit/s. Then other jobs train over links whose rate changes each second by up to
a fifth.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.children import Failed
from benchmarks.harness.netns import PAYLOAD_SHARE
from benchmarks.harness.records import Output, command_line, exit_on_faults
from benchmarks.harness.testbed import Testbed, TestbedError
from benchmarks.harness.training.plans import Setting
from benchmarks.harness.training.rig import RUN_LIMIT_S, START_LIMIT_S, Rig, make_data
from benchmarks.link_change.report import Change, Jitter, report, same_losses

AFTER_MBIT = 20.0
JITTER = 0.2
EVERY_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """The length of each part.

    Attributes:
        before: Steps before the link changes.
        after: Steps after it.
        jitter_s: Seconds over a link with jitter.
    """

    before: int
    after: int
    jitter_s: float


SETTING = Setting(network="resnet18", stored="tensor", mbit=200, batch_size=32, samples=768)
"""602 KB a sample are stored and 100 KB cross the freeze point. At 200 Mbit/s the two hosts share the work,
and a part of the samples crosses as it is stored. At 20 Mbit/s that part alone would take longer than all."""

LENGTH = Length(before=20, after=20, jitter_s=60)
QUICK = Setting(network="resnet18", mbit=200, batch_size=4, samples=32)
QUICK_LENGTH = Length(before=2, after=11, jitter_s=1.5)


class LinkRig(Rig):
    """The two hosts, with a training process that runs step by step.

    Args:
        setting: The setting to measure.
        folder: An empty folder for the stored samples.
        forgets: Whether each job measures as if no job had run before.
    """

    def __init__(self, setting: Setting, folder: Path, forgets: bool) -> None:
        super().__init__(setting, folder)
        self._forgets = forgets

    def __enter__(self) -> LinkRig:
        with ExitStack() as stack:
            make_data(self.setting, self._folder)
            bed = self._bed = stack.enter_context(Testbed(None))
            server = bed.run_server({"default": self._folder.as_uri()}, "--threads", 1)
            objects = bed.run_objects(self._folder)
            spec: dict[str, Any] = {"setting": asdict(self.setting), "url": server.url, "uri": objects.uri}
            spec |= {"options": objects.options, "forgets": self._forgets}
            self._child = self._begun("link_change.job", spec, stack)
            self._ask({"do": "publish"}, START_LIMIT_S)
            for mbit in (AFTER_MBIT, self.setting.mbit or 0.0):
                self.set_mbit(mbit)
                bed.check()
            self._stack = stack.pop_all()
        return self

    def set_mbit(self, mbit: float) -> None:
        """Set the rate of the link."""
        self._bed.set_rate(mbit * 1e6 / 8)

    def begin(self) -> None:
        """Start a new job, planned over the current link."""
        self._ask({"do": "begin", "replan": True}, START_LIMIT_S)

    def steps(self, **how_many: float) -> list[dict[str, Any]]:
        """Train the next steps: ``count`` of them, or for ``seconds``."""
        return list(self._ask({"do": "steps", **how_many}, RUN_LIMIT_S)["steps"])

    def judge(self, plans: Sequence[Any], mbit: float) -> dict[str, Any]:
        """Return the cost of the plans over a link with that rate."""
        bandwidth = mbit * 1e6 / 8 * PAYLOAD_SHARE
        return self._ask({"do": "judge", "plans": list(plans), "bandwidth": bandwidth}, START_LIMIT_S)

    @contextmanager
    def jitter(self, mbit: float) -> Iterator[None]:
        """Change the rate each second, by up to a fifth.

        Raises:
            TestbedError: From the end of the block: if the rate could not be changed.
        """
        over, draw = threading.Event(), random.Random(0)
        failed: list[Exception] = []

        def change() -> None:
            try:
                while not over.wait(EVERY_S):
                    self.set_mbit(mbit * draw.uniform(1 - JITTER, 1 + JITTER))
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=change)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        if failed:
            raise failed[0]


def undisturbed(rig: LinkRig, mbit: float, length: Length) -> list[dict[str, Any]]:
    """Run the same steps over a constant link."""
    rig.set_mbit(mbit)
    rig.begin()
    return rig.steps(count=length.before + length.after)


def changed(rig: LinkRig, mbit: float, length: Length) -> Change:
    """Run the steps while the link changes."""
    rig.set_mbit(mbit)
    rig.begin()
    steps = rig.steps(count=length.before)
    rig.set_mbit(AFTER_MBIT)
    steps += rig.steps(count=length.after)
    run = Change(steps=steps, at=length.before, judged={})
    return Change(steps=steps, at=length.before, judged=rig.judge(run.plans, AFTER_MBIT))


def jittered(rig: LinkRig, mbit: float, length: Length, anew: bool) -> Jitter:
    """Run with jitter after the plan has settled, and equally long without, in a new job or the last one."""
    rig.set_mbit(mbit)
    if anew:
        rig.begin()
    settling = rig.steps(count=length.before)
    steady = rig.steps(seconds=length.jitter_s)
    with rig.jitter(mbit):
        steps = rig.steps(seconds=length.jitter_s)
    return Jitter(mbit=mbit, settling=settling, steady=steady, steps=steps)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--network", help="another network than resnet18")
    options = parser.parse_args()
    setting, length = (QUICK, QUICK_LENGTH) if options.quick else (SETTING, LENGTH)
    if options.network:
        setting = Setting(**asdict(setting) | {"network": options.network})
    output = Output.of(options, "link_change", whole=setting.network == SETTING.network)
    mbit = setting.mbit or 0.0
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            LinkRig(setting, Path(folder), not options.quick) as rig,
        ):
            reference = undisturbed(rig, mbit, length)
            change = changed(rig, mbit, length)
            rates = (AFTER_MBIT,) if options.quick else (mbit, AFTER_MBIT)
            jitters = [jittered(rig, around, length, not options.quick) for around in rates]
    except (TestbedError, Failed) as error:
        sys.exit(f"error: {error}")
    text = report(setting, AFTER_MBIT, change, reference, jitters)
    output.write(text)
    same = same_losses(change.steps, reference)
    exit_on_faults([] if same else ["losses differ from those of the undisturbed run"])


if __name__ == "__main__":
    main()
