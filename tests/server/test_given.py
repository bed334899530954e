"""Test samples that are sent along, from any position before the model to any other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.pipeline.making import encoded, pixels, write
from tests.server.running import answering, body_of, changed, messages, refused, run, running
from upriver.engine.engine import Engine
from upriver.errors import ProtocolError
from upriver.pipeline import Dataset, Decode, Normalize, RandomResizedCrop, index
from upriver.protocol import DatasetRef, RunRequest
from upriver.types import MicroBatch

IDS = (3, 1, 2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    files = {f"a/{each}.png": encoded(pixels(40, 50, each), "PNG") for each in range(5)}
    stages = [Decode(), RandomResizedCrop(16), Normalize()]
    dataset = index(write(tmp_path_factory.mktemp("given"), files), stages=stages)
    dataset.publish()
    return dataset


@pytest.fixture(scope="module")
def server(data: Dataset) -> Iterator[Any]:
    with running(data.store.uri, workers=1) as server:
        server.wait_ready()
        yield server


def request(data: Dataset, start: int, stop: int, **fields: Any) -> RunRequest:
    return changed(
        RunRequest(
            micro_batches=(IDS, IDS[:1]),
            start=start,
            stop=stop,
            micro_batch=3,
            dataset=DatasetRef(store="default", digest=data.digest),
            given=True,
            seed=5,
            epoch=1,
        ),
        **fields,
    )


def here(data: Dataset, ids: tuple[int, ...], position: int) -> MicroBatch:
    places = data.locate(ids)
    return Engine(chain=data.chain, program=None, micro_batch=3).begin(
        [data.store.get(place.object) for place in places],
        ids,
        object_names=[place.object for place in places],
        stop=position,
        seed=5,
        epoch=1,
    )


@pytest.mark.parametrize(("start", "stop"), [(a, b) for a in range(-3, 0) for b in range(a, 1)])
@pytest.mark.full
def test_they_come_out_as_those_that_are_read_there(
    data: Dataset, server: Any, start: int, stop: int
) -> None:
    sent = [here(data, ids, start) for ids in (IDS, IDS[:1])]
    found = run(server, request(data, start, stop), sent)
    for batch, ids in zip(found, (IDS, IDS[:1]), strict=True):
        wanted = here(data, ids, stop)
        assert (batch.ids, batch.position) == (ids, stop)
        assert len(batch.tensors) == len(wanted.tensors)
        assert all(map(torch.equal, batch.tensors, wanted.tensors))


NONSENSE = [
    torch.zeros(0, dtype=torch.uint8),
    torch.zeros(()),
    torch.zeros(7, 7, 3),
    torch.zeros(7, 7, 4, dtype=torch.uint8),
    torch.full((3, 2, 2), float("nan"), dtype=torch.float64),
    torch.zeros(5, dtype=torch.complex64),
    torch.zeros(1, 1, 1, 1, 3, dtype=torch.uint8),
    torch.zeros(0, 0, 3, dtype=torch.uint8),
    torch.zeros(3, dtype=torch.bool),
]


@pytest.mark.parametrize("value", NONSENSE, ids=lambda value: f"{value.dtype} {tuple(value.shape)}")
@pytest.mark.parametrize("start", [-3, -2, -1])
def test_what_cannot_stand_there_is_an_error_of_the_client(
    data: Dataset, server: Any, start: int, value: torch.Tensor
) -> None:
    batch = MicroBatch(ids=(1,), position=start, tensors=(value,))
    ask = request(data, start, 0, micro_batches=((1,),), micro_batch=1)
    with answering(server, ask, [batch]) as response:
        (error,) = messages(response)
    assert error.code in ("bad_sample", "protocol"), error
    sent = here(data, IDS[:1], start)
    assert len(run(server, changed(ask, micro_batches=(IDS[:1],)), [sent])) == 1
    assert server.metric("upriver_worker_restarts_total") == 0


def test_requests_that_cannot_be_meant(data: Dataset, server: Any) -> None:
    sent = [here(data, ids, -2) for ids in (IDS, IDS[:1])]
    good = request(data, -2, 0)
    for fields, code in (
        ({"dataset": None}, "protocol"),
        ({"start": 0, "stop": 0}, "protocol"),
        ({"start": -4}, "protocol"),
        ({"stop": -3}, "protocol"),
        ({"dataset": DatasetRef(store="default", digest="0" * 64)}, "not_found"),
        ({"dataset": DatasetRef(store="other", digest=data.digest)}, "not_found"),
        ({"micro_batches": ((3, 1, 77), (3,))}, "protocol"),
    ):
        ask = changed(good, **fields)
        batches = [
            MicroBatch(ids=ids, position=ask.start, tensors=batch.tensors)
            for ids, batch in zip(ask.micro_batches, sent, strict=True)
        ]
        _status, error = refused(server, body_of(ask, *batches))
        assert error["code"] == code, (fields, error)
    few = [MicroBatch(ids=IDS, position=-2, tensors=sent[0].tensors[:2]), sent[1]]
    _status, error = refused(server, body_of(good, *few))
    assert error["code"] == "protocol" and "a tensor for each" in error["message"]


def test_a_request_says_so_before_it_is_sent(data: Dataset) -> None:
    with pytest.raises(ProtocolError, match="before the end of its chain"):
        request(data, 0, 0).check(_caps())


def _caps() -> Any:
    from upriver.protocol import DEFAULT_CAPS

    return DEFAULT_CAPS
