"""Test processes of the benchmark of load-aware split inference: the slow device, and background load."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from benchmarks.harness.children import module_command
from benchmarks.harness.loadpart_networks import NAMED, model_of, paper_numbers
from benchmarks.load_aware import job as load_job
from benchmarks.load_aware.job import RULES, Device, OneWay, Slowness
from benchmarks.load_aware.schedule import FULL, OURS, steady_cut
from upriver.program.capture.prefix import capture
from upriver.program.graph.executor import Program
from upriver.program.models.loadpart_nodes import paper_nodes
from upriver.rpc.local_server import EmbeddedServer


class Clock:
    """Clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


# ---------------------------------------------------------------------------------------------- networks


@pytest.mark.full
def test_the_cuts_that_the_paper_names_are_found() -> None:
    model, x = model_of("alexnet")
    program = capture(model, x, granularity="op")
    numbers = paper_numbers(program.stages, paper_nodes(model, x))
    named = {number: cut for cut, number in numbers.items() if number in NAMED["alexnet"]}
    assert {number: program.stages[cut - 1].name for number, cut in named.items()} == {
        4: "features.2: max_pool2d",
        8: "features.5: max_pool2d",
        19: program.stages[named[19] - 1].name,
    }
    assert [program.stages[named[number] - 1].out_bytes for number in (4, 8, 19)] == [186624, 129792, 36864]
    assert numbers[0] == 0 and list(numbers.values()) == sorted(set(numbers.values()))


# ---------------------------------------------------------------------------------------- background load


@pytest.fixture
def background() -> Iterator[subprocess.Popen[str]]:
    command = module_command("load_aware.background", "60")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    assert json.loads(process.stdout.readline()) == {"ready": True}
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


@pytest.mark.parametrize("share", ["", "0.3", "1"])
def test_background_load_ends_when_nobody_gives_orders(background: subprocess.Popen[str], share: str) -> None:
    assert background.stdin is not None
    background.stdin.write(f"{share}\n" if share else "")
    background.stdin.close()
    assert background.wait(timeout=60) == 0


def test_background_load_ends_by_itself() -> None:
    command = module_command("load_aware.background", "0.2")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and json.loads(out) == {"ready": True}


# ---------------------------------------------------------------------------------------------- the device


class Small(nn.Module):
    """Network that needs no time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=2)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(36, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.pool(self.conv(images).relu()).flatten(1))
        return found


def small_model(_: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Small().eval(), torch.randn(1, 3, 14, 14)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(load_job.time, "perf_counter", clock)
    monkeypatch.setattr(load_job.time, "sleep", clock.sleep)
    return clock


def test_a_slow_device_sleeps_the_rest_of_each_stages_time(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Program, "run", Program.run)  # restored afterwards
    model, x = small_model("")
    program, other = (capture(model, x, granularity="op") for _ in range(2))
    wanted = program.run((x,), 0, program.num_stages)
    slowness = Slowness(program, [0.1] * program.num_stages, 20.0)
    slowness.begin()
    told: list[tuple[int, float]] = []
    given = program.run((x,), 0, 2, on_stage=lambda position, seconds: told.append((position, seconds)))
    assert clock.now == pytest.approx(4.0) and told == [(1, 2.0), (2, 2.0)]
    assert torch.equal(program.run(given, 2, program.num_stages)[0], wanted[0])
    assert clock.now == pytest.approx(2.0 * program.num_stages)
    with slowness.away():
        program.run((x,), 0, 2)
    other.run((x,), 0, 2)
    assert clock.now == pytest.approx(2.0 * program.num_stages)


def test_what_is_too_short_to_sleep_is_slept_later(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Program, "run", Program.run)
    naps: list[float] = []
    monkeypatch.setattr(load_job.time, "sleep", lambda seconds: (naps.append(seconds), clock.sleep(seconds)))
    model, x = small_model("")
    program = capture(model, x, granularity="op")
    Slowness(program, [1e-6] * program.num_stages, 20.0).begin()
    program.run((x,), 0, program.num_stages)
    assert naps == [pytest.approx(20e-6 * program.num_stages)]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    """Yield a device in this process, which computes with as many threads as its server."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    store = tmp_path_factory.mktemp("store").as_uri()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "run", Program.run)
        patch.setattr(load_job, "model_of", small_model)
        patch.setenv("UPRIVER_TOKEN", "token")
        patch.setenv("UPRIVER_CACHE", str(tmp_path_factory.mktemp("cache")))
        server = EmbeddedServer.start({"default": store}, threads=1, workers=1, token="token")
        made = Device({"network": "small", "factor": 2.0, "url": server.url, "store": store})
        for way in (*RULES, "cut 2"):
            assert made.open(way) == {"new": True}
        yield made
        made.end()
        server.close()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("way", [*RULES, "cut 2"])
@pytest.mark.full
def test_every_way_gives_the_local_models_answer(device: Device, way: str) -> None:
    for number in range(5):
        told = device.request(way, number)
        assert told["equal"] and told["why"] == ""
        cut = steady_cut(way, device.program.num_stages)
        assert cut in (None, told["cut"])
        assert told["link_s"] > 0 or told["cut"] == device.program.num_stages
    assert json.loads(json.dumps(told)) == told
    assert device.open(way) == {"new": False}


@pytest.mark.full
def test_a_device_tells_of_its_network_and_of_likely_cuts(device: Device) -> None:
    facts = device.facts()
    assert facts["stages"] == device.program.num_stages and facts["device_s"] > 0 < facts["server_s"]
    found = device.likely([0.1, 1000.0], [1.0, 8.0])
    assert found["named"] == [] and all(0 < cut < device.program.num_stages for cut in found["cuts"])
    assert device.decide(OURS, 3)["seconds"] > 0


@pytest.mark.full
def test_an_answer_that_differs_is_noticed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_answers", [each + 1 for each in device._answers])
    assert not device.request(OURS, 0)["equal"]


@pytest.mark.full
def test_no_probe_runs_into_another_ways_request(device: Device) -> None:
    probing = threading.Thread(target=device._fars[OURS]._client.probe_upload, args=(1,))
    with device._link.of(FULL):
        probing.start()
        probing.join(0.2)
        assert probing.is_alive(), "it waits"
    probing.join(60)
    assert not probing.is_alive()


@pytest.mark.full
def test_a_probe_that_was_held_up_does_not_begin_during_its_own_ways_request(device: Device) -> None:
    probing = threading.Thread(target=device._fars[OURS]._client.probe_upload, args=(1,))
    with device._link.of(OURS):
        with device._link.of(OURS, request=True):
            probing.start()
            probing.join(0.2)
            assert probing.is_alive(), "it waits"
        probing.join(60)
        assert not probing.is_alive(), "it waits for nothing else of its way"


@pytest.mark.full
def test_a_request_begins_during_its_own_ways_probe() -> None:
    link = OneWay()
    with link.of(OURS, probe=True), link.of(OURS, request=True):
        pass


@pytest.mark.full
def test_a_way_has_the_link_until_all_that_belongs_to_it_is_over() -> None:
    link, others = OneWay(), threading.Event()

    def other() -> None:
        with link.of(FULL):
            others.set()

    waiting = threading.Thread(target=other)
    with link.of(OURS):
        with link.of(OURS):
            waiting.start()
        assert not others.wait(0.2)
    waiting.join(60)
    assert others.is_set()
    with link.of(OURS):
        pass
