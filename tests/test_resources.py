"""Check a process's available memory: the machine's, or the rest within its control groups."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from upriver import resources
from upriver.cli.plan import model
from upriver.features.keep import Keep
from upriver.profile import builder, cluster_from
from upriver.resources import (
    available_bytes,
    available_cpus,
    host_bytes,
    host_total_bytes,
    total_bytes,
)

MACHINE = 1 << 40
NO_LIMIT = "9223372036854771712"
NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=MACHINE, total=2 * MACHINE)
    )


class Groups:
    """Simulated control groups, and a process in one of them."""

    def __init__(self, folder: Path, version: int) -> None:
        self.version, self.top, self.membership = version, folder / "cgroup", folder / "membership"
        self.mount = self.top / "memory" if version == 1 else self.top
        self.mount.mkdir(parents=True)
        self.enter("/")

    def enter(self, path: str) -> None:
        lines = ["9:name=systemd:/elsewhere", "3:cpu,cpuacct:/other"]
        lines.append(f"4:memory:{path}" if self.version == 1 else f"0::{path}")
        self.membership.write_text("\n".join(lines) + "\n")

    def put(self, path: str, limit: object, usage: object = 0, cache: object = None) -> None:
        folder = self.mount / path
        folder.mkdir(parents=True, exist_ok=True)
        limit_file, usage_file, cache_name = NAMES[self.version]
        (folder / limit_file).write_text(f"{limit}\n")
        (folder / usage_file).write_text(f"{usage}\n")
        if cache is not None:
            (folder / "memory.stat").write_text(f"anon 5\n{cache_name}_x 7\n{cache_name} {cache}\nfile 9\n")

    def left(self) -> int:
        return host_bytes(self.top, self.membership)


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def groups(request: pytest.FixtureRequest, tmp_path: Path) -> Groups:
    return Groups(tmp_path, request.param)


def test_a_group_leaves_its_limit_less_what_it_uses(groups: Groups) -> None:
    groups.put("jobs/one", 1000, 300)
    groups.enter("/jobs/one")
    assert groups.left() == 700


def test_page_cache_that_can_be_dropped_counts_as_left(groups: Groups) -> None:
    groups.put("one", 1000, 900, cache=400)
    groups.enter("/one")
    assert groups.left() == 500
    groups.put("one", 1000, 900, cache=5000)
    assert groups.left() == 1000, "no group uses less than nothing"


def test_the_least_that_any_group_around_it_leaves_counts(groups: Groups) -> None:
    groups.put("", 10_000, 100)
    groups.put("outer", 5000, 4800)
    groups.put("outer/inner", 1000, 300)
    groups.enter("/outer/inner")
    assert groups.left() == 200
    groups.put("outer", 5000, 1000)
    assert groups.left() == 700
    groups.put("", 10_000, 9990)
    assert groups.left() == 10


def test_a_group_beside_it_does_not_count(groups: Groups) -> None:
    groups.put("one", 1000)
    groups.put("other", 10)
    groups.enter("/one")
    assert groups.left() == 1000


def test_a_group_may_have_its_limit_in_all_whatever_it_uses(groups: Groups) -> None:
    def total() -> int:
        return host_total_bytes(groups.top, groups.membership)

    assert total() == 2 * MACHINE
    groups.put("outer", 5000, 4800)
    groups.put("outer/inner", 1000, 300)
    groups.enter("/outer/inner")
    assert total() == 1000
    groups.put("outer", 500)
    assert total() == 500


@pytest.mark.parametrize("limit", ["max", NO_LIMIT, "", "-1", "many", "9" * 5000, "1e3"])
def test_what_is_no_limit_leaves_the_machine(groups: Groups, limit: str) -> None:
    groups.put("one", limit, 300)
    groups.enter("/one")
    assert groups.left() == MACHINE


@pytest.mark.parametrize("path", ["/docker/0123", "/../../docker", "/"])
def test_in_a_container_the_mount_is_the_group(groups: Groups, path: str) -> None:
    groups.put("", 1000, 300)
    groups.enter(path)
    assert groups.left() == 700


def test_usage_that_cannot_be_read_leaves_the_limit(groups: Groups) -> None:
    groups.put("one", 1000, "nobody knows", cache="nor here")
    groups.enter("/one")
    assert groups.left() == 1000
    (groups.mount / "one" / NAMES[groups.version][1]).unlink()
    assert groups.left() == 1000


def test_a_group_above_its_limit_leaves_nothing(groups: Groups) -> None:
    groups.put("one", 1000, 1200)
    groups.enter("/one")
    assert groups.left() == 0


def test_the_machine_counts_where_it_has_less(groups: Groups) -> None:
    groups.put("", MACHINE + 1)
    assert groups.left() == MACHINE


@pytest.mark.parametrize("text", [b"", b"garbage", b"0:", b"\xff\xfe:\x00", b"0::/a\x00b", b"4:memory"])
def test_a_membership_that_says_nothing_leaves_the_machine(tmp_path: Path, text: bytes) -> None:
    membership = tmp_path / "membership"
    membership.write_bytes(text)
    assert host_bytes(tmp_path, membership) == MACHINE
    assert host_bytes(tmp_path, tmp_path / "no such file") == MACHINE


def test_version_1_beside_version_2_counts_where_it_holds_memory(tmp_path: Path) -> None:
    groups = Groups(tmp_path, 1)
    groups.put("job", 1000, 300)
    groups.membership.write_text("4:memory:/job\n0::/\n")
    assert groups.left() == 700


def test_plans_count_with_what_is_left(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    groups.put("", 1000, 300)
    monkeypatch.setattr(resources.host_bytes, "__defaults__", (groups.top, groups.membership))
    assert available_bytes(torch.device("cpu")) == 700
    machines = model.same_machine(1e6, 16)
    assert machines.storage.memory_bytes == machines.compute.memory_bytes == 700
    assert clusters_memory() == 700


def test_kept_features_take_a_tenth_of_what_a_group_leaves(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups.put("", 1000, 300)
    monkeypatch.setattr(resources.host_bytes, "__defaults__", (groups.top, groups.membership))
    assert Keep().memory_bytes == 70


def clusters_memory(device: str = "cpu") -> float:
    cluster = cluster_from(
        bandwidth_bytes_per_s=1,
        rtt_s=0,
        micro_batch=16,
        stored_bytes=0,
        sent_bytes=0,
        samples_per_timing=16,
        storage=(),
        device=torch.device(device),
    )
    return cluster.compute.memory_bytes


def test_the_device_that_computes_is_the_one_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "available_bytes", lambda device: {"cuda": 5, "cpu": 7}[device.type])
    assert (clusters_memory("cuda:1"), clusters_memory()) == (5, 7)


def test_an_accelerator_leaves_what_nobody_holds_and_what_torch_holds_for_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"mem_get_info": (1000, 8000), "memory_reserved": 500, "memory_allocated": 200}
    asked = []
    for name, size in sizes.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, size=size: asked.append(device) or size)
    assert available_bytes(torch.device("cuda:1")) == 1300
    assert total_bytes(torch.device("cuda:1")) == 8000
    assert set(asked) == {torch.device("cuda:1")}


# -------------------------------------------------------------------------------------------- CPUs

PERIOD = 100_000


class CpuGroups(Groups):
    """Simulated control groups of CPUs."""

    def __init__(self, folder: Path, version: int) -> None:
        super().__init__(folder, version)
        self.mount = self.top / "cpu" if version == 1 else self.top
        self.mount.mkdir(exist_ok=True)

    def enter(self, path: str) -> None:
        line = f"3:cpu,cpuacct:{path}" if self.version == 1 else f"0::{path}"
        self.membership.write_text(f"4:memory:/elsewhere\n{line}\n")

    def give(self, path: str, quota: object, period: object = PERIOD) -> None:
        folder = self.mount / path
        folder.mkdir(parents=True, exist_ok=True)
        if self.version == 1:
            (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
            (folder / "cpu.cfs_period_us").write_text(f"{period}\n")
        else:
            (folder / "cpu.max").write_text(f"{quota} {period}\n")

    def cpus(self) -> int:
        return available_cpus(self.top, self.membership)


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def cpus(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CpuGroups:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    return CpuGroups(tmp_path, request.param)


@pytest.mark.parametrize(
    ("quota", "period", "expected"),
    [
        (4 * PERIOD, PERIOD, 4),
        (250_000, PERIOD, 2),
        (50_000, PERIOD, 1),
        (1000, PERIOD, 1),
        (30_000, 10_000, 3),
        (100 * PERIOD, PERIOD, 16),
    ],
)
def test_a_group_allows_so_many_cpus(cpus: CpuGroups, quota: int, period: int, expected: int) -> None:
    cpus.give("jobs/one", quota, period)
    cpus.enter("/jobs/one")
    assert cpus.cpus() == expected


def test_the_least_that_any_group_around_it_allows_counts(cpus: CpuGroups) -> None:
    cpus.give("", 8 * PERIOD)
    cpus.give("outer", 3 * PERIOD)
    cpus.give("outer/inner", 6 * PERIOD)
    cpus.give("other", PERIOD)
    cpus.enter("/outer/inner")
    assert cpus.cpus() == 3
    cpus.give("outer", 12 * PERIOD)
    assert cpus.cpus() == 6
    cpus.give("", 2 * PERIOD)
    assert cpus.cpus() == 2


@pytest.mark.parametrize(
    ("quota", "period"), [("max", PERIOD), (-1, PERIOD), (0, PERIOD), (PERIOD, 0), ("", ""), ("x", "y")]
)
def test_without_a_limit_it_is_where_a_process_may_run(
    cpus: CpuGroups, quota: object, period: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus.give("one", quota, period)
    cpus.enter("/one")
    assert cpus.cpus() == 16
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert cpus.cpus() == 1


@pytest.mark.parametrize("path", ["/docker/0123", "/../../docker", "/"])
def test_in_a_container_the_mount_allows(cpus: CpuGroups, path: str) -> None:
    cpus.give("", 2 * PERIOD)
    cpus.enter(path)
    assert cpus.cpus() == 2


def test_without_groups_it_is_where_a_process_may_run(cpus: CpuGroups) -> None:
    assert available_cpus(cpus.top, cpus.top / "no such file") == 16
    cpus.membership.write_bytes(b"\xff\xfe:\x00")
    assert cpus.cpus() == 16
