"""Run `cold_start` on a store host and a compute host with a fresh process for every answer.

`Namespaces` is the measured setup: the project's Swift behind a link that `tc` shapes. `Local` shows within a
minute, and without root, that everything works: a directory as a bucket, on this host.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

from benchmarks.cold_start.peers import Peers
from benchmarks.cold_start.settings import Way
from benchmarks.harness import children
from benchmarks.harness.children import BORROW, ROOT, Failed, Lines, module_command, site_packages
from benchmarks.harness.hosts import Hosts, Side, last_lines
from benchmarks.harness.memory_group import memory_group
from benchmarks.harness.swift import run_swift
from benchmarks.harness.testbed import Testbed

STORE_CORE, ANSWER_CORE = 0, 1
RUN_LIMIT_S, PUBLISH_LIMIT_S = 600.0, 1800.0
READY_LIMIT_S, END_LIMIT_S = 60.0, 20.0
ACCOUNT, BUCKET = "cold", "models"
NO_LIMIT_BYTES = 1 << 50

PEAKS = ("memory.peak", "memory.max_usage_in_bytes")
"""Files with the peak memory of a control group, in version 2 and version 1. File pages that the group read
count."""


class Place(Protocol):
    """Hosts with a store.

    Attributes:
        bucket: Bucket of the store.
        options: Options by which both sides open it.
        writing: URI and options by which models are published.
    """

    bucket: str
    options: Mapping[str, str]
    writing: tuple[str, Mapping[str, str]]

    def popen_at(
        self, argv: Sequence[object], *, cores: int, near: bool, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process on this many cores, on the store's side if ``near``."""

    def end(self, process: subprocess.Popen[Any]) -> None:
        """End a process and its children."""

    def shape(self, rate: float | None) -> float | None:
        """Limit the link to these bytes per second on the wire; None for no limit.

        Returns:
            Measured payload bytes per second; None where there is no link.
        """


class Namespaces:
    """Two network namespaces and the project's Swift; needs root."""

    bucket: str
    options: Mapping[str, str]
    writing: tuple[str, Mapping[str, str]]

    def __enter__(self) -> Namespaces:
        with ExitStack() as stack:
            data = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="upriver-cold-swift-")))
            cores: dict[Side, int] = {"storage": STORE_CORE, "compute": ANSWER_CORE}
            self.over(stack.enter_context(Testbed(None, cores=cores)))
            swift = run_swift(self._bed, data, tenants=(ACCOUNT,), buckets=(f"{ACCOUNT}:{BUCKET}",))
            self.bucket, self.options = BUCKET, swift.options(ACCOUNT)
            self.writing = f"s3://{BUCKET}", self.options
            self._stack = stack.pop_all()
        return self

    def over(self, bed: Testbed) -> None:
        """Use a testbed whose link has not been measured."""
        self._bed, self._checked = bed, dict[float | None, float]()

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def popen_at(
        self, argv: Sequence[object], *, cores: int, near: bool, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process; see `Place`."""
        own = {ANSWER_CORE} if cores == 1 else {STORE_CORE, ANSWER_CORE}
        return self._bed.popen("storage" if near else "compute", argv, core=own, **options)

    def end(self, process: subprocess.Popen[Any]) -> None:
        """End a process; see `Place`."""
        self._bed.end(process)

    def shape(self, rate: float | None) -> float:
        """Limit the link; see `Place`.

        Raises:
            TestbedError: If the link does not carry that rate. The next call measures again.
        """
        if rate not in self._checked:
            self._checked.clear()
            self._bed.set_rate(rate)
            self._checked[rate] = self._bed.check().from_storage
        return self._checked[rate]


class Local(Hosts):
    """This host alone, with a directory as a bucket.

    Args:
        told: More arguments of `object_server`.
    """

    bucket: str
    options: Mapping[str, str]
    writing: tuple[str, Mapping[str, str]]

    def __init__(self, *told: object) -> None:
        super().__init__({}, {}, "")
        self._told = told

    def __enter__(self) -> Local:
        with ExitStack() as stack:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="upriver-cold-")))
            stack.callback(self.end_all)
            argv = module_command("harness.object_server", root, "--bucket", BUCKET, *self._told)
            server = self.popen_at(argv, cores=2, near=True, stdout=subprocess.PIPE, env=paths())
            said = Lines(server).next(READY_LIMIT_S)
            self.bucket = BUCKET
            self.options = {
                "endpoint": json.loads(said)["listening"],
                "region": "us-east-1",
                "anonymous": "true",
            }
            self.writing = root.as_uri(), {}  # the stand-in accepts no multipart uploads
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def popen_at(
        self, argv: Sequence[object], *, cores: int, near: bool, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process; see `Place`."""
        own = sorted(os.sched_getaffinity(0))[-cores:]
        env = {**os.environ, **options.pop("env", {})}
        process: subprocess.Popen[Any] = subprocess.Popen(
            ["taskset", "--cpu-list", ",".join(map(str, own)), *map(str, argv)],
            env=env,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **options,
        )
        self._processes.append(process)
        return process

    def shape(self, rate: float | None) -> None:
        """Accept no limit; see `Place`.

        Raises:
            Failed: If a limit is requested.
        """
        if rate is not None:
            raise Failed("there is no link to shape on one host")


def copied(folder: Path) -> Path:
    """Copy the current code, so that edits during a benchmark have no effect. Return the root of the copy."""
    for part in ("src", "benchmarks"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("results"))
    return folder


# ------------------------------------------------------------------------------------------------- jobs


class Jobs:
    """Start `job` processes, one at a time, and read their answers.

    Args:
        place: The hosts.
        peers: Their environment runs the ways of others.
        scratch: A folder on disk, for right answers, caches and files that ways download.
        code: Root of the ``src`` and ``benchmarks`` that the processes run.
    """

    def __init__(self, place: Place, peers: Peers, scratch: Path, code: Path = ROOT) -> None:
        self._place, self._peers, self._scratch, self._code = place, peers, scratch, code
        self.references = scratch / "references"
        self.references.mkdir()

    def shape(self, rate: float | None) -> float | None:
        """Limit the link; see `Place.shape`."""
        return self._place.shape(rate)

    def publish(self, model: str, forms: Sequence[str], calls: Collection[tuple[int, int]]) -> dict[str, Any]:
        """Publish a model to the store, from its side, in these forms.

        Args:
            model: Name of the model.
            forms: See ``settings.FORMS``.
            calls: Batch sizes and thread counts whose right answers are stored.
        """
        uri, options = self._place.writing
        spec: dict[str, Any] = {
            "do": "publish",
            "model": model,
            "forms": list(forms),
            "calls": sorted(calls),
            "uri": uri,
            "options": dict(options),
        }
        found = self._run(spec, cores=2, near=True, limit_s=PUBLISH_LIMIT_S)
        if "model.tensors" in forms:
            tensors = {**spec, "do": "tensors"}
            self._run(tensors, cores=2, near=True, peer=True, limit_s=PUBLISH_LIMIT_S)
        return found

    def ask(self, do: str, run: str, *, way: Way, cores: int, link: str, **spec: Any) -> dict[str, Any]:
        """Run one action of `job` in a fresh process, and return its answer.

        Args:
            do: The action.
            run: Name of the way, as in `settings.Setting.runs`.
            way: The same way.
            cores: Number of the process's cores.
            link: Key of the remembered link. It is shared by the same run with the same options alone.
            spec: ``model``, ``batch``, ``knob``, ``assign``.

        Raises:
            Failed: If the process fails.
        """
        whole = {"do": do, "run": run, "options": dict(self._place.options), **spec}
        cache = self._scratch / f"cache-{link}-{run}-{spec['knob']}"
        return self._run(whole, cores=cores, peer=bool(way.needs), cache=cache)

    def _run(
        self,
        spec: dict[str, Any],
        *,
        cores: int,
        near: bool = False,
        peer: bool = False,
        cache: Path | None = None,
        limit_s: float = RUN_LIMIT_S,
    ) -> dict[str, Any]:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=self._scratch))
            spec |= {
                "folder": spec["model"],
                "bucket": self._place.bucket,
                "scratch": folder,
                "references": str(self.references),
                "packages": site_packages(),
            }
            told = ["benchmarks.cold_start.job", json.dumps(spec)]
            argv = [self._peers.python, "-c", BORROW, *told] if peer else [sys.executable, "-m", *told]
            env = {**paths(self._code), "OMP_NUM_THREADS": str(cores)}
            env["UPRIVER_CACHE"] = str(cache or os.devnull)
            if peer:
                env |= for_amazon(self._place.options)
            errors = stack.enter_context(tempfile.TemporaryFile())
            group = stack.enter_context(memory_group("cold", NO_LIMIT_BYTES))
            spawned = time.monotonic()
            try:
                process = self._place.popen_at(
                    argv, cores=cores, near=near, stdout=subprocess.PIPE, stderr=errors, env=env, cwd=folder
                )  # Python searches the start folder first for peers' modules
                stack.callback(self._place.end, process)
                if group is not None:
                    with suppress(OSError):  # the process has ended; its output gives the reason
                        (group.path / "cgroup.procs").write_text(str(process.pid), encoding="ascii")
                found = _answered(process, spawned, limit_s)
            except (Failed, KeyError, ValueError, OSError) as error:
                said = os.pread(errors.fileno(), 1 << 16, 0).decode(errors="replace")
                raise Failed(f"{spec['do']} {spec.get('run', '')}: {error}{last_lines(said)}") from None
            try:
                process.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:  # its answer has arrived
                found["ended"] = False
            return found | (_peak(group.path) if group is not None else {})


def _answered(process: subprocess.Popen[Any], spawned: float, limit_s: float) -> dict[str, Any]:
    """Return the report of a process, with the moment of its answer if it gives one."""
    lines, answered_at = Lines(process), None
    if (line := lines.next(limit_s)) == b"answered":
        answered_at = time.monotonic()
        line = lines.next(limit_s)
    found: dict[str, Any] = json.loads(line)
    return found if answered_at is None else told(found, spawned, answered_at)


def told(found: Mapping[str, Any], spawned: float, answered_at: float) -> dict[str, Any]:
    """Return the report of a run, with its moments as seconds since its process was requested.

    Args:
        found: The report of ``job.run``.
        spawned: Time of the request for the process.
        answered_at: Time when the parent read the answer, by its own clock.
    """
    moments = {name: found[name] - spawned for name in ("imported", "callable", "answered", "whole")}
    rest = {name: value for name, value in found.items() if name not in moments}
    return {
        **rest,
        **{f"{name}_s": round(value, 4) for name, value in moments.items()},
        "total_s": round(answered_at - spawned, 4),
        "after_imports_s": round(moments["answered"] - moments["imported"], 4),
    }


def _peak(group: Path) -> dict[str, Any]:
    for name in PEAKS:
        with suppress(OSError, ValueError):
            return {"group_bytes": int((group / name).read_text(encoding="ascii")), "group_file": name}
    return {}


def for_amazon(options: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which Amazon's libraries, and libraries built on them, find the store."""
    return {
        "AWS_ENDPOINT_URL": options["endpoint"],
        "AWS_DEFAULT_REGION": options["region"],
        "AWS_REGION": options["region"],
        "AWS_ACCESS_KEY_ID": options.get("access_key_id", "none"),
        "AWS_SECRET_ACCESS_KEY": options.get("secret_access_key", "none"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    }


def paths(code: Path = ROOT) -> dict[str, str]:
    """Return the environment that finds the package and these modules, and downloads no models."""
    return {**children.paths(code), "HF_HUB_OFFLINE": "1"}
