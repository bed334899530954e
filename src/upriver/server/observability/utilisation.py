"""How busy everybody together keeps what a server computes with: the cores it may use, or its accelerators.

The load that slows a server down comes from others as well, who are in none of its own figures. LoADPart
(ICDCS 2022, section IV) looks at the utilisation of the GPU for that. Of CPUs the kernel counts ticks, core
by core (Linux, proc_stat(5)): some in which it idled or waited for a disk, and all the others, with those
that a hypervisor gave to another machine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, Protocol

import torch

from upriver.server.sandbox.rlimits import on_cpu
from upriver.text import said

log = logging.getLogger(__name__)

STAT = Path("/proc/stat")

FIRST_S = 0.5
"""After which it is told for the first time: before any worker can be asked for anything."""

FIELDS = 8
"""Of a core's line: user, nice, system, idle, iowait, irq, softirq, steal. Guests' time, which follows, is in
the first two as well; old kernels have the first four alone."""

IDLE = slice(3, 5)
"""Those in which anybody could have had the core."""

_CORE = re.compile(r"^cpu([0-9]+)((?: +[0-9]+){4,})", re.MULTILINE)


class Ticks(NamedTuple):
    """What a core has done, since it is there or between two looks."""

    busy: int
    idle: int


class Look(Protocol):
    """Tells how busy something was since it was asked last.

    Attributes:
        why: Why that cannot be told, where it cannot.
    """

    why: str

    def __call__(self) -> float | None:
        """A share of the time; None where it cannot be told, as the first time. May take some ms."""


def parse_stat(text: str) -> dict[int, Ticks]:
    """The cores in a text of the form of ``/proc/stat``; those that are switched off are not in it."""
    found = {}
    for match in _CORE.finditer(text):
        ticks = [int(field) for field in match[2].split()[:FIELDS]]
        idle = sum(ticks[IDLE])
        found[int(match[1])] = Ticks(busy=sum(ticks) - idle, idle=idle)
    return found


def busy_share(
    before: Mapping[int, Ticks], after: Mapping[int, Ticks], cores: Collection[int]
) -> float | None:
    """Share of the time between two looks for which some cores were busy; None where no tick tells.

    A core that came, went, or has counted backwards says nothing this time: one that is switched on may begin
    at zero, and what was waited for disks is known to go back.
    """
    spans = [
        Ticks(busy=after[core].busy - before[core].busy, idle=after[core].idle - before[core].idle)
        for core in cores
        if core in before and core in after
    ]
    forward = [span for span in spans if min(span) >= 0]
    busy, ticks = sum(span.busy for span in forward), sum(span.busy + span.idle for span in forward)
    return busy / ticks if ticks else None


class Cores:
    """Looks at the cores that this process may run on, and its workers with it.

    Args:
        stat: Where the kernel counts.
        cores: Numbers of the cores; asked each time, for an operator or a control group may change them.
    """

    def __init__(
        self, *, stat: Path = STAT, cores: Callable[[], Collection[int]] = lambda: os.sched_getaffinity(0)
    ) -> None:
        self._stat, self._cores = stat, cores
        self._before: Mapping[int, Ticks] = {}
        self.why = f"{stat} does not tell it of the cores that may be used here"

    def __call__(self) -> float | None:
        """As of `Look`."""
        try:
            now = parse_stat(self._stat.read_text(encoding="ascii", errors="replace"))
        except OSError:  # not Linux
            now = {}
        before, self._before = self._before, now
        return busy_share(before, now, self._cores())


class Gpus:
    """Asks NVML how busy NVIDIA's devices are: each in the last period that its driver samples, up to 1 s.

    Args:
        devices: As torch names them.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = devices
        self._handles: list[Any] = []
        self.why = ""

    def __call__(self) -> float | None:
        """As of `Look`."""
        try:
            import pynvml
        except ImportError:
            self.why = "nvidia-ml-py is not installed: pip install 'upriver[nvml]'"
            return None
        try:
            if not self._handles:
                pynvml.nvmlInit()
                self._handles = [_handle(pynvml, device) for device in self._devices]
            busy: list[float] = [
                pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in self._handles
            ]
        except (pynvml.NVMLError, RuntimeError) as error:
            self._handles, self.why = [], said(f"NVML: {error}")
            return None
        return min(1.0, mean(busy))


class Nowhere:
    """Looks at what nobody knows to look at."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.why = f"nothing is known that tells it of {', '.join(devices)}"

    def __call__(self) -> float | None:
        """As of `Look`."""
        return None


def look_at(devices: Sequence[str]) -> Look:
    """What looks at a server's devices, which are of one kind."""
    if all(map(on_cpu, devices)):
        return Cores()
    return Gpus(devices) if all(device.startswith("cuda") for device in devices) else Nowhere(devices)


async def watch(look: Look, told: Callable[[float | None], None], *, every_s: float) -> None:
    """Look again and again, until this is cancelled.

    Args:
        told: What was seen, each time, in the event loop's thread.
        every_s: Between two looks, but for the first ones.
    """
    unsaid, wait_s = True, min(FIRST_S, every_s)
    await _seen(look)  # from here on
    while True:
        await asyncio.sleep(wait_s)
        wait_s = every_s
        found, why = await _seen(look)
        told(found)
        if found is None and unsaid:
            unsaid = False
            log.warning("how busy others keep this machine cannot be told: %s", why)


async def _seen(look: Look) -> tuple[float | None, str]:
    """What a look sees, and why it may see nothing."""
    try:
        return await asyncio.to_thread(look), look.why
    except Exception as error:  # drivers raise what they like, and what was seen last would hold for ever
        return None, said(repr(error))


def _handle(pynvml: Any, device: str) -> Any:
    """By its identity: NVML numbers all devices of a machine, torch those that it may use."""
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
