"""Where `cold_start.py` runs: a store on one host, on the other a fresh process for every answer.

`Namespaces` is what is measured: the project's Swift behind a link that `tc` shapes. `Local` shows in a
minute, and without being root, that everything works: a directory as a bucket, on this host.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

from _common import ROOT
from _hosts import Hosts, last_lines
from _server_watch import memory_group
from _swift import run_swift
from cold_settings import WAYS, Way
from input_bed import BORROW, Failed
from testbed import Testbed

STORE_CORE, ANSWER_CORE = 0, 1
RUN_LIMIT_S, PUBLISH_LIMIT_S = 600.0, 1800.0
READY_LIMIT_S = 60.0
ACCOUNT, BUCKET = "cold", "models"
NO_LIMIT_BYTES = 1 << 50

PEAKS = ("memory.peak", "memory.max_usage_in_bytes")
"""The most that a control group has had, in version 2 and version 1; file pages that it brought in count."""

VARIABLE = "UPRIVER_BENCHMARK_COLD_PEERS"
PACKAGES = (
    "torch==2.13.0",
    "boto3",
    "safetensors",
    "runai-model-streamer[s3]==0.17.0",
    "tensorizer==2.12.1",
    "s3torchconnector==1.5.0",
)

_here = Path(__file__).resolve().parent


class Place(Protocol):
    """Hosts with a store.

    Attributes:
        bucket: Of the store.
        options: By which both sides open it.
        writing: URI and options by which models are published.
    """

    bucket: str
    options: Mapping[str, str]
    writing: tuple[str, Mapping[str, str]]

    def popen_at(
        self, argv: Sequence[object], *, cores: int, near: bool, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process on so many cores, on the store's side if ``near``."""

    def end(self, process: subprocess.Popen[Any]) -> None:
        """End it and its children."""

    def shape(self, rate: float | None) -> None:
        """Let the link carry so many bytes per second; None for no limit."""


class Namespaces:
    """Two network namespaces and the project's Swift; needs root."""

    def __enter__(self) -> Namespaces:
        with ExitStack() as stack:
            data = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="upriver-cold-swift-")))
            cores = {"storage": STORE_CORE, "compute": ANSWER_CORE}
            self._bed = stack.enter_context(Testbed(None, cores=cores))
            swift = run_swift(self._bed, data, tenants=(ACCOUNT,), buckets=(f"{ACCOUNT}:{BUCKET}",))
            self.bucket, self.options = BUCKET, swift.options(ACCOUNT)
            self.writing = f"s3://{BUCKET}", self.options
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def popen_at(
        self, argv: Sequence[object], *, cores: int, near: bool, **options: Any
    ) -> subprocess.Popen[Any]:
        """See `Place`."""
        own = {ANSWER_CORE} if cores == 1 else {STORE_CORE, ANSWER_CORE}
        return self._bed.popen("storage" if near else "compute", argv, core=own, **options)

    def end(self, process: subprocess.Popen[Any]) -> None:
        """See `Place`."""
        self._bed.end(process)

    def shape(self, rate: float | None) -> None:
        """See `Place`; measures what the link carries then."""
        if rate != self._bed.rate:
            self._bed.set_rate(rate)
            self._bed.check()


class Local(Hosts):
    """This host alone, with a directory as a bucket."""

    def __init__(self) -> None:
        super().__init__({}, {}, "")

    def __enter__(self) -> Local:
        with ExitStack() as stack:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="upriver-cold-")))
            stack.callback(self.end_all)
            argv = [sys.executable, _here / "object_server.py", root, "--bucket", BUCKET]
            server = self.popen_at(argv, cores=2, near=True, stdout=subprocess.PIPE, env=paths())
            said = Lines(server).line(READY_LIMIT_S)
            self.bucket = BUCKET
            self.options = {
                "endpoint": json.loads(said)["listening"],
                "region": "us-east-1",
                "anonymous": "true",
            }
            self.writing = root.as_uri(), {}  # the stand-in takes no object in parts
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def popen_at(
        self, argv: Sequence[object], *, cores: int, near: bool, **options: Any
    ) -> subprocess.Popen[Any]:
        """See `Place`."""
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
        """See `Place`.

        Raises:
            Failed: If a limit is asked for.
        """
        if rate is not None:
            raise Failed("there is no link to shape on one host")


# ------------------------------------------------------------------------------------------------ peers


class Peers:
    """The environment that has the other systems, if there is one.

    Attributes:
        python: Its interpreter.
        versions: Of the packages that it has, among those that ways need.
    """

    def __init__(self, *, without: bool = False) -> None:
        self.place = Path(os.environ.get(VARIABLE, ROOT / ".venv-cold-peers"))
        self.python = self.place / "bin" / "python"
        self.versions: dict[str, str] = {}
        if not without and self.python.exists():
            self.versions = _versions(self.python)

    def lacks(self, way: Way) -> tuple[str, ...]:
        """What of a way's needs is not installed."""
        return tuple(package for package in way.needs if package not in self.versions)

    def ways(self) -> tuple[str, ...]:
        """Names of all ways that can be run."""
        return tuple(name for name, way in WAYS.items() if not self.lacks(way))

    def hint(self) -> str:
        """How to make the environment."""
        wanted = " ".join(f"'{package}'" for package in PACKAGES)
        return (
            f"`python -m venv {self.place}` and `{self.place}/bin/pip install {wanted}`, or name another "
            f"environment in {VARIABLE}"
        )


def _versions(python: Path) -> dict[str, str]:
    wanted = sorted({package for way in WAYS.values() for package in way.needs})
    script = (
        "import importlib.metadata as m, json, sys\n"
        "found = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run(
        [python, "-I", "-c", script, *wanted],
        capture_output=True,
        text=True,
        timeout=READY_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise Failed(f"{python} cannot be run{last_lines(done.stderr)}")
    found: dict[str, str] = json.loads(done.stdout)
    return found


# ------------------------------------------------------------------------------------------------- jobs


class Jobs:
    """Starts `cold_job` processes, one at a time, and takes what they say.

    Args:
        place: Where.
        peers: Whose environment others' ways run in.
        scratch: A folder on disk, for right answers, caches and files that ways download.
    """

    def __init__(self, place: Place, peers: Peers, scratch: Path) -> None:
        self._place, self._peers, self._scratch = place, peers, scratch
        self.references = scratch / "references"
        self.references.mkdir()

    def shape(self, rate: float | None) -> None:
        """See `Place.shape`."""
        self._place.shape(rate)

    def publish(self, model: str, forms: Sequence[str], calls: Collection[tuple[int, int]]) -> dict[str, Any]:
        """A model into the store, from its side, in these forms.

        Args:
            model: Which.
            forms: See ``cold_settings.FORMS``.
            calls: Sizes of batch and numbers of threads whose right answers are to be kept.
        """
        uri, options = self._place.writing
        spec = {"do": "publish", "model": model, "forms": list(forms), "calls": sorted(calls), "uri": uri}
        spec |= {"options": dict(options)}
        found = self._run(spec, cores=2, near=True, limit_s=PUBLISH_LIMIT_S)
        if "model.tensors" in forms:
            tensors = {**spec, "do": "tensors"}
            self._run(tensors, cores=2, near=True, peer=True, limit_s=PUBLISH_LIMIT_S)
        return found

    def ask(self, do: str, run: str, *, way: Way, cores: int, link: str, **spec: Any) -> dict[str, Any]:
        """Have a fresh process do something of `cold_job`, and tell of it.

        Args:
            do: What.
            run: Its way, as `cold_settings.Setting.runs` names it.
            way: The same.
            cores: That it has.
            link: What is learnt of one link is remembered for it alone.
            spec: ``model``, ``batch``, ``knob``, ``assign``.

        Raises:
            Failed: If it cannot.
        """
        whole = {"do": do, "run": run, "options": dict(self._place.options), **spec}
        return self._run(whole, cores=cores, peer=bool(way.needs), cache=self._scratch / f"cache-{link}")

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
                "packages": [path for path in sys.path if path.endswith("site-packages")],
            }
            script = [_here / "cold_job.py", json.dumps(spec)]
            argv = [self._peers.python, "-c", BORROW, *script] if peer else [sys.executable, *script]
            env = {**paths(), "OMP_NUM_THREADS": str(cores), "UPRIVER_CACHE": str(cache or os.devnull)}
            if peer:
                env |= _for_amazon(self._place.options)
            errors = stack.enter_context(tempfile.TemporaryFile())
            group = stack.enter_context(memory_group("cold", NO_LIMIT_BYTES))
            spawned = time.monotonic()
            process = self._place.popen_at(
                argv, cores=cores, near=near, stdout=subprocess.PIPE, stderr=errors, env=env
            )
            stack.callback(self._place.end, process)
            if group is not None:
                with suppress(OSError):  # it has ended already; its output says why
                    (group.path / "cgroup.procs").write_text(str(process.pid), encoding="ascii")
            lines, answered_at = Lines(process), None
            try:
                if (line := lines.line(limit_s)) == "answered":
                    answered_at = time.monotonic()
                    line = lines.line(limit_s)
                found: dict[str, Any] = json.loads(line)
            except (Failed, ValueError) as error:
                said = os.pread(errors.fileno(), 1 << 16, 0).decode(errors="replace")
                raise Failed(f"{spec['do']} {spec.get('run', '')}: {error}{last_lines(said)}") from None
            process.wait(READY_LIMIT_S)
            if group is not None:
                found |= _peak(group.path)
        return found if answered_at is None else told(found, spawned, answered_at)


def told(found: Mapping[str, Any], spawned: float, answered_at: float) -> dict[str, Any]:
    """What a run says, its moments as seconds since its process was asked for.

    Args:
        found: Of ``cold_job.run``.
        spawned: When that was.
        answered_at: When its parent heard of the answer: its own clock.
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


def _for_amazon(options: Mapping[str, str]) -> dict[str, str]:
    """The environment in which Amazon's libraries, and those built on them, find the store."""
    return {
        "AWS_ENDPOINT_URL": options["endpoint"],
        "AWS_DEFAULT_REGION": options["region"],
        "AWS_REGION": options["region"],
        "AWS_ACCESS_KEY_ID": options.get("access_key_id", "none"),
        "AWS_SECRET_ACCESS_KEY": options.get("secret_access_key", "none"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    }


class Lines:
    """What a process prints, line by line.

    Args:
        process: Whose stdout is a pipe.
    """

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        self._process, self._rest = process, b""

    def line(self, limit_s: float) -> str:
        """The next one.

        Raises:
            Failed: If there is none within so many seconds.
        """
        assert self._process.stdout is not None
        descriptor, until = self._process.stdout.fileno(), time.monotonic() + limit_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
            data = os.read(descriptor, 1 << 16) if ready else b""
            if not data:
                what = "has ended" if ready else f"said nothing for {limit_s:g} s"
                raise Failed(f"the process {what}")
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        return line.decode()


def paths() -> dict[str, str]:
    """By which every process finds the package and these modules, and asks nobody for models."""
    found = [str(ROOT / "src"), str(_here), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, found)), "HF_HUB_OFFLINE": "1"}
