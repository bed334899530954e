"""Check the uplink of a device with several servers: its probes, and the requests that wait for them."""

from __future__ import annotations

import math
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.inference.asking import bitwise, chain
from tests.inference.between import between
from tests.server.running import Running, wait_for
from upriver.inference import remote_server as far_module
from upriver.inference import uplink as uplink_module
from upriver.inference.costs import CutCosts
from upriver.inference.remote_server import OffloadTuning, RemoteServer
from upriver.inference.server_check import AdmittedNetwork, admit
from upriver.inference.uplink import Uplink
from upriver.link import LinkEstimator
from upriver.program.capture.whole_model import CapturedModel, capture_whole
from upriver.program.example_inputs import Example
from upriver.rpc.client import ServerClient


@pytest.fixture(scope="module")
def captured() -> CapturedModel:
    return capture_whole(chain(), Example.of(torch.randn(2, 64)))


def test_probes_to_several_servers_never_overlap(
    captured: CapturedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probes are due at the same moments, because the servers were admitted together."""
    lock, under_way, overlapped, sent = threading.Lock(), [0], [0], [0, 0, 0]

    def probe(client: Any, link: LinkEstimator, **_: Any) -> None:
        with lock:
            under_way[0] += 1
            overlapped[0] += under_way[0] > 1
            sent[client.number] += 1
        time.sleep(0.005)
        with lock:
            under_way[0] -= 1

    def let_in(*_: Any, **__: Any) -> AdmittedNetwork:
        return AdmittedNetwork(
            costs=CutCosts(program=captured.program, device_s=(0.01,) * 7, server_s=(0.001,) * 7),
            provisional=False,
            cuts=(0,),
            load=SimpleNamespace(k=1.0, expected_wait_s=0.0, machine=0.0),  # type: ignore[arg-type]
        )

    monkeypatch.setattr(far_module, "probe", probe)
    monkeypatch.setattr(far_module, "admit", let_in)
    uplink = Uplink()
    meter = SimpleNamespace(observed_bandwidth=lambda: None)
    clients: list[Any] = [
        SimpleNamespace(url=f"http://{number}", number=number, meter=meter, close=lambda: None)
        for number in range(3)
    ]
    with ExitStack() as stack:
        for client in clients:
            far = RemoteServer(
                client,
                OffloadTuning(probe_s=0.02, load_s=3600.0),
                uplink,
                agreement=bitwise(),
            )
            stack.callback(far.close)
            far.serve(captured, (0.01,) * 7)
        wait_for(lambda: min(sent) > 10)
        assert overlapped == [0]  # once one of them is closed, nothing waits any more


@pytest.mark.full
def test_a_let_in_probes_alone_and_is_waited_for_by_the_probes_of_others(
    captured: CapturedModel, server: Running
) -> None:
    uplink, began = Uplink(), threading.Event()
    told: dict[str, list[bool]] = {}
    with between(server.url) as front, ServerClient(front.url) as client:

        def look(path: str) -> None:
            told.setdefault(path, []).append(uplink.busy_since_s < math.inf)
            if path == "/v1/info":
                began.set()

        front.before = look
        letting_in = threading.Thread(
            target=lambda: admit(
                client,
                captured,
                (0.01,) * 7,
                push=True,
                agreement=bitwise(),
                link=LinkEstimator.of_requests(),
                uplink=uplink,
            )
        )
        with uplink.in_use():
            letting_in.start()
            began.wait(60)
            assert not wait_for_a_moment(lambda: "/v1/probe" in told), "a request is under way"
        letting_in.join(60)
    assert told["/v1/probe"] == [False] * 9
    assert told["/v1/run"] == [True] * 3


def wait_for_a_moment(found: Any) -> bool:
    time.sleep(0.1)
    return bool(found())


def test_a_probe_waits_for_what_was_under_way_and_for_nothing_later() -> None:
    uplink, order = Uplink(), []
    with ExitStack() as first, ExitStack() as later:
        first.enter_context(uplink.in_use())
        due_s = time.monotonic()

        def probe() -> None:
            with uplink.probing(due_s):
                order.append("probe")

        later.enter_context(uplink.in_use())
        thread = threading.Thread(target=probe)
        thread.start()
        wait_for_a_moment(lambda: None)
        order.append("request")
        first.close()
        thread.join(60)
    assert order == ["request", "probe"]


@pytest.mark.parametrize("end", ["closed", "too long"])
def test_no_probe_waits_for_ever(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uplink_module, "LONGEST_WAIT_S", 0.05 if end == "too long" else 3600.0)
    uplink, done = Uplink(), threading.Event()

    def other() -> None:
        with uplink.probing(time.monotonic()):
            done.set()

    with uplink.probing(time.monotonic()):
        thread = threading.Thread(target=other)
        thread.start()
        if end == "closed":
            assert not done.is_set()
            uplink.close()
        assert done.wait(60)
        thread.join(60)
        assert uplink._probing, "it is still the other one's turn"
