"""Watch the memory of a server's processes every 20 ms, and limit it with control groups.

Proportional set size (PSS) counts pages that several processes share once over all of them, so sums are
meaningful. A control group counts the memory that its processes allocated, including unmapped shared memory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

EVERY_S = 0.02
"""Seconds between two looks. A micro-batch of the quickest network lasts five times as long."""

FAMILY_S = 0.25
"""Seconds between two searches for processes. A search looks at every process of the machine."""

GONE_TIMEOUT_S = 10.0
GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Memory of a server, in bytes.

    Attributes:
        front: PSS of the process that talks HTTP.
        workers: PSS of all others.
        front_rss: Resident memory of the front, shared pages in full.
        group: Bytes that its control group counts, without those the kernel can drop; 0 without a group.
    """

    front: int = 0
    workers: int = 0
    front_rss: int = 0
    group: int = 0

    @property
    def together(self) -> int:
        """Return the PSS of all processes."""
        return self.front + self.workers

    def record(self) -> dict[str, int]:
        """Return the figures for a line of JSON."""
        return asdict(self) | {"together": self.together}


class Watch:
    """Watch a server's memory from a thread while the block runs, and once more at its end.

    Args:
        pid: Process id of the front.
        group: Control group of the server.
        every_s: Seconds between two looks. The thread rests at least as long as a look lasted. A look visits
            all pages of all processes, and must leave the core to the processes that load the server.
        ask: Called a few times a second with the current memory, to record other figures.

    Attributes:
        peaks: Maximum of each figure, by name. The maxima may be of different moments.
        looks: Number of looks.
    """

    def __init__(
        self,
        pid: int,
        *,
        group: MemoryGroup | None = None,
        every_s: float = EVERY_S,
        ask: Callable[[], None] | None = None,
    ) -> None:
        self._front = psutil.Process(pid)
        self._group, self._every_s, self._ask = group, every_s, ask
        self._workers: list[int] = []
        self._looked_at = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.peaks = Footprint().record()
        self.looks = 0

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()

    def look(self) -> Footprint:
        """Look at the memory once, now."""
        if time.monotonic() >= self._looked_at + FAMILY_S:
            self._find()
        front, front_rss = pss_and_rss(self._front.pid)
        workers = [pss_and_rss(pid)[0] for pid in self._workers]
        return Footprint(
            front=front,
            front_rss=front_rss,
            workers=sum(workers),
            group=self._group.used_bytes() if self._group is not None else 0,
        )

    def _find(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._workers = [child.pid for child in self._front.children(recursive=True)]
        self._looked_at = time.monotonic()

    def _run(self) -> None:
        asked_at, over = 0.0, False
        while True:
            began = time.monotonic()
            for name, nbytes in self.look().record().items():
                self.peaks[name] = max(self.peaks[name], nbytes)
            self.looks += 1
            if self._ask is not None and began >= asked_at + FAMILY_S:
                asked_at = began
                self._ask()
            if over:
                return
            took_s = time.monotonic() - began
            over = self._over.wait(max(took_s, self._every_s - took_s))


def pss_and_rss(pid: int) -> tuple[int, int]:
    """Return PSS and RSS of a process in bytes, or 0 if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return _slowly(pid)
    found = {"Pss:": 0, "Rss:": 0}
    for line in text.splitlines():
        name, *rest = line.split()
        if name in found:
            found[name] = 1024 * int(rest[0])
    return found["Pss:"], found["Rss:"]


def _slowly(pid: int) -> tuple[int, int]:
    """Sum up the mappings, on a kernel without a summary of them."""
    with contextlib.suppress(psutil.Error):
        taken = psutil.Process(pid).memory_full_info()
        return int(taken.pss), int(taken.rss)
    return 0, 0


# ---------------------------------------------------------------------------------------------- groups


@dataclass(frozen=True, kw_only=True, slots=True)
class _Version:
    """The folder of control groups, the controller's name and the names of its files."""

    mount: Path
    controller: str
    limits: tuple[str, ...]
    counted: tuple[str, ...]
    events: str


_VERSIONS = (
    _Version(
        mount=GROUPS / "memory",
        controller="memory",
        limits=("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
        counted=("total_rss", "total_shmem"),
        events="memory.oom_control",
    ),
    _Version(
        mount=GROUPS,
        controller="",
        limits=("memory.max", "memory.swap.max"),
        counted=("anon", "shmem"),
        events="memory.events",
    ),
)


class MemoryGroup:
    """A control group whose processes share a memory limit.

    Attributes:
        path: Its folder. A process whose id is written into ``cgroup.procs`` there joins the group.
        nbytes: The limit in bytes.
    """

    def __init__(self, path: Path, version: _Version, nbytes: int) -> None:
        self.path, self._version, self.nbytes = path, version, nbytes

    def used_bytes(self) -> int:
        """Return the used bytes that the kernel cannot drop."""
        counts = _fields(self.path / "memory.stat")
        return sum(counts.get(name, 0) for name in self._version.counted)

    def kills(self) -> int:
        """Return the number of processes that were ended for lack of memory."""
        return _fields(self.path / self._version.events).get("oom_kill", 0)

    def remove(self) -> None:
        """Remove the group and its inner groups, once their processes have ended."""
        until = time.monotonic() + GONE_TIMEOUT_S
        while self.path.exists():
            for folder in (*(each for each in self.path.iterdir() if each.is_dir()), self.path):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            if time.monotonic() >= until:
                return
            time.sleep(0.05)


@contextlib.contextmanager
def memory_group(name: str, nbytes: int) -> Iterator[MemoryGroup | None]:
    """Make a group for a block, or yield None where none can be made."""
    group = _made(f"upriver-benchmark-{name}-{os.getpid()}-{secrets.token_hex(2)}", nbytes)
    try:
        yield group
    finally:
        if group is not None:
            group.remove()


def can_limit() -> bool:
    """Return whether a group can limit memory on this machine."""
    with memory_group("try", 1 << 40) as group:
        return group is not None


def _made(name: str, nbytes: int) -> MemoryGroup | None:
    for version in _VERSIONS:
        group = MemoryGroup(_own(version) / name, version, nbytes)
        try:
            group.path.mkdir()
        except OSError:
            continue
        if _limited(group, version):
            return group
        group.remove()
    return None


def _own(version: _Version) -> Path:
    """Return the group of this process. Its limits must hold for the groups beneath, too."""
    with contextlib.suppress(OSError):
        for line in MEMBERSHIP.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            folder = version.mount / path.lstrip("/")
            if version.controller in controllers.split(",") and folder.is_dir():
                return folder
    return version.mount


def _limited(group: MemoryGroup, version: _Version) -> bool:
    first, second = version.limits
    swap = "0" if second == "memory.swap.max" else str(group.nbytes)
    try:
        with (group.path / first).open("r+") as file:  # never creates the file: without it, this is no group
            file.write(str(group.nbytes))
    except OSError:
        return False
    with contextlib.suppress(OSError), (group.path / second).open("r+") as file:  # the kernel has no swap
        file.write(swap)
    return True


def _fields(path: Path) -> Mapping[str, int]:
    """Parse lines of a name and a number."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
