"""Run a thousand loads from a faulty store: the right answer or a typed error, and nothing left behind."""

from __future__ import annotations

import gc
import logging
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from tests.coldstart.leaving import num_descriptors, threads
from tests.coldstart.networks import NETWORKS, answer
from tests.server.running import wait_for
from tests.store.faulty_server import FaultyServer, _Faulty
from upriver import coldstart
from upriver.coldstart.fetch.stream_limits import StreamLimits
from upriver.coldstart.format.manifest import publish
from upriver.coldstart.load_model import loading
from upriver.errors import UpriverError
from upriver.store import Store

FAULTS = ("cut", "reset", "stalled", "silent", "flipped", "short", "changed", "gone", 403, 404, 503)
BROKEN = ("stalled", "flipped", "short", "reset")
"""Faults that may be permanent."""

GROUPINGS = ("upriver", "pisel", "layer_by_layer")
NAMES = ("encoder", "bare", "tied")
AT_ONCE, CALLERS = 4, 3
WAIT_S = 60.0


LOSES = 10
"""One run in this many has no manifest, and another one may be told that it has none."""


LOST, FAULTY = 1, (2, 3)
"""The run in every ``LOSES`` whose manifest may be missing, and those with other manifest faults.

Most faults hit weights, because a load with a broken manifest requests no weights.
"""


class BadDay(FaultyServer):
    """A server that loses manifests in few runs: without a manifest wrong bits pass, with a warning."""

    def __init__(self) -> None:
        super().__init__()
        self.RequestHandlerClass = _BadDay


class _BadDay(_Faulty):
    def _fault(self) -> int | str | None:
        run = re.search(r"/run-(\d+)\.manifest\.json$", self.path)
        if run and int(run[1]) % LOSES not in (LOST, *FAULTY):
            return None
        fault = super()._fault()
        if run and int(run[1]) % LOSES != LOST and (fault == 404 or self.fault_now == "gone"):
            fault = self.fault_now = None
        return fault


class Told(logging.Handler):
    """Collect the runs that loaded a published file without its manifest, from the logged warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Record the run."""
        if "laid out as published files are" in record.getMessage():
            self.runs |= set(re.findall(r"run--?\d+(?=\.manifest)", record.getMessage()))


@pytest.fixture
def told() -> Iterator[Told]:
    handler, logger = Told(), logging.getLogger("upriver.coldstart.format.checkpoint")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def connected(server: FaultyServer, *, patience_s: float = 0.2) -> Store:
    options = {
        "endpoint": server.url,
        "access_key_id": "KEY",
        "secret_access_key": "SECRET",
        "max_retries": "1",
        "read_timeout_s": str(patience_s),
    }
    return Store.open("s3://bucket/p", options=options)


class Weights:
    """Weights of a model in a store; each run reads its own copy."""

    def __init__(self, name: str, server: FaultyServer, store: Store) -> None:
        self.build, make = NETWORKS[name]
        self.arguments = make()
        torch.manual_seed(31)
        model = self.build().eval()
        publish(model.state_dict(), store, f"{name}.safetensors", chunk_bytes=1024)
        self.right = answer(model, self.arguments)
        prefix = f"bucket/p/{name}."
        self._objects = {
            path.removeprefix(prefix): content
            for path, content in server.objects.items()
            if path.startswith(prefix)
        }

    def put(self, server: FaultyServer, run: str, *, without: str = "") -> None:
        with server.lock:
            server.objects |= {
                f"bucket/p/{run}.{ending}": body
                for ending, body in self._objects.items()
                if ending != without
            }

    def is_right(self, found: list[torch.Tensor]) -> bool:
        return len(found) == len(self.right) and all(map(torch.equal, found, self.right))


@pytest.mark.parametrize(
    ("num_runs", "wanted", "num_told"),
    [
        (30, {"right", "store"}, 0),  # which other tensors are among the few depends on timing
        pytest.param(
            1000, {"right", "store", "cancelled", "object_changed", "not_found"}, 11, marks=pytest.mark.full
        ),
    ],
)
def test_every_caller_gets_the_right_answer_or_one_typed_error(
    num_runs: int, wanted: set[str], num_told: int, told: Told, capfd: pytest.CaptureFixture[str]
) -> None:
    a_bad_day(1, told)  # set up once per process
    gc.collect()
    before = num_descriptors()
    ends = a_bad_day(num_runs, told)
    assert ends.total() == num_runs
    assert len(told.runs) >= num_told
    assert wanted <= set(ends), ends
    wait_for(lambda: not threads(), seconds=WAIT_S)

    def none_is_left() -> bool:
        gc.collect()  # also the objects that a thread held until it ended just now
        return num_descriptors() <= before

    wait_for(none_is_left, seconds=WAIT_S)
    assert "Traceback" not in capfd.readouterr().err


def a_bad_day(num_runs: int, told: Told) -> Counter[str]:
    """Return how that many loads ended; the store is correct at the end, and then is gone."""
    with BadDay() as server:
        store, patient = connected(server), connected(server, patience_s=WAIT_S)
        known = [Weights(name, server, patient) for name in NAMES]

        def run(number: int) -> str:
            chance = random.Random(number)
            faults: list[Any] = chance.choices(FAULTS, k=chance.randint(0, 3))
            if chance.random() < 0.1:
                faults += [chance.choice(BROKEN)] * 12
            return one_load(number, server, store, chance.choice(known), told, faults=faults)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            ends = Counter(pool.map(run, range(1, num_runs + 1)))
        server.faults.clear()
        ends_well = [
            one_load(-1 - at, server, patient, each, told, faults=[]) for at, each in enumerate(known)
        ]
        assert ends_well == ["right"] * len(known)
    return ends


def one_load(
    number: int, server: FaultyServer, store: Store, weights: Weights, told: Told, *, faults: list[Any]
) -> str:
    """Load, and ask from several threads, with a cancel at times; return how each of them ended."""
    chance, run = random.Random(f"load {number}"), f"run-{number}"
    weights.put(server, run, without="" if number % LOSES else "manifest.json")
    with server.lock:
        server.faults += faults
    limits = StreamLimits(
        request_bytes=chance.choice((2048, 20_000)),
        in_flight_bytes=40_000,
        concurrency=3,
        timeout_s=0.5 if number > 0 else WAIT_S,
    )
    try:
        model, handle = coldstart.begin(
            weights.build, run, store=store, grouping=chance.choice(GROUPINGS), limits=limits
        )
        model.eval()
    except UpriverError as error:
        return error.code
    cancels = threading.Timer(chance.random() * 0.02, handle.cancel)
    if number > 0 and chance.random() < 0.15:
        cancels.start()
    with ThreadPoolExecutor(CALLERS) as pool:
        asked = [pool.submit(_asked, model, weights.arguments) for _ in range(CALLERS)]
    cancels.cancel()
    if cancels.ident is not None:
        cancels.join()
    found = [each.result() for each in asked]
    warned = run in told.runs
    assert warned or number % LOSES
    assert all(isinstance(each, UpriverError) or warned or weights.is_right(each) for each in found)
    try:
        assert handle.wait(WAIT_S)
    except UpriverError as error:
        # Answers before the failure were right; no caller is answered afterwards.
        assert {each.code for each in found if isinstance(each, UpriverError)} <= {error.code}
        later = _asked(model, weights.arguments)
        assert isinstance(later, UpriverError) and later.code == error.code
        return error.code
    assert all(isinstance(each, list) for each in found)
    assert loading(model) is None
    assert weights.is_right(answer(model, weights.arguments)) or warned
    return "right"


def _asked(model: nn.Module, arguments: Mapping[str, Any]) -> list[torch.Tensor] | UpriverError:
    try:
        return answer(model, arguments)
    except UpriverError as error:
        return error
