"""Share what the benchmarks of plans need: settings, data, records and the two hosts.

A benchmark declares `Setting`s, opens a `Rig` for one of them, and makes it run choices. A choice assigns the
samples of an epoch to cuts. Every run becomes one line of `Records`, so a benchmark can be ended at any
moment and resumes where it stopped.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from benchmarks.harness.children import module_command, paths
from benchmarks.harness.code_version import code, commit, policies
from benchmarks.harness.reports import RESULTS
from benchmarks.harness.slowed import cpu_s, slowed
from benchmarks.harness.testbed import Testbed, TestbedError
from benchmarks.split_overhead.__main__ import NETWORKS

JPEG_BYTES = 110_000
"""Mean size of an image in HAPI (2022)."""

TENSOR_SHAPE = (3, 224, 224)
"""Shape of stored float tensors of 602,112 bytes, as in HAPI (2025). A ``.npy`` file adds a header of 128
bytes."""

PIXELS = (500, 375)
"""Width and height of a stored image: the mean of ImageNet's."""

CACHE = Path(tempfile.gettempdir()) / "upriver-benchmarks"
"""Folder for proofs of cuts, shared by all settings. Profiles are measured anew for each setting."""

CLASSES = 10
TOLERANCE = 0.05
"""Relative size tolerance of a stored image: the effect of one step of the JPEG quality."""

RUN_LIMIT_S = 1800.0
START_LIMIT_S = 600.0

LOADER = "loader "
"""Prefix of the plain loop's label. ``loader 1x2`` has one worker and a prefetch factor of 2."""

MEASURED, SWEPT = 0, 1
"""Seeds of the order of samples: of the measured runs, and of the plain loop's sweep."""

Shares = Mapping[int, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One cell of a benchmark.

    Attributes:
        network: One of ``split_overhead.NETWORKS``, frozen as there.
        stored: ``jpeg`` or ``tensor``.
        mbit: Rate of the link; None for no limit.
        batch_size: Samples of a training step.
        samples: Samples of an epoch.
        server_speed: Share of its core that the near-data server gets.
        client_speed: Share of its core that the training process gets.
        cap_share: Compute memory, from 0 (the need of the smallest cut) to 1 (of the largest); None: no cap.
        stored_scale: Factor on the bytes and pixels of stored images.
    """

    network: str
    stored: str = "jpeg"
    mbit: float | None
    batch_size: int
    samples: int
    server_speed: float = 1.0
    client_speed: float = 1.0
    cap_share: float | None = None
    stored_scale: int = 1

    def __post_init__(self) -> None:
        if self.network not in NETWORKS:
            raise ValueError(f"network must be one of {', '.join(NETWORKS)}, got {self.network!r}")
        if self.stored not in ("jpeg", "tensor") or (self.stored == "tensor" and self.stored_scale != 1):
            raise ValueError(f"stored must be jpeg or tensor, and a tensor has one size, got {self.stored!r}")
        if self.mbit is not None and not 0.1 <= self.mbit <= 2000:
            raise ValueError(f"mbit must be None or lie in 0.1..2000, got {self.mbit}")
        if self.batch_size < 1 or self.samples % self.batch_size or self.samples < 2 * self.batch_size:
            raise ValueError(f"samples must be two or more whole training batches, got {self.samples}")
        for name in ("server_speed", "client_speed"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in (0, 1], got {getattr(self, name)}")
        if self.cap_share is not None and not 0 <= self.cap_share < 1:
            raise ValueError(f"cap_share must be None or lie in [0, 1), got {self.cap_share}")

    @property
    def key(self) -> str:
        """Return a short key of everything that a run depends on."""
        parts = [
            self.network,
            self.stored + (f"x{self.stored_scale}" if self.stored_scale > 1 else ""),
            "unshaped" if self.mbit is None else f"{self.mbit:g}Mbit",
            f"batch{self.batch_size}",
            f"n{self.samples}",
        ]
        for name, speed in (("server", self.server_speed), ("client", self.client_speed)):
            parts += [f"{name}{speed:g}"] if speed != 1 else []
        return "-".join(parts + ([f"cap{self.cap_share:g}"] if self.cap_share is not None else []))


def label_of(shares: Shares) -> str:
    """Return the label of a choice in the records: ``4``, or ``-3:0.25,4:0.75``."""
    if len(shares) == 1:
        return str(next(iter(shares)))
    return ",".join(f"{cut}:{share!r}" for cut, share in sorted(shares.items()))


def shares_from(label: str) -> dict[int, float]:
    """Return the choice with this label."""
    if ":" not in label:
        return {int(label): 1.0}
    pairs = (part.split(":") for part in label.split(","))
    return {int(cut): float(share) for cut, share in pairs}


# ------------------------------------------------------------------------------------------------ records


class Records:
    """JSON lines, one per run, written as the runs finish.

    A last line that the end of a process truncated is dropped.

    Attributes:
        rows: Records by key.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}
        data = path.read_bytes() if path.exists() else b""
        self._whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[: self._whole].splitlines(), start=1):
            try:
                row = json.loads(line)
                self.rows[row["key"]] = row
            except (ValueError, KeyError, TypeError):
                raise SystemExit(f"{path}, line {number}: not a record; remove the line") from None

    def __contains__(self, key: object) -> bool:
        return key in self.rows

    def add(self, key: str, row: Mapping[str, Any]) -> None:
        """Store the record of a run."""
        record = {"key": key, **row}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.truncate(self._whole)  # removes the rest of a truncated line
            file.seek(0, os.SEEK_END)
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            self._whole = file.tell()
        self.rows[key] = record


class TimeIsUp(Exception):
    """Error for a benchmark whose time limit has passed."""


class Deadline:
    """End a benchmark between two runs."""

    def __init__(self, minutes: float | None) -> None:
        self._until = math.inf if minutes is None else time.monotonic() + 60 * minutes

    def check(self) -> None:
        """Check the deadline between two runs.

        Raises:
            TimeIsUp: If no further run may begin.
        """
        if time.monotonic() >= self._until:
            raise TimeIsUp


def short(label: str | None) -> str:
    """Format a choice for a narrow column, with shares in per cent."""
    if label is None or ":" not in label:
        return label or "does not fit"
    pairs = (part.split(":") for part in label.split(","))
    return " + ".join(f"{float(share):.0%} at {cut}" for cut, share in pairs)


def plan_key(setting: Setting) -> str:
    """Return the key of the record that holds every policy's choice."""
    return f"{setting.key}|plan"


def run_key(setting: Setting, label: str, repeat: int) -> str:
    """Return the key of a run. Repeat 0 belongs to the sweep."""
    return f"{setting.key}|{label}|{repeat}"


def run_of(records: Records, setting: Setting, label: str, repeat: int) -> dict[str, Any] | None:
    """Return the record of a run, or None if no run has the code version of the setting's plans."""
    plan, row = records.rows.get(plan_key(setting)), records.rows.get(run_key(setting, label, repeat))
    return row if plan is not None and row is not None and row["code"] == plan["code"] else None


# --------------------------------------------------------------------------------------------------- data


def make_data(setting: Setting, folder: Path) -> None:
    """Write the stored samples of the setting in class folders. The samples are always the same."""
    for number in range(setting.samples):
        rng = np.random.default_rng([number, setting.stored_scale])
        place = folder / "data" / f"class{number % CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        if setting.stored == "tensor":
            np.save(place / f"{number:05}.npy", rng.standard_normal(TENSOR_SHAPE, dtype=np.float32))
        else:
            image = jpeg(rng, scale=setting.stored_scale)
            (place / f"{number:05}.jpg").write_bytes(image)


def jpeg(rng: np.random.Generator, *, scale: int = 1) -> bytes:
    """Return a picture of soft patches and grain, at the quality that brings it nearest to its size."""
    width, height = (round(side * math.sqrt(scale)) for side in PIXELS)
    patches = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((width, height))
    grain = rng.normal(0, 12, (height, width, 1)) + rng.normal(0, 4, (height, width, 3))
    picture = Image.fromarray(np.clip(np.asarray(patches) + grain, 0, 255).astype(np.uint8))
    wanted, low, high = JPEG_BYTES * scale, 30, 98
    while low < high:  # finds the first quality that reaches the size
        middle = (low + high) // 2
        low, high = (low, middle) if len(_encoded(picture, middle)) >= wanted else (middle + 1, high)
    tried = [_encoded(picture, quality) for quality in (low - 1, low)]
    return min(tried, key=lambda data: abs(len(data) - wanted))


def _encoded(picture: Image.Image, quality: int) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=quality)
    return stream.getvalue()


# ---------------------------------------------------------------------------------------------- the hosts


class RunFailed(Exception):
    """Error for an order that the training process could not execute."""


class Rig:
    """Run the two hosts of a setting: store and server on one, and a training process on the other.

    Args:
        setting: The setting to measure.
        folder: An empty folder for the stored samples.

    Attributes:
        facts: Provenance that every record carries.
    """

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting, self._folder = setting, folder
        self.facts = {"setting": setting.key, "commit": commit(), "code": code()}

    def __enter__(self) -> Rig:
        setting = self.setting
        with ExitStack() as stack:
            make_data(setting, self._folder)
            rate = None if setting.mbit is None else setting.mbit * 1e6 / 8
            bed = self._bed = stack.enter_context(Testbed(rate))
            server = bed.run_server({"default": self._folder.as_uri()}, "--threads", 1)
            objects = bed.run_objects(self._folder)
            spec = {"setting": asdict(setting), "url": server.url, "uri": objects.uri}
            self._child = bed.popen(
                "compute",
                module_command("harness.planned_job", json.dumps(spec | {"options": objects.options})),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**paths(), "UPRIVER_CACHE": str(CACHE)},
            )
            self._rest = b""
            stack.callback(self._end_child)
            bed.set_rate(None)  # frozen weights go to the store once, before any measurement
            self._answer(START_LIMIT_S)
            self._ask({"do": "publish"}, START_LIMIT_S)
            stack.enter_context(slowed("server", server.process.pid, setting.server_speed))
            stack.enter_context(slowed("client", self._child.pid, setting.client_speed))
            bed.set_rate(rate)
            bed.check()
            self._sides = {
                "server": [server.process.pid],
                "storage": [server.process.pid, objects.process.pid],
                "compute": [self._child.pid],
            }
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def _end_child(self) -> None:
        self._bed.end(self._child)

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
            RunFailed: If the run fails. The process is then ready for the next order.
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
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(order).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise SystemExit("the training process has ended") from None
        return self._answer(limit_s)

    def _answer(self, limit_s: float) -> dict[str, Any]:
        assert self._child.stdout is not None
        descriptor, until = self._child.stdout.fileno(), time.monotonic() + limit_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
            data = os.read(descriptor, 1 << 16) if ready else b""
            if not data:
                raise SystemExit("the training process " + ("has ended" if ready else "does not answer"))
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RunFailed(answer["error"])
        return answer


def run_once(rig: Rig, records: Records, label: str, repeat: int, deadline: Deadline) -> None:
    """Execute one run unless it is recorded. A failed run is recorded with its error."""
    key = run_key(rig.setting, label, repeat)
    if run_of(records, rig.setting, label, repeat) is not None:
        return
    deadline.check()
    began, load = time.perf_counter(), round(os.getloadavg()[0], 2)
    row: dict[str, Any]
    try:
        row = rig.choice(label, swept=repeat == 0)
    except RunFailed as error:
        row = {"error": str(error)}
    records.add(key, {**rig.facts, "load": load, "choice": label, "repeat": repeat, **row})
    said = f"{row['seconds']:.2f} s" if "seconds" in row else row["error"]
    print(
        f"{key}: {said} ({time.perf_counter() - began:.0f} s with preparation)", file=sys.stderr, flush=True
    )


def why_not_valid(row: Mapping[str, Any], reference: str) -> str:
    """Return why a run does not count, or an empty text if it does."""
    if "error" in row:
        return f"failed: {row['error']}"
    if row["digest"] != reference:
        return "other losses or samples"
    return str(row.get("misplaced", ""))


def spread_of(values: Sequence[float]) -> float:
    """Return half the range over the median: the spread of the repeats of one figure."""
    return (max(values) - min(values)) / 2 / float(np.median(values))


class Finding(Protocol):
    """The records of one setting."""

    @property
    def missing(self) -> str:
        """Return what has not run yet, or an empty text when nothing is left."""


def command(
    description: str | None,
    name: str,
    settings: Sequence[Setting],
    quick: Setting,
    *,
    found: Callable[[Setting, Records], Finding],
    measure: Callable[[Setting, Records, Deadline], None],
    write: Callable[[Sequence[Setting], Records, Path, str], str],
) -> None:
    """Run the command line of a resumable benchmark: run what is missing, then report all records."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--minutes", type=float, help="begin no further run after so many")
    parser.add_argument("--only", nargs="+", default=[""], help="settings whose key contains one of these")
    parser.add_argument("--quick", action="store_true", help="one small setting that says nothing")
    parser.add_argument("--list", action="store_true", help="only list the settings and how far they are")
    parser.add_argument(
        "--replan", action="store_true", help="let the policies of today choose in finished settings, too"
    )
    parser.add_argument("--report", action="store_true", help="only write the report from what is there")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where records and report lie")
    options = parser.parse_args()
    settings, name = ((quick,), f"{name}_quick") if options.quick else (settings, name)
    records = Records(options.out / f"{name}.jsonl")
    if options.list:
        for setting in settings:
            print(f"{setting.key}: {found(setting, records).missing or 'finished'}")
        return
    if not options.report:
        deadline = Deadline(options.minutes)
        try:
            for setting in settings:
                wanted = any(part in setting.key for part in options.only)
                if wanted and (options.replan or found(setting, records).missing):
                    measure(setting, records, deadline)
        except TimeIsUp:
            print("time is up; the next start goes on from here", file=sys.stderr)
        except (TestbedError, RunFailed) as error:
            sys.exit(f"error: {error}")
    print(write(settings, records, options.out, name))
