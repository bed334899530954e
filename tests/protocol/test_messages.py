"""Check what a request's fields say together."""

from __future__ import annotations

from typing import Any

import pytest

from upriver.errors import ProtocolError
from upriver.protocol.caps import DEFAULT_CAPS
from upriver.protocol.messages import CodeRef, Collate, DatasetRef, RunRequest
from upriver.types import DONE, RAW, START

DATASET = DatasetRef(store="default", digest="0" * 64)


def request(**fields: Any) -> RunRequest:
    found = RunRequest(**{"micro_batches": ((1,), (2,)), "micro_batch": 1, "stop": 0, **fields})
    found.check(DEFAULT_CAPS)
    return found


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({"start": 0}, True),
        ({"start": -2, "dataset": DATASET}, False),
        ({"start": -2, "dataset": DATASET, "given": True}, True),
        ({"start": START, "stop": DONE, "code": CodeRef(name="birds:Birds")}, False),
        ({"start": RAW, "stop": DONE, "code": CodeRef(name="birds:Birds")}, True),
    ],
)
def test_inputs_come_along_unless_the_server_can_read_them(fields: dict[str, Any], sent: bool) -> None:
    assert request(**fields).sent is sent


def test_each_batch_that_code_collates_has_a_number() -> None:
    def collated(*numbers: int) -> RunRequest:
        code = CodeRef(name="birds:Birds", collate=Collate(name="default", batches=numbers))
        return request(start=START, stop=DONE, code=code)

    assert collated(3, 4).code is not None
    with pytest.raises(ProtocolError, match="each of 2 batches has a number, got 1"):
        collated(3)
