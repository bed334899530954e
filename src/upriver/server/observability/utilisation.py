"""Measure how busy all processes together keep the server's cores or accelerators.

Other processes also slow a server down, and the server's own figures do not show them. For that LoADPart
(ICDCS 2022, section IV) watches the utilisation of the GPU. For CPUs the kernel counts ticks per core (Linux,
proc_stat(5)): ticks in which the core idled or waited for a disk, and all others, with those that a
hypervisor gave to another machine.
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

from upriver.extras import install
from upriver.server.sandbox.rlimits import on_cpu
from upriver.text import said

log = logging.getLogger(__name__)

STAT = Path("/proc/stat")

FIRST_S = 0.5
"""Seconds until the first measurement: it is there before any worker can be asked for anything."""

FIELDS = 8
"""Fields of a core's line: user, nice, system, idle, iowait, irq, softirq, steal. The guests' time that
follows is part of the first two; old kernels have only the first four."""

IDLE = slice(3, 5)
"""Fields of ticks in which any process could have had the core."""

_CORE = re.compile(r"^cpu([0-9]+)((?: +[0-9]+){4,})", re.MULTILINE)


class CpuTicks(NamedTuple):
    """Ticks of a core, since the start or between two measurements."""

    busy: int
    idle: int


class UtilisationProbe(Protocol):
    """Measure a utilisation since the previous call.

    Attributes:
        why: Reason why it cannot be measured, if so.
    """

    why: str

    def __call__(self) -> float | None:
        """Return a share of the time, or None if unknown, as on the first call. May take some ms."""


def parse_stat(text: str) -> dict[int, CpuTicks]:
    """Parse the cores in a text in the form of ``/proc/stat``, which omits cores that are switched off."""
    found = {}
    for match in _CORE.finditer(text):
        ticks = [int(field) for field in match[2].split()[:FIELDS]]
        idle = sum(ticks[IDLE])
        found[int(match[1])] = CpuTicks(busy=sum(ticks) - idle, idle=idle)
    return found


def busy_share(
    before: Mapping[int, CpuTicks], after: Mapping[int, CpuTicks], cores: Collection[int]
) -> float | None:
    """Return the share of time in which some cores were busy between two measurements; None without a tick.

    A core that appeared, disappeared or counted backwards is ignored this time. A core that is switched on
    may begin at zero, and the time of waiting for disks is known to go back.
    """
    spans = [
        CpuTicks(busy=after[core].busy - before[core].busy, idle=after[core].idle - before[core].idle)
        for core in cores
        if core in before and core in after
    ]
    forward = [span for span in spans if min(span) >= 0]
    busy, ticks = sum(span.busy for span in forward), sum(span.busy + span.idle for span in forward)
    return busy / ticks if ticks else None


class CoreUtilisation:
    """Measure the cores that this process and its workers may run on.

    Args:
        stat: File in which the kernel counts.
        cores: Function that returns the cores' numbers. It is called each time, as an operator or a control
            group may change them.
    """

    def __init__(
        self, *, stat: Path = STAT, cores: Callable[[], Collection[int]] = lambda: os.sched_getaffinity(0)
    ) -> None:
        self._stat, self._cores = stat, cores
        self._before: Mapping[int, CpuTicks] = {}
        self.why = f"{stat} does not tell it of the cores that may be used here"

    def __call__(self) -> float | None:
        """Return the share of time, as `UtilisationProbe` does."""
        try:
            now = parse_stat(self._stat.read_text(encoding="ascii", errors="replace"))
        except OSError:  # not Linux
            now = {}
        before, self._before = self._before, now
        return busy_share(before, now, self._cores())


class GpuUtilisation:
    """Ask NVML for the utilisation of NVIDIA's devices.

    Each figure covers the driver's last sampling period, up to 1 s.

    Args:
        devices: Names as in torch.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = devices
        self._handles: list[Any] = []
        self.why = ""

    def __call__(self) -> float | None:
        """Return the share of time, as `UtilisationProbe` does."""
        try:
            import pynvml
        except ImportError:
            self.why = install("the utilisation of NVIDIA's devices", "nvidia-ml-py", "nvml")
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


class UnknownUtilisation:
    """Stand in for devices whose utilisation cannot be measured."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.why = f"nothing is known that tells it of {', '.join(devices)}"

    def __call__(self) -> float | None:
        """Return None."""
        return None


def look_at(devices: Sequence[str]) -> UtilisationProbe:
    """Return the measurement for a server's devices, which are of one kind."""
    if all(map(on_cpu, devices)):
        return CoreUtilisation()
    return (
        GpuUtilisation(devices)
        if all(device.startswith("cuda") for device in devices)
        else UnknownUtilisation(devices)
    )


async def watch(look: UtilisationProbe, told: Callable[[float | None], None], *, every_s: float) -> None:
    """Measure periodically until cancelled.

    Args:
        told: Called with each measurement, in the event loop's thread.
        every_s: Seconds between two measurements, except before the first one.
    """
    unsaid, wait_s = True, min(FIRST_S, every_s)
    await _seen(look)  # measurements count from here on
    while True:
        await asyncio.sleep(wait_s)
        wait_s = every_s
        found, why = await _seen(look)
        told(found)
        if found is None and unsaid:
            unsaid = False
            log.warning("the load by other processes cannot be measured: %s", why)


async def _seen(look: UtilisationProbe) -> tuple[float | None, str]:
    """Return a measurement, and the reason if it is None."""
    try:
        return await asyncio.to_thread(look), look.why
    except Exception as error:  # drivers may raise anything, and the last measurement would stay
        return None, said(repr(error))


def _handle(pynvml: Any, device: str) -> Any:
    """Find a device by its identity: NVML numbers all devices of a machine, torch only those it may use."""
    import torch

    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
