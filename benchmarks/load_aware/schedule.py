"""Define the schedule of `load_aware`: levels of load, phases, parts, and turns. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.harness.loadpart_networks import NETWORKS
from benchmarks.load_aware.background import PERIOD_S

OURS, LOADPART, NEUROSURGEON, LOCAL, FULL = "ours", "loadpart", "neurosurgeon", "local", "full"

CHOOSING = (OURS, LOADPART, NEUROSURGEON)
"""Ways that choose a cut for each request; the first is ours."""

PARTS = ("load", "link")
"""``load``: the server's load changes, the link does not. ``link``: the other way round."""

STEADY = (LOCAL, FULL)
"""Ways with a constant cut."""

FACTOR, QUICK_FACTOR = 20.0, 4.0
"""Factor by which the device is slower than its core, and the factor of the quick form."""

MIN_ROUNDS = 2
"""Least rounds of a phase, of any duration."""

BESIDE = 2
"""Requests of a round by ways that choose nothing: local, full, or a fixed cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """Background load on the server's core.

    Attributes:
        name: Load of the core by this level alone.
        processes: Number of processes.
        busy: Share of each `PERIOD_S` that one of them computes; at 1 it never pauses.
    """

    name: str
    processes: int
    busy: float

    @property
    def text(self) -> str:
        """Return the level in words."""
        if not self.processes:
            return "no other process"
        all_of_them = f"{self.processes} process{'es' if self.processes > 1 else ''}"
        if self.busy == 1:
            return f"{all_of_them} in a loop"
        return f"{all_of_them}, {self.busy * PERIOD_S * 1e3:g} ms of CPU time every {PERIOD_S * 1e3:g} ms"


LEVELS: Mapping[str, Level] = {
    level.name: level
    for level in (
        Level(name="0%", processes=0, busy=0.0),
        Level(name="30%", processes=1, busy=0.3),
        Level(name="60%", processes=2, busy=0.3),
        Level(name="90%", processes=3, busy=0.3),
        Level(name="100%(l)", processes=7, busy=1.0),
        Level(name="100%(h)", processes=31, busy=1.0),
    )
}
"""Six, as in sections II and V-C, where ``l`` is for low and ``h`` for high. There all are seven processes,
and the time that a kernel blocks the accelerator decides. The processes of a core have equal shares, so here
their number decides. At its highest load full offload of VGG16 takes up to 1,100 ms and of Xception 1,760 ms,
of which sending takes 574 and 1,023 ms at 8 Mbit/s. The rest is some 50 times a T4's time for them, so 31
processes are no more than that."""

IDLE = "0%"


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A stretch of time without changes.

    Attributes:
        level: One of ``LEVELS``.
        mbit: Rate of the link.
        seconds: Least duration.
    """

    level: str = IDLE
    mbit: float
    seconds: float

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {self.level!r}")
        if not 0.1 <= self.mbit <= 1000 or not self.seconds > 0:
            raise ValueError(f"a phase needs 0.1..1000 Mbit/s and some seconds, got {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One part of the benchmark with one network.

    Attributes:
        part: One of ``PARTS``.
        network: One of ``loadpart_networks.NETWORKS``.
        phases: The phases, in order.
        factor: Factor by which the device is slower than its core.
    """

    part: str
    network: str
    phases: tuple[Phase, ...]
    factor: float = FACTOR

    def __post_init__(self) -> None:
        if self.part not in PARTS:
            raise ValueError(f"part must be one of {', '.join(PARTS)}, got {self.part!r}")
        if self.network not in NETWORKS:
            raise ValueError(f"network must be one of {', '.join(NETWORKS)}, got {self.network!r}")
        if not self.phases or not self.factor >= 1:
            raise ValueError(f"a setting needs phases and a factor of at least 1, got {self}")

    @property
    def key(self) -> str:
        """Return the key of its record."""
        return f"{self.part}-{self.network}"

    @property
    def seconds(self) -> float:
        """Return the least duration of its phases."""
        return sum(phase.seconds for phase in self.phases)


LOAD_MBIT = 8.0
"""Rate of the link, as in section V-C."""

LOADS = (*LEVELS, IDLE)
"""Up, and back to idle (Figure 9)."""

RATES = (8.0, 4.0, 2.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Mbit/s: from 8 down to 1, then up to 64 (section V-B and Figure 6)."""

COMPARED = ("alexnet", "squeezenet1_0")
"""Networks of which Figures 7 and 8 show every rate and the paper states the gain by knowing the load. They
stay longer at each rate and load."""

LOAD_PHASE_S, LONG_LOAD_PHASE_S = 27.0, 60.0
LINK_PHASE_S, LONG_LINK_PHASE_S = 13.5, 22.5
"""Seconds of the phases of most networks, and of the compared ones. All are longer than the age of a device's
knowledge: LoADPart asks every 5 s, its server looks every 10 s. In the paper the highest load lasts for some
70 s (section V-C). The whole has to end within about an hour. With networks whose requests take seconds, a
phase lasts until every way has had a turn."""


def load_setting(network: str, *, seconds: float | None = None, levels: Sequence[str] = LOADS) -> Setting:
    """Return a setting in which the server's load grows, and then vanishes."""
    if seconds is None:
        seconds = LONG_LOAD_PHASE_S if network in COMPARED else LOAD_PHASE_S
    phases = tuple(Phase(level=level, mbit=LOAD_MBIT, seconds=seconds) for level in levels)
    return Setting(part="load", network=network, phases=phases)


def link_setting(network: str, *, seconds: float | None = None, rates: Sequence[float] = RATES) -> Setting:
    """Return a setting in which the link becomes thinner, and then better than it was."""
    if seconds is None:
        seconds = LONG_LINK_PHASE_S if network in COMPARED else LINK_PHASE_S
    phases = tuple(Phase(mbit=rate, seconds=seconds) for rate in rates)
    return Setting(part="link", network=network, phases=phases)


SETTINGS = tuple(make(network) for network in NETWORKS for make in (load_setting, link_setting))

QUICK = (
    replace(load_setting("squeezenet1_0", seconds=0.5, levels=(IDLE, "60%")), factor=QUICK_FACTOR),
    replace(link_setting("squeezenet1_0", seconds=0.5, rates=(8.0, 64.0)), factor=QUICK_FACTOR),
)
"""Settings of the quick form, which only shows that it works."""


class Turns:
    """Decide which ways run in a phase's next round.

    In every round each choosing way has a request, in another order each time. The other ways with the least
    total time join them, if that time is not above ours. So slow ways run rarely, but every way runs once.

    Args:
        cuts: Fixed ones.
        before: Rounds of the phases before, so that the order goes on.
    """

    def __init__(self, cuts: Iterable[int], before: int = 0) -> None:
        self._others = [*STEADY, *map(way_of, sorted(cuts))]
        self._spent: dict[str, float] = {}
        self._before = before
        self.rounds = 0

    def round(self) -> list[str]:
        """Return the ways of one more round, in order."""
        ways = [*CHOOSING, *self._beside()]
        first = (self._before + self.rounds) % len(ways)
        self.rounds += 1
        return ways[first:] + ways[:first]

    def took(self, way: str, seconds: float) -> None:
        """Record the time of a way's request."""
        self._spent[way] = self._spent.get(way, 0.0) + seconds

    @property
    def complete(self) -> bool:
        """Return whether every way has had a request, and each choosing way as many as a phase needs."""
        return self.rounds >= MIN_ROUNDS and all(way in self._spent for way in self._others)

    def _beside(self) -> Iterator[str]:
        ours = self._spent.get(OURS, 0.0)
        due = sorted(self._others, key=lambda way: self._spent.get(way, -1.0))
        yield from (way for way in due[:BESIDE] if self._spent.get(way, -1.0) <= ours)


def way_of(cut: int) -> str:
    """Return the name of a fixed cut."""
    return f"cut {cut}"


def cut_of(way: str) -> int | None:
    """Return the cut of a fixed way's name, or None for another way."""
    name, _, number = way.partition(" ")
    return int(number) if name == "cut" else None


def steady_cut(way: str, stages: int) -> int | None:
    """Return the constant cut of a way, or None if it chooses.

    Args:
        way: Name of the way.
        stages: Stages of the network.
    """
    return {LOCAL: stages, FULL: 0}.get(way, cut_of(way))
