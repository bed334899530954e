"""Test several devices: requests are dealt evenly, and each has its own memory and queue."""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.conftest import CAPS
from tests.server.http.test_limits import same, upload
from tests.server.running import answering, ask, messages, run, running, stopped
from upriver.errors import ConfigError
from upriver.server import ServerConfig, device_group
from upriver.server.device_group import DeviceGroups
from upriver.server.tenants import Tenant
from upriver.types import MicroBatch


class Runner:
    """Counts of the requests on one device."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()

    @property
    def running(self) -> int:
        return self.of.total()

    def running_of(self, tenant: str) -> int:
        return self.of[tenant]


def devices(count: int) -> tuple[DeviceGroups, list[Runner]]:
    runners = [Runner() for _ in range(count)]
    return DeviceGroups([cast(Any, SimpleNamespace(runner=runner)) for runner in runners]), runners


@given(count=st.integers(1, 4), arrivals=st.lists(st.sampled_from("abc"), max_size=40))
def test_each_tenant_s_requests_are_dealt_evenly(count: int, arrivals: list[str]) -> None:
    units, runners = devices(count)
    for name in arrivals:
        cast(Any, units.deal(Tenant(name=name)).runner).of[name] += 1
        for tenant in "abc":
            counts = [runner.of[tenant] for runner in runners]
            assert max(counts) - min(counts) <= 1
    loads = [runner.running for runner in runners]
    assert sum(loads) == len(arrivals)
    assert max(loads) - min(loads) <= 3  # one of each tenant


@given(arrivals=st.lists(st.booleans(), max_size=40))
def test_requests_that_come_and_go_one_by_one_take_every_device_in_turn(arrivals: list[bool]) -> None:
    units, runners = devices(3)
    met = [runners.index(cast(Any, units.deal(Tenant(name="a")).runner)) for _ in arrivals]
    assert met == [number % 3 for number in range(len(arrivals))]


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("", "several of one kind"),
        ("cpu,", "several of one kind"),
        ("cpu,cuda:0", "several of one kind"),
        ("cuda:0,cuda:0", "twice"),
    ],
)
def test_devices_that_cannot_be_meant(device: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServerConfig(stores={"default": "memory://"}, device=device)


@pytest.mark.parametrize(
    ("devices", "budget", "said"),
    [
        ("cpu", 1000, ""),
        ("cpu", 1001, "memory_budget_bytes is 1 kB, and this machine"),
        ("cpu,cpu", 500, ""),
        ("cpu,cpu", 501, "501 B for each of 2, and this machine"),
    ],
)
def test_a_budget_of_more_than_there_is_is_told(
    devices: str,
    budget: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(device_group, "total_bytes", lambda device: 1000)
    config = ServerConfig(stores={"default": "memory://"}, device=devices, memory_budget_bytes=budget)
    assert device_group._memory(config, "cpu") == budget
    assert len(caplog.messages) == bool(said)
    assert said in "".join(caplog.messages)


@pytest.mark.parametrize(
    ("devices", "reserve", "found"), [("cpu", 0.0, 1000), ("cpu", 0.25, 750), ("cpu,cpu", 0.25, 375)]
)
def test_a_device_has_what_is_available_less_the_reserve(
    devices: str, reserve: float, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_group, "available_bytes", lambda device: 1000)
    config = ServerConfig(stores={"default": "memory://"}, device=devices, memory_reserve=reserve)
    assert device_group._memory(config, "cpu") == found


def test_a_front_leaves_room_for_what_it_imports_later(monkeypatch: pytest.MonkeyPatch) -> None:
    later = device_group.IMPORTED_LATER_BYTES
    monkeypatch.setattr(device_group, "available_bytes", lambda device: later + 1000)
    config = ServerConfig(stores={"default": "memory://"}, memory_reserve=0.0)
    assert device_group._memory(config, "cpu") == later + 1000
    monkeypatch.delitem(sys.modules, "torch")
    assert device_group._memory(config, "cpu") == 1000


@pytest.mark.parametrize("reserve", [-0.1, 1.0, 1.5, float("nan")])
def test_the_reserve_is_a_share(reserve: float) -> None:
    with pytest.raises(ConfigError, match="memory_reserve"):
        ServerConfig(stores={"default": "memory://"}, memory_reserve=reserve)


def test_a_device_without_memory_is_told_with_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_group, "available_bytes", lambda device: 0)
    config = ServerConfig(stores={"default": "memory://"})
    with pytest.raises(ConfigError, match=r"on cpu: 0 bytes are available, and of these a share of 0\.1"):
        device_group._memory(config, "cpu")
    with pytest.raises(ConfigError, match="toaster"):
        device_group._memory(config, "toaster")


@pytest.mark.slow
@pytest.mark.full
def test_two_memory_pools_admit_each_by_itself(world: Any) -> None:
    """Each pool admits one request, so both run only if they are on two devices."""
    settings = {"memory_budget_bytes": 1 << 30, "max_admitted": 1, "caps": CAPS}
    with running(world.store.uri, device="cpu,cpu", **settings) as server, ExitStack() as stack:
        server.wait_ready()
        status, _, _ = ask(server, "PUT", f"/v1/programs/{world.program.digest}", upload(world.program))
        assert status == 201
        info = json.loads(ask(server, "GET", "/v1/info")[2])
        assert (info["device"], info["devices"], info["workers"]) == ("cpu", 2, 2)
        request = world.request((0, 1, 2, 3), (4, 5), stop=2)
        for _ in range(2):  # its footprint is computed on each device
            run(server, request)
        with stopped(server):  # an answer begins at admission, and ends when workers continue
            responses = [stack.enter_context(answering(server, request)) for _ in range(2)]
            load = json.loads(ask(server, "GET", "/v1/load")[2])
            assert (load["running"], load["waiting"], load["budget_bytes"]) == (2, 0, 2 << 30)
        for response in responses:
            found = [message for message in messages(response) if isinstance(message, MicroBatch)]
            for batch, ids in zip(found, ((0, 1, 2, 3), (4, 5)), strict=True):
                same(batch, world.here(ids, 2))
        assert len(server.workers()) == 2
