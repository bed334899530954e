"""Check the time of a request outside its stages: predictions and measurements count each second once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import upriver
from tests.inference.asking import SELDOM, bitwise, chain, here
from tests.server.running import Running
from upriver.control.partition import ESTIMATES
from upriver.inference import executor as request_module
from upriver.inference.costs import CutCosts, HandlingTimes, crossing_bytes
from upriver.inference.exchange import ExchangeResult, packing
from upriver.inference.remote_server import OffloadTuning, RemoteServer
from upriver.inference.server_check import handling_of
from upriver.link import LinkEstimator
from upriver.program.capture.whole_model import CapturedModel, capture_whole
from upriver.program.example_inputs import Example
from upriver.rpc.client import ServerClient
from upriver.types import Timings

UP, DOWN, RTT_S = 1e6, 0.5e6, 0.02
"""Bytes per second that the link carries, and seconds of a round trip."""

FRONT_S, BESIDE_S, STAGE_S, TOLD_BYTES = 0.003, 0.004, 0.05, 5000

PACK_S, UNPACK_S = 2e-8, 1e-8
"""Seconds per byte."""


@pytest.fixture(autouse=True)
def packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upriver.inference.server_check.packing", lambda: (PACK_S, UNPACK_S))


@pytest.fixture(scope="module")
def captured() -> CapturedModel:
    """Return a network whose answer is larger than its input, as of a network that classifies every pixel."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2000, 100), nn.ReLU(), nn.Linear(100, 80_000))
    return capture_whole(model, Example.of(torch.randn(2, 2000)))


def request(captured: CapturedModel, cut: int, *, up: float = UP, k: float = 1.0) -> ExchangeResult:
    """Return a finished request whose seconds follow from the definition."""
    program = captured.program
    crossing, answer = crossing_bytes(program, cut), crossing_bytes(program, program.num_stages)
    stages = {at: k * STAGE_S for at in range(cut + 1, program.num_stages + 1)}
    phases = {"receive": crossing / up, "queue": 0.001, "forward": sum(stages.values()), "encode": BESIDE_S}
    there_s = sum(phases.values()) - phases["receive"]
    down_s = (answer + TOLD_BYTES) / DOWN
    up_s = crossing / up + RTT_S + FRONT_S + (PACK_S + UNPACK_S) * crossing
    return ExchangeResult(
        tensors=(),
        timings=Timings(phases=phases, stages=stages),
        took_s=up_s + there_s + down_s,
        down_s=down_s,
        down_bytes=answer + TOLD_BYTES,
    )


def link_of(up: float = UP) -> LinkEstimator:
    link = LinkEstimator.of_requests()
    link.add_transfer(1, RTT_S)
    link.add_transfer(1e5, RTT_S + 1e5 / up)
    return link


@pytest.fixture
def far(captured: CapturedModel) -> Iterator[RemoteServer]:
    """Return an admitted server that gets no requests."""
    program = captured.program
    narrowest = 1
    handling = handling_of(program, narrowest, [request(captured, narrowest)] * 2, link_of())
    stages = program.num_stages
    far = RemoteServer(ServerClient("http://127.0.0.1:9"), OffloadTuning(), agreement=bitwise())
    far._thread = SimpleNamespace(ident=1, join=lambda: None)  # type: ignore[assignment]
    far.serve(captured, (1.0,) * stages)
    far._costs[program.digest] = CutCosts(
        program=program, device_s=(1.0,) * stages, server_s=(STAGE_S,) * stages, handling=handling
    )
    far._looked_up = {(program.digest, cut) for cut in range(stages)}
    far._client.meter.observed_bandwidth = lambda: DOWN  # type: ignore[method-assign]
    far.link = link_of()
    yield far
    far.close()


def test_an_answer_is_fetched_once(captured: CapturedModel, far: RemoteServer) -> None:
    costs = far.costs(captured)
    assert costs is not None
    now = far.now(costs)
    assert now is not None
    predicted = ESTIMATES["inference"](costs.sums, now)
    for cut in range(captured.program.num_stages):
        wanted = cut + request(captured, cut).took_s - 0.001  # no other request is there this time
        assert predicted[cut] == pytest.approx(wanted)
    assert predicted[-1] == captured.program.num_stages


@pytest.mark.parametrize("up", [UP / 8, UP, 8 * UP])
def test_what_is_no_transfer_is_no_part_of_the_links_rate(
    captured: CapturedModel, far: RemoteServer, up: float
) -> None:
    """Requests show the link's rate to the bit, and their other costs stay the same on another link."""
    for _ in range(3):
        far.answered(captured, 0, request(captured, 0, up=up))
    assert far.link.bandwidth() == pytest.approx(up)
    costs = far.costs(captured)
    assert costs is not None
    now = far.now(costs)
    assert now is not None
    assert ESTIMATES["inference"](costs.sums, now)[0] == pytest.approx(
        request(captured, 0, up=up).took_s - 0.001
    )


def test_each_network_has_what_its_own_requests_take(captured: CapturedModel, far: RemoteServer) -> None:
    own = far.costs(captured)
    assert own is not None
    other = CutCosts(
        program=own.program, device_s=own.device_s, server_s=own.server_s, handling=HandlingTimes(front_s=7.0)
    )
    first, second = far.now(own), far.now(other)
    assert first is not None and second is not None
    assert second.rtt_s == pytest.approx(RTT_S + 7.0)
    assert first.rtt_s == pytest.approx(RTT_S + FRONT_S + BESIDE_S + TOLD_BYTES / DOWN)


def test_wide_cuts_are_packed_and_unpacked(captured: CapturedModel, far: RemoteServer) -> None:
    costs = far.costs(captured)
    assert costs is not None
    wanted = [(PACK_S + UNPACK_S) * crossing_bytes(captured.program, cut) for cut in range(3)]
    assert costs.sums.handling_s.tolist() == pytest.approx([*wanted, 0.0])


def test_packing_takes_no_less_than_nothing() -> None:
    encode_s, decode_s = packing()
    assert 0 <= encode_s < math.inf and 0 <= decode_s < math.inf


def test_what_an_accelerator_still_computes_when_it_is_called_is_the_device_s_time(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor fetch waits for all earlier work on the accelerator."""
    late_s, fetch, clock = 0.0, torch.Tensor.cpu, SimpleNamespace(perf_counter=lambda: late_s)

    def fetched(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal late_s
        late_s += 7.0
        return fetch(tensor)

    x = torch.randn(2, 64)
    with upriver.offload(chain(), example_inputs=x, servers=[server.url], cut=3, **SELDOM) as answer:
        monkeypatch.setattr(request_module, "time", clock)
        monkeypatch.setattr(torch.Tensor, "cpu", fetched)
        assert torch.equal(answer(x), here(chain(), x))
        assert answer.last is not None and answer.last.server == server.url
        assert answer.last.device_s == 7.0
        answer._patience = replace(answer._patience, deadline_s=5.0)
        assert torch.equal(answer(x), here(chain(), x))
        assert answer.last.server == "" and "deadline" in answer.last.why_not
