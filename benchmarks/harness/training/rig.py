"""Share what the benchmarks of plans need: settings, data, records and the two hosts.

A benchmark declares `Setting`s, opens a `Rig` for one of them, and makes it run choices. A choice assigns the
samples of an epoch to cuts. Every run becomes one line of `Records`, so a benchmark can be ended at any
moment and resumes where it stopped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from benchmarks.harness.children import Child, Failed, ProcessLost, module_command, paths
from benchmarks.harness.code_version import code, commit, policies
from benchmarks.harness.photographs import CLASSES, write_photographs
from benchmarks.harness.records import (
    Deadline,
    Output,
    Records,
    command_line,
    exit_on_faults,
    until_time_is_up,
)
from benchmarks.harness.slowed import cpu_s, slowed
from benchmarks.harness.testbed import Testbed, TestbedError
from benchmarks.harness.training.plans import (
    LOADER,
    MEASURED,
    SWEPT,
    Setting,
    plan_key,
    run_key,
    run_of,
    shares_from,
)
from upriver.errors import ConfigError
from upriver.program.graph.devices import check_device

TENSOR_SHAPE = (3, 224, 224)
"""Shape of stored float tensors of 602,112 bytes, as in HAPI (2025). A ``.npy`` file adds a header of 128
bytes."""

CACHE = Path(tempfile.gettempdir()) / "upriver-benchmarks"
"""Folder for proofs of cuts, shared by all settings. Profiles are measured anew for each setting."""

RUN_LIMIT_S = 1800.0
START_LIMIT_S = 600.0


# --------------------------------------------------------------------------------------------------- data


def make_data(setting: Setting, folder: Path) -> None:
    """Write the stored samples of the setting in class folders. The samples are always the same."""
    if setting.stored == "jpeg":
        write_photographs(folder / "data", setting.samples, scale=setting.stored_scale)
        return
    for number in range(setting.samples):
        rng = np.random.default_rng([number, 1])
        place = folder / "data" / f"class{number % CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        np.save(place / f"{number:05}.npy", rng.standard_normal(TENSOR_SHAPE, dtype=np.float32))


# ---------------------------------------------------------------------------------------------- the hosts


class Rig:
    """Run the two hosts of a setting: store and server on one, and a training process on the other.

    Args:
        setting: The setting to measure.
        folder: An empty folder for the stored samples.
        hosts: Makes the testbed, given the rate of its link.

    Attributes:
        facts: Provenance that every record carries.
    """

    def __init__(
        self, setting: Setting, folder: Path, hosts: Callable[[float | None], Testbed] = Testbed
    ) -> None:
        self.setting, self._folder, self._hosts = setting, folder, hosts
        allowed = sorted(os.sched_getaffinity(0))
        self._cores = {"storage": allowed[: setting.cores], "compute": allowed[-setting.cores :]}
        self.facts = {"setting": setting.key, "commit": commit(), "code": code()}

    def __enter__(self) -> Rig:
        setting = self.setting
        with ExitStack() as stack:
            make_data(setting, self._folder)
            rate = None if setting.mbit is None else setting.mbit * 1e6 / 8
            bed = self._bed = stack.enter_context(self._hosts(rate))
            near = self._cores["storage"]
            computing = "--threads", setting.cores, "--device", setting.server_device
            server = bed.run_server({"default": self._folder.as_uri()}, *computing, core=near)
            objects = bed.run_objects(self._folder, core=near)
            spec = {"setting": asdict(setting), "url": server.url, "uri": objects.uri}
            bed.set_rate(None)  # frozen weights go to the store once, before any measurement
            self._child = self._begun("harness.training.job", spec | {"options": objects.options}, stack)
            self._ask({"do": "publish"}, START_LIMIT_S)
            stack.enter_context(slowed("server", server.process.pid, setting.server_speed))
            stack.enter_context(slowed("client", self._child.process.pid, setting.client_speed))
            bed.set_rate(rate)
            bed.check()
            self._sides = {
                "server": [server.process.pid],
                "storage": [server.process.pid, objects.process.pid],
                "compute": [self._child.process.pid],
            }
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def _begun(self, module: str, spec: Mapping[str, Any], stack: ExitStack) -> Child:
        """Start the process that trains, and wait until it is ready. It ends with the stack."""
        process = self._bed.popen(
            "compute",
            module_command(module, json.dumps(spec)),
            core=self._cores["compute"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**paths(), "UPRIVER_CACHE": str(CACHE)},
        )
        stack.callback(self._bed.end, process)
        child = Child(process, "the training process")
        child.answer(START_LIMIT_S)
        return child

    def plan(self, records: Records) -> None:
        """Record what every policy chooses, from one measurement by the running system.

        Nothing happens if the record exists. Runs by other code then no longer count. If only policies
        changed, they choose anew from the stored measurement, if one exists.
        """
        known = records.rows.get(plan_key(self.setting))
        same_code = known is not None and known["code"] == self.facts["code"]
        if known is not None and same_code and known.get("policies") == policies():
            return
        kept = known.get("measured") if known is not None and same_code else None
        planned = self._ask({"do": "plan", "measured": kept}, START_LIMIT_S)
        records.add(plan_key(self.setting), {**self.facts, "policies": policies(), **planned})

    def run(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Run one epoch. Return its seconds from the first request to the last step, and the link's bytes.

        The result also holds the compute seconds of the processes of each side, in seconds of a whole core:
        of the near-data server, of all processes on its side, and of training.

        Raises:
            Failed: If the run fails. The process is then ready for the next order.
        """
        self._ask(order, START_LIMIT_S)
        before, spent = self._bed.bytes_carried(), self._cpu_s()
        done = self._ask({"do": "go"}, RUN_LIMIT_S)
        carried, spent_now = self._bed.bytes_carried() - before, self._cpu_s()
        return {
            **done,
            "cpu_s": {side: round(spent_now[side] - spent[side], 2) for side in spent},
            "bytes_from_storage": carried.from_storage,
            "bytes_from_compute": carried.from_compute,
        }

    def _cpu_s(self) -> dict[str, float]:
        return {side: sum(map(cpu_s, pids)) for side, pids in self._sides.items()}

    def choice(self, label: str, *, swept: bool) -> dict[str, Any]:
        """Run one epoch of the labelled choice: of upriver, or of the plain loop.

        Args:
            label: Label of the choice.
            swept: Whether the loop only searches for its best form, on samples in another order.
        """
        if label.startswith(LOADER):
            workers, prefetch = map(int, label.removeprefix(LOADER).split("x"))
            order = {"do": "loader", "workers": workers, "prefetch": prefetch}
            return self.run(order | {"seed": SWEPT if swept else MEASURED})
        shares = {str(cut): share for cut, share in shares_from(label).items()}
        return self.run({"do": "run", "shares": shares})

    def _ask(self, order: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        return self._child.ask(limit_s, order)


def run_once(rig: Rig, records: Records, label: str, repeat: int, deadline: Deadline) -> None:
    """Execute one run unless it is recorded."""
    if run_of(records, rig.setting, label, repeat) is None:
        deadline.check()
        facts = {**rig.facts, "choice": label, "repeat": repeat}
        run = partial(rig.choice, label, swept=repeat == 0)
        record_run(records, run_key(rig.setting, label, repeat), facts, run)


def record_run(
    records: Records, key: str, facts: Mapping[str, Any], run: Callable[[], Mapping[str, Any]]
) -> None:
    """Execute a run and record it with some facts. A failed run is recorded with its error.

    Raises:
        ProcessLost: If the process has ended that runs it.
    """
    began, load = time.perf_counter(), round(os.getloadavg()[0], 2)
    row: Mapping[str, Any]
    try:
        row = run()
    except ProcessLost:
        raise
    except Failed as error:
        row = {"error": str(error)}
    records.add(key, {**facts, "load": load, **row})
    said = f"{row['seconds']:.2f} s" if "seconds" in row else row["error"]
    print(
        f"{key}: {said} ({time.perf_counter() - began:.0f} s with preparation)", file=sys.stderr, flush=True
    )


class Keyed(Protocol):
    """A setting of a benchmark."""

    @property
    def key(self) -> str:
        """Return a short key of everything that a run depends on."""


class Finding(Protocol):
    """The records of one setting."""

    @property
    def missing(self) -> str:
        """Return what has not run yet, or an empty text when nothing is left."""

    @property
    def not_counted(self) -> list[str]:
        """Return the runs that do not count, and why."""


AnySetting = TypeVar("AnySetting", bound=Keyed)
AnyFinding = TypeVar("AnyFinding", bound=Finding)


def command(
    description: str | None,
    name: str,
    settings: Sequence[AnySetting],
    quick: AnySetting,
    *,
    found: Callable[[AnySetting, Records], AnyFinding],
    measure: Callable[[AnySetting, Records, Deadline], None],
    report: Callable[[Sequence[AnyFinding], str], str],
    plot: Callable[[Sequence[AnyFinding], Path], None],
    turns: int = 1,
    replans: bool = True,
    devices: Mapping[str, tuple[Sequence[AnySetting], AnySetting]] | None = None,
) -> None:
    """Run the command line of a resumable benchmark: run what is missing, then report all records.

    Args:
        report: Returns the page on all settings, given the name of its files.
        plot: Draws the page's figure.
        turns: Passes over the settings, each of which may measure a part of what is missing.
        replans: Whether policies of other code may choose anew in a finished setting.
        devices: Settings and quick setting for each accelerator that ``--device`` may name.
    """
    parser = command_line(description, resumable=True)
    parser.add_argument("--only", nargs="+", default=[""], help="settings whose key contains one of these")
    parser.add_argument("--list", action="store_true", help="only list the settings and how far they are")
    if replans:
        parser.add_argument(
            "--replan", action="store_true", help="let the policies of today choose in finished settings, too"
        )
    if devices:
        devices = {"cpu": (settings, quick), **devices}
        parser.add_argument("--device", choices=devices, default="cpu", help="what one of the sides has")
    options = parser.parse_args()
    if devices and options.device != "cpu":
        (settings, quick), name = devices[options.device], f"{name}_{options.device}"
        if not options.report and not options.list:
            try:
                check_device(options.device)
            except ConfigError as error:
                print(f"skipped, nothing was measured: {error}")
                return
    output = Output.of(options, name)
    settings, records = (quick,) if options.quick else settings, output.records()
    if options.list:
        for setting in settings:
            print(f"{setting.key}: {found(setting, records).missing or 'finished'}")
        return
    if not options.report:
        deadline = Deadline(options.minutes)
        wanted = [setting for setting in settings if any(part in setting.key for part in options.only)]
        with until_time_is_up():
            for setting in [each for _ in range(turns) for each in wanted]:
                if getattr(options, "replan", False) or found(setting, records).missing:
                    try:
                        measure(setting, records, deadline)
                    except (TestbedError, Failed) as error:
                        sys.exit(f"error: {error}")
    every = [found(setting, records) for setting in settings]
    plot(every, output.path(".png"))
    output.write(report(every, output.name))
    exit_on_faults([line for one in every for line in one.not_counted])
