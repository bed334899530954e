"""Run `input_pipeline` on a trainer's host and a worker's host, with a link between them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import netns
from benchmarks.harness.children import BORROW, Child, Failed, module_command, paths, site_packages
from benchmarks.harness.slowed import cpu_s
from benchmarks.harness.testbed import Service, Testbed, burst_for
from benchmarks.input_pipeline.model import EPOCHS
from benchmarks.input_pipeline.workloads import CLASSES, DISK_VARIABLE, MODULE, WORKLOADS

TRAINER_CORE, WORKER_CORE = 0, 1
START_LIMIT_S, EPOCH_LIMIT_S, PEER_LIMIT_S = 300.0, 600.0, 900.0
MBIT = 1e6 / 8
TENTHS = tuple(number / 10 for number in range(1, 11))

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One cell of the benchmark.

    Attributes:
        workload: One of ``workloads.WORKLOADS``.
        stall: Share of a step that the trainer waits without offloading; 0 where it never does.
        mbit: Rate of the link; None for no limit.
        disk_mbit: Rate at which the worker reads stored files; None for that of this machine.
        batch_scale: Batches have this share of the workload's samples.
        batches: Batches of an epoch.
        repeats: Epochs of each way that count.
        most_learning: Most epochs in which a policy may reach its decision.
        ratios: Ratios to try for a candidate.
        peers: Other systems that run it, too.
    """

    workload: str
    stall: float
    mbit: float | None = None
    disk_mbit: float | None = None
    batch_scale: float = 1.0
    batches: int = 100
    repeats: int = 5
    most_learning: int = 48
    ratios: tuple[float, ...] = TENTHS
    peers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.workload not in WORKLOADS:
            raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, got {self.workload!r}")
        if not 0 <= self.stall < 1:
            raise ValueError(f"stall must lie in 0..1, got {self.stall}")

    @property
    def key(self) -> str:
        """Return a short key of everything that a run depends on."""
        parts = [
            self.workload,
            f"stall{self.stall:.0%}",
            "unshaped" if self.mbit is None else f"{self.mbit:g}Mbit",
            *([] if self.disk_mbit is None else [f"disk{self.disk_mbit:g}Mbit"]),
            f"n{self.batches}x{self.batch_size}x{self.repeats}",
        ]
        return "-".join(parts)

    @property
    def batch_size(self) -> int:
        """Return the samples of a batch."""
        return round(self.batch_scale * WORKLOADS[self.workload].batch_size)

    @property
    def samples(self) -> int:
        """Return the samples of an epoch."""
        return self.batches * self.batch_size

    def with_peers(self, *names: str) -> Setting:
        """Return the setting with these other systems."""
        return replace(self, peers=names)


class Bed(Testbed):
    """The trainer's host and the worker's, with a worker in it.

    Args:
        setting: Gives the rates of the link and of the worker's disk.
        root: Folder of the stored files.

    Attributes:
        worker: The ``upriver worker``.
        disk: Environment of the worker's host for a slow disk.
    """

    def __init__(self, setting: Setting, root: Path) -> None:
        rate = None if setting.mbit is None else setting.mbit * MBIT
        super().__init__(rate, cores={"compute": TRAINER_CORE, "storage": WORKER_CORE})
        self._setting, self._root = setting, root
        self.disk: dict[str, str] = {}

    def __enter__(self) -> Bed:
        super().__enter__()
        try:
            if self._setting.disk_mbit is not None:
                objects = self.run_objects(self._root)
                self._slow_down(self._setting.disk_mbit * MBIT)
                self.disk = {DISK_VARIABLE: f"{objects.url}/store"}
            self.worker: Service = self._serve(
                "storage",
                [sys.executable, "-m", "upriver", "worker", "--allow", MODULE, "--workers", 1],
                "/readyz",
                core=None,
                env={**paths(), **self.disk},
                timeout_s=START_LIMIT_S,
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def _slow_down(self, rate: float) -> None:
        """Shape the ``lo`` of the worker's host, which carries only that host's traffic to itself."""
        name, burst = self._names["storage"], burst_for(rate)
        segments = netns.segments_for(burst)
        netns.command(
            "ip", "-n", name, "link", "set", "lo", "mtu", str(netns.MTU), "gso_max_segs", str(segments)
        )
        shape = ("tbf", "rate", f"{round(8 * rate)}bit", "burst", str(burst), "latency", "50ms")
        netns.command("tc", "-n", name, "qdisc", "replace", "dev", "lo", "root", *shape)


class Job:
    """Run a process that trains to order on the trainer's host; see `job`.

    Args:
        bed: The hosts, with the worker.
        setting: The setting.
        root: Folder of the stored files.
        cache: An empty folder, for what is stored between runs.
    """

    def __init__(self, bed: Bed, setting: Setting, root: Path, cache: Path) -> None:
        self._bed = bed
        spec = {
            "workload": setting.workload,
            "root": str(root),
            "samples": setting.samples,
            "batch_size": setting.batch_size,
            "url": bed.worker.url,
            "cache": str(cache),
        }
        process = bed.popen(
            "compute",
            module_command("input_pipeline.job", json.dumps(spec)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=paths(),
        )
        self._child = Child(process, "the training process")
        self._child.answer(START_LIMIT_S)

    def open(self, way: str, *, num_workers: int) -> None:
        """Make a way's loader, unless it exists."""
        self._ask({"do": "open", "way": way, "num_workers": num_workers})

    def epoch(self, way: str, *, number: int, wait_s: float) -> dict[str, Any]:
        """Train one epoch; see ``job.Trainer.epoch``. Add the CPU seconds and bytes of both hosts.

        Raises:
            Failed: If the training fails.
        """
        sides = {"trainer": self._child.process.pid, "worker": self._bed.worker.process.pid}
        spent = {side: cpu_s(pid) for side, pid in sides.items()}
        before = self._bed.bytes_carried()
        order = {"do": "epoch", "way": way, "number": number, "wait_s": wait_s}
        found = self._ask(order)
        carried = self._bed.bytes_carried() - before
        return {
            **found,
            "cpu_s": {side: round(cpu_s(pid) - spent[side], 3) for side, pid in sides.items()},
            "to_worker": carried.from_compute,
            "from_worker": carried.from_storage,
        }

    def one_pass(self, way: str, *, num_workers: int, wait_s: float) -> dict[str, Any]:
        """Train several epochs; see ``job.Trainer.one_pass``."""
        return self._ask({"do": "one_pass", "way": way, "num_workers": num_workers, "wait_s": wait_s})

    def close(self, way: str) -> None:
        """Close a way's loader."""
        self._ask({"do": "close", "way": way})

    def end(self) -> None:
        """End the process."""
        self._bed.end(self._child.process)

    def _ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        return self._child.ask(EPOCH_LIMIT_S, order)


def peer(bed: Bed, name: str, python: Path, setting: Setting, root: Path, wait_s: float) -> dict[str, Any]:
    """Run another system with a child on each host. The trainer's child prints the result.

    Args:
        bed: The hosts.
        name: Name in its module, ``peer_NAME``.
        python: Interpreter of an environment that has it.
        setting: The setting.
        root: Folder of the stored files.
        wait_s: The accelerator's time for a batch.

    Raises:
        Failed: If a child fails. The text holds the last lines of its output.
    """
    spec = {
        **asdict(setting),
        "samples": setting.samples,
        "batch_size": setting.batch_size,
        "root": str(root),
        "wait_s": wait_s,
        "addresses": dict(bed.addresses),
        "packages": site_packages(),
    }
    script, before = f"benchmarks.input_pipeline.peer_{name}", bed.bytes_carried()
    other = bed.popen(
        "storage",
        [python, "-c", BORROW, script, "worker", json.dumps(spec)],
        env={**paths(), **QUIET, **bed.disk},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        done = bed.run(
            "compute",
            [python, "-c", BORROW, script, "trainer", json.dumps(spec)],
            timeout_s=PEER_LIMIT_S,
            env={**paths(), **QUIET},
        )
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (netns.TestbedError, ValueError, IndexError) as error:
        raise Failed(f"{name}: {error}") from None
    finally:
        bed.end(other)
    if found["targets"] != (wanted := targets(setting, EPOCHS)):
        raise Failed(f"{name}: of the classes there were {found['targets']} samples, not {wanted}")
    carried = bed.bytes_carried() - before
    return {**found, "to_worker": carried.from_compute, "from_worker": carried.from_storage}


def targets(setting: Setting, epochs: int) -> list[int]:
    """Return the number of samples of each class in that many epochs."""
    return [epochs * len(range(target, setting.samples, CLASSES)) for target in range(CLASSES)]
