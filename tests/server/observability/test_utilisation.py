"""Test utilisation: the kernel's ticks, the driver's figures, and periodic sampling."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.server.running import in_thread, wait_for
from upriver.server.observability.utilisation import (
    CoreUtilisation,
    CpuTicks,
    GpuUtilisation,
    UnknownUtilisation,
    busy_share,
    look_at,
    parse_stat,
    watch,
)

LINUX = """\
cpu  5328054 762040 1253904 5756819 35347 0 42965 19866 100 0
cpu0 2427585 351488 587186 3191428 10529 1 19819 8425 100 0
cpu1 2900469 410552 666718 2565391 24817 0 23146 11440 0 0
intr 87763952 0 0 0
ctxt 100
btime 1700000000
procs_running 2
"""


# -------------------------------------------------------------------------------------------------- parsing


def test_the_kernel_s_text() -> None:
    assert parse_stat(LINUX) == {
        0: CpuTicks(busy=2427585 + 351488 + 587186 + 1 + 19819 + 8425, idle=3191428 + 10529),
        1: CpuTicks(busy=2900469 + 410552 + 666718 + 23146 + 11440, idle=2565391 + 24817),
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("cpu  1 2 3 4\n", {}),
        ("cpu3 1 2 3 4\n", {3: CpuTicks(busy=6, idle=4)}),
        ("cpu3 1 2 3\n", {}),
        ("cpu12 1 2 3 4 5", {12: CpuTicks(busy=6, idle=9)}),
        ("cpux 1 2 3 4\ncpu0: 1 2 3 4\n", {}),
        ("cpufreq 1 2 3 4\nxcpu0 1 2 3 4\n", {}),
        ("cpu0 1 2 3 4 5 6 7 8 9 10 11\n", {0: CpuTicks(busy=1 + 2 + 3 + 6 + 7 + 8, idle=9)}),
        ("cpu0 0 0 0 0 0 0 0 0 0 0\ncpu7 0 0 0 1\n", {0: CpuTicks(0, 0), 7: CpuTicks(0, 1)}),
    ],
)
def test_texts_of_other_forms(text: str, expected: dict[int, CpuTicks]) -> None:
    assert parse_stat(text) == expected


@given(st.text(st.sampled_from("cpu0123456789 \n-.x"), max_size=80))
def test_no_text_is_an_error(text: str) -> None:
    assert all(min(ticks) >= 0 for ticks in parse_stat(text).values())


# ---------------------------------------------------------------------------------------- between two samples

BEFORE = {0: CpuTicks(100, 100), 1: CpuTicks(500, 0), 2: CpuTicks(7, 7)}


@pytest.mark.parametrize(
    ("after", "cores", "expected"),
    [
        ({0: CpuTicks(130, 110)}, [0], 0.75),
        ({0: CpuTicks(130, 110), 1: CpuTicks(500, 40), 2: CpuTicks(900, 7)}, [0, 1], 30 / 80),
        ({0: CpuTicks(100, 110), 1: CpuTicks(510, 0)}, {0, 1}, 0.5),
        ({0: CpuTicks(100, 140)}, [0], 0.0),
        ({0: CpuTicks(140, 100)}, [0], 1.0),
        ({0: CpuTicks(100, 100)}, [0], None),  # no tick since
        ({}, [0, 1], None),
        (BEFORE, [], None),
        ({0: CpuTicks(110, 110)}, [9], None),
        ({0: CpuTicks(110, 110), 9: CpuTicks(50, 0)}, [0, 9], 0.5),  # one was switched on
        ({0: CpuTicks(110, 110)}, [0, 1], 0.5),  # one was switched off
        ({0: CpuTicks(110, 110), 1: CpuTicks(3, 5)}, [0, 1], 0.5),  # one counts from zero again
        ({0: CpuTicks(110, 99), 1: CpuTicks(510, 10)}, [0, 1], 0.5),  # waiting for disks has gone back
        ({0: CpuTicks(110, 99)}, [0], None),
    ],
)
def test_only_what_counts_forward_on_both_looks_counts(
    after: dict[int, CpuTicks], cores: list[int], expected: float | None
) -> None:
    assert busy_share(BEFORE, after, cores) == (None if expected is None else pytest.approx(expected))


COUNTS = st.dictionaries(
    st.integers(0, 4), st.builds(CpuTicks, busy=st.integers(0, 10**12), idle=st.integers(0, 10**12))
)


@given(COUNTS, COUNTS, st.sets(st.integers(0, 5)))
def test_it_is_a_share_or_nothing(
    before: dict[int, CpuTicks], after: dict[int, CpuTicks], cores: set[int]
) -> None:
    found = busy_share(before, after, cores)
    assert found is None or 0 <= found <= 1


def test_cores_are_looked_at_since_the_look_before(tmp_path: Path) -> None:
    stat, allowed = tmp_path / "stat", [1]
    look = CoreUtilisation(stat=stat, cores=lambda: allowed)
    assert look() is None
    stat.write_text("cpu0 0 0 0 0\ncpu1 0 0 0 0\n")
    assert look() is None
    stat.write_text("cpu0 0 0 0 100\ncpu1 80 10 0 10\n")
    assert look() == pytest.approx(0.9)
    stat.write_text("cpu0 0 0 0 200\ncpu1 80 10 0 110\n")
    assert look() == 0.0
    allowed.append(0)
    stat.write_text("cpu0 100 0 0 200\ncpu1 80 10 0 210\n")
    assert look() == 0.5
    stat.unlink()
    assert look() is None
    assert str(stat) in look.why


def test_this_machine_s_cores_are_seen_to_work() -> None:
    look = CoreUtilisation()
    look()

    def tried() -> float | None:
        sum(range(1_000_000))
        return look()

    assert 0 < wait_for(tried) <= 1


# ----------------------------------------------------------------------------------------------- accelerators


class NvmlError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Pretend two devices: torch's numbers, the driver's numbers, and their utilisation."""
    found = SimpleNamespace(
        NVMLError=NvmlError,
        busy={"GPU-a": 30, "GPU-b": 90},
        identities={"cuda:0": "b", "cuda:1": "a"},
        inits=0,
    )

    def init() -> None:
        found.inits += 1

    def rates(handle: str) -> Any:
        if handle not in found.busy:
            raise NvmlError("GPU is lost")
        return SimpleNamespace(gpu=found.busy[handle], memory=0)

    found.nvmlInit, found.nvmlDeviceGetUtilizationRates = init, rates
    found.nvmlDeviceGetHandleByUUID = lambda identity: identity
    monkeypatch.setitem(sys.modules, "pynvml", found)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=found.identities[str(device)]),
    )
    yield found


def test_devices_are_found_by_their_identity(nvml: SimpleNamespace) -> None:
    assert GpuUtilisation(["cuda:0"])() == pytest.approx(0.9)
    assert GpuUtilisation(["cuda:1"])() == pytest.approx(0.3)
    look = GpuUtilisation(["cuda:0", "cuda:1"])
    before = nvml.inits
    assert look() == look() == pytest.approx(0.6)
    assert nvml.inits == before + 1


def test_a_device_that_is_lost_is_looked_for_again(nvml: SimpleNamespace) -> None:
    look = GpuUtilisation(["cuda:0"])
    assert look() == pytest.approx(0.9)
    del nvml.busy["GPU-b"]
    assert look() is None
    assert "GPU is lost" in look.why
    nvml.busy["GPU-b"] = 10
    assert look() == pytest.approx(0.1)


def test_without_its_package_it_is_told_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    look = GpuUtilisation(["cuda:0"])
    assert look() is None
    assert "upriver[nvml]" in look.why


@pytest.mark.gpu
def test_a_real_device_says_how_busy_it_is() -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    if not torch.cuda.is_available():
        pytest.skip("there is no such device here")
    found = GpuUtilisation(["cuda:0"])()
    assert found is not None and 0 <= found <= 1


def test_each_kind_of_device_has_its_own_way() -> None:
    assert isinstance(look_at(["cpu"]), CoreUtilisation)
    assert isinstance(look_at(["cpu", "cpu"]), CoreUtilisation)
    assert isinstance(look_at(["cuda:0", "cuda:1"]), GpuUtilisation)
    nowhere = look_at(["mps"])
    assert isinstance(nowhere, UnknownUtilisation)
    assert nowhere() is None and "mps" in nowhere.why


# -------------------------------------------------------------------------------------- periodic samples


def test_it_looks_until_it_is_cancelled_and_says_once_that_it_sees_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Scripted:
        why = "it is dark"

        def __init__(self) -> None:
            self.left = [0.1, None, 0.5, None, None]

        def __call__(self) -> float | None:
            return self.left.pop(0) if self.left else 1.0

    async def go() -> list[float | None]:
        told: list[float | None] = []
        enough = asyncio.Event()

        def note(found: float | None) -> None:
            told.append(found)
            if len(told) == 6:
                enough.set()

        watching = asyncio.create_task(watch(Scripted(), note, every_s=1e-4))
        await enough.wait()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert watching.cancelled()
        return told[:6]

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(go()) == [None, 0.5, None, None, 1.0, 1.0], "the first look has nothing before it"
    assert [record.message for record in caplog.records if "it is dark" in record.message] == [
        "the load by other processes cannot be measured: it is dark"
    ]


def test_a_look_that_fails_is_one_that_sees_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        why = ""

        def __init__(self) -> None:
            self.looks = 0

        def __call__(self) -> float | None:
            self.looks += 1
            if self.looks < 4:
                raise ValueError("a driver's own")
            return 0.5

    async def go() -> list[float | None]:
        told: list[float | None] = []
        watching = asyncio.create_task(watch(Failing(), told.append, every_s=1e-4))
        while 0.5 not in told:
            await asyncio.sleep(1e-4)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        return told[:3]

    assert asyncio.run(go()) == [None, None, 0.5]
    assert [record.message for record in caplog.records if "a driver's own" in record.message] == [
        """the load by other processes cannot be measured: ValueError("a driver's own")"""
    ]


def test_a_server_knows_how_busy_its_machine_is_soon_after_its_start() -> None:
    """An unknown utilisation counts as 0, which clients take for idle."""
    with in_thread("memory://utilisation", load_watch_s=3600.0) as server:
        assert 0 < wait_for(lambda: server.metric("upriver_machine_utilisation")) <= 1


def test_a_server_shows_how_busy_its_machine_is() -> None:
    with in_thread("memory://utilisation", load_watch_s=0.05) as server:
        assert 0 < wait_for(lambda: server.metric("upriver_machine_utilisation")) <= 1
        assert server.metric("upriver_load_factor") == 1
