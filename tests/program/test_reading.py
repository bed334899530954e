"""Graph and weights files from anyone: typed errors, nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from upriver.errors import ProgramError
from upriver.program import Program, capture
from upriver.program import weights as weights_file
from upriver.program.calls import check_call
from upriver.program.operators import ALLOWED, resolve
from upriver.program.reading import decode

torch.manual_seed(0)
PROGRAM = capture(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)), (torch.randn(3, 6),))
GRAPH = json.loads(PROGRAM.graph_bytes)


def edited(edit: Callable[[Any], object]) -> bytes:
    graph = json.loads(PROGRAM.graph_bytes)
    edit(graph)
    return msgspec.json.encode(graph)


EDITS: dict[str, Callable[[Any], object]] = {
    "schema": lambda g: g.update(schema="upriver.program/3"),
    "unknown field": lambda g: g.update(code="import os"),
    "missing field": lambda g: g.pop("stages"),
    "forbidden operator": lambda g: g["nodes"][0].update(op="as_strided.default"),
    "random operator": lambda g: g["nodes"][0].update(op="bernoulli.p"),
    "in-place operator": lambda g: g["nodes"][1].update(op="relu_.default"),
    "no such operator": lambda g: g["nodes"][0].update(op="os.system"),
    "unknown tensor": lambda g: g["nodes"][0].update(args=[{"tensor": "nowhere"}]),
    "read before made": lambda g: g["nodes"].reverse(),
    "made twice": lambda g: g["nodes"][1]["outputs"][0].update(name=g["nodes"][0]["outputs"][0]["name"]),
    "wrong shape": lambda g: g["nodes"][0]["outputs"][0]["spec"].update(shape=[3, 5]),
    "negative size": lambda g: g["nodes"][0]["outputs"][0]["spec"].update(shape=[-3, 4]),
    "huge tensor": lambda g: g["inputs"][0]["spec"].update(shape=[1 << 40, 6]),
    "unknown type": lambda g: g["inputs"][0]["spec"].update(dtype="object"),
    "strides too few": lambda g: g["inputs"][0]["spec"].update(stride=[1]),
    "micro_batch 0": lambda g: g.update(micro_batch=0),
    "no stages": lambda g: g.update(stages=[]),
    "stages end early": lambda g: g["stages"].pop(),
    "stages out of order": lambda g: g["stages"][0].update(stop=2),
    "cut ships nothing": lambda g: g["stages"][0].update(live=[]),
    "cut ships the unknown": lambda g: g["stages"][0]["live"].append("nowhere"),
    "cut ships a weight": lambda g: g["stages"][0]["live"].append(g["weights"][0]["name"]),
    "cut ships what comes later": lambda g: g["stages"][0]["live"].append(
        g["nodes"][2]["outputs"][0]["name"]
    ),
    "cut ships twice": lambda g: g["stages"][0]["live"].append(g["stages"][0]["live"][0]),
    "weight of another shape": lambda g: g["weights"][0]["spec"].update(shape=[6, 4, 2]),
    "weight that is not there": lambda g: g["weights"][0].update(key="other"),
    "argument of no known form": lambda g: g["nodes"][0].update(args=[{"eval": "1+1"}]),
    "too few arguments": lambda g: g["nodes"][0].update(args=[]),
}


@pytest.mark.parametrize("what", sorted(EDITS))
def test_a_graph_that_is_not_as_it_says_is_refused(what: str) -> None:
    with pytest.raises(ProgramError):
        Program.from_bytes(edited(EDITS[what]), PROGRAM.weights_bytes)


def test_the_unedited_graph_is_accepted() -> None:
    assert Program.from_bytes(edited(lambda graph: None), PROGRAM.weights_bytes).num_stages == 3


def test_every_allowed_operator_exists_and_none_is_random_or_in_place() -> None:
    for name in sorted(ALLOWED):
        operator = resolve(name)
        random = any("nondeterministic" in str(tag) for tag in operator.tags)
        assert not operator._schema.is_mutable, name
        assert not random or name == "scaled_dot_product_attention.default", name


def test_attention_with_dropout_is_refused() -> None:
    for args, kwargs in (([0, 0, 0, None, 0.1], {}), ([0, 0, 0], {"dropout_p": 0.5})):
        with pytest.raises(ProgramError, match="random"):
            check_call("scaled_dot_product_attention.default", args, kwargs)
    check_call("scaled_dot_product_attention.default", [0, 0, 0], {"dropout_p": 0.0})


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(leaf for key, item in items for leaf in leaves(item, (*path, key)))]


SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
FLAT = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=6), SCALARS, max_size=3)
JSON = FLAT | st.lists(FLAT, max_size=3)


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from(leaves(GRAPH)[1:]), value=JSON)
def test_a_mutated_graph_gives_a_typed_error_or_a_program(path: tuple[Any, ...], value: Any) -> None:
    graph = json.loads(PROGRAM.graph_bytes)
    place = graph
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    try:
        Program.from_bytes(msgspec.json.encode(graph), PROGRAM.weights_bytes)
    except ProgramError:
        return


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, len(PROGRAM.weights_bytes) - 1), byte=st.integers(0, 255), cut=st.booleans())
def test_a_mutated_weights_file_gives_a_typed_error_or_tensors(place: int, byte: int, cut: bool) -> None:
    data = bytearray(PROGRAM.weights_bytes)
    data[place] = byte
    kept = data[:place] if cut else data
    try:
        weights_file.decode(
            torch.frombuffer(kept, dtype=torch.uint8) if kept else torch.empty(0, dtype=torch.uint8)
        )
    except ProgramError:
        return


def test_deep_nesting_is_an_error_not_a_crash() -> None:
    with pytest.raises(ProgramError):
        decode(b"[" * 100_000)
    deep: Any = "x"
    for _ in range(500):
        deep = [deep]
    with pytest.raises(ProgramError):
        Program.from_bytes(edited(lambda g: g["nodes"][0].update(args=deep)), PROGRAM.weights_bytes)


def test_encoding_is_canonical() -> None:
    assert decode(PROGRAM.graph_bytes).encode() == PROGRAM.graph_bytes
    assert msgspec.json.decode(PROGRAM.graph_bytes)["schema"] == "upriver.program/2"
