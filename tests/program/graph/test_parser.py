"""Check that untrusted graph and weights files raise typed errors, and nothing else."""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.examples import examples, some
from upriver.errors import ProgramError
from upriver.program.capture.prefix import capture
from upriver.program.graph import weights_file
from upriver.program.graph.artifact_paths import digest_of
from upriver.program.graph.artifact_store import load, publish
from upriver.program.graph.call_validator import check_call
from upriver.program.graph.caps import GraphCaps
from upriver.program.graph.executor import Program
from upriver.program.graph.operators import ALLOWED, fingerprints, resolve
from upriver.program.graph.parser import decode
from upriver.program.graph.schema import SCHEMA, Lifetimes, Node, TensorSpec, Value, constants
from upriver.program.graph.validator import check
from upriver.store import Store

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
    "no device": lambda g: g.pop("device"),
    "micro_batch 0": lambda g: g.update(micro_batch=0),
    "no stages": lambda g: g.update(stages=[]),
    "stages end early": lambda g: g["stages"].pop(),
    "stages out of order": lambda g: g["stages"][0].update(stop=2),
    "stage with a long name": lambda g: g["stages"][0].update(name="x" * 2000),
    "stage of no finite cost": lambda g: g["stages"][0].update(peak_bytes=-1.0),
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


def refused(graph: bytes, words: str, **options: Any) -> None:
    with pytest.raises(ProgramError, match=words):
        Program.from_bytes(graph, options.pop("weights", PROGRAM.weights_bytes), **options)


def test_another_schema_an_unknown_operator_and_another_version_of_one_are_refused_by_name() -> None:
    newer = edited(lambda g: g.update(schema="upriver.program/3", more_fields=1))
    refused(newer, "graph schema 'upriver.program/3'; this version reads 'upriver.program/2'")

    def rename(g: Any) -> None:
        g["nodes"][0]["op"] = "linear2.default"

    refused(edited(rename), "'linear2.default' is not allowed")
    changed = edited(lambda g: g["operators"].update({"relu.default": "0123456789abcdef"}))
    refused(changed, "'relu.default' has another signature in torch .* than where .*0123456789abcdef")
    refused(edited(lambda g: g["operators"].pop("relu.default")), "'relu.default' is used and not among")
    refused(edited(lambda g: g["operators"].update({"tanh.default": "0"})), "'tanh.default' is not used")


def test_one_graph_has_one_spelling() -> None:
    refused(PROGRAM.graph_bytes + b" ", "not written as this version writes it")
    twice = PROGRAM.graph_bytes.replace(b'"micro_batch":3', b'"micro_batch":4,"micro_batch":3', 1)
    assert json.loads(twice) == GRAPH
    refused(twice, "not written as")


def test_digests_are_checked() -> None:
    refused(PROGRAM.graph_bytes, "graph.json has digest", digest="0" * 64)
    data = bytearray(PROGRAM.weights_bytes)
    data[-1] ^= 1
    refused(PROGRAM.graph_bytes, "the weights file has digest", weights=bytes(data))


CAPPED = {
    "graph_bytes": "graph of .* bytes",
    "nodes": "nodes must lie in 0..",
    "tensors": "tensors must lie in 0..",
    "stages": "stages must lie in 1..",
    "arguments": "more than .* arguments",
    "depth": "nested deeper than",
    "text": "a text of .* characters",
    "dimensions": "at most 1 of each",
    "micro_batch": "micro_batch must lie in 1..2",
    "tensor_bytes": "takes .* bytes, at most",
    "live_bytes": "would be alive at once",
    "flops": "operations allowed",
    "weights_bytes": "a weights file has 1..",
    "header_bytes": "weights header of",
    "header_entries": "table of at most",
}


@functools.cache
def catting() -> tuple[bytes, memoryview]:
    program = capture(Catting(), (torch.randn(3, 6),), granularity="op")
    return program.graph_bytes, program.weights_bytes


@pytest.mark.parametrize("cap", [field.name for field in fields(GraphCaps)])
def test_every_cap_is_kept_and_named(cap: str) -> None:
    files = catting()
    Program.from_bytes(*files)
    small = {"depth": 0, "micro_batch": 2, "flops": 10.0, "dimensions": 1, "tensor_bytes": 15}.get(cap, 2)
    with pytest.raises(ProgramError, match=CAPPED[cap]):
        Program.from_bytes(*files, caps=replace(GraphCaps(), **{cap: small}))


class Catting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        return self.second(torch.cat([x, x], 1))


def test_every_allowed_operator_exists_and_none_is_random_or_in_place() -> None:
    for name in sorted(ALLOWED):
        operator = resolve(name)
        random = any("nondeterministic" in str(tag) for tag in operator.tags)
        assert not operator._schema.is_mutable, name
        assert not random or name == "scaled_dot_product_attention.default", name


# ----------------------------------------------------------------------------- harmful operators


def one_node(
    op: str,
    args: list[Any],
    shape: list[int] | None = None,
    *,
    kwargs: dict[str, Any] | None = None,
    results: int = 1,
    dtype: str = "float32",
) -> bytes:
    """Return a graph of input ``x`` (float32, 2 x 4), ``extra`` inputs, and one call of stated ``shape``."""
    spec = {"dtype": dtype, "shape": shape or [2, 4], "stride": torch.empty(shape or (2, 4)).stride()}
    outputs: list[Any] = [{"name": f"y{number}", "spec": spec} for number in range(results)]
    stage = {"name": "s", "kind": "k", "stop": 1, "live": ["y0"]}
    given = {"dtype": "float32", "shape": [2, 4], "stride": [4, 1]}
    more = {"row": [2], "one": [1, 1], "wide": [4, 2], "cube": [1, 2, 4]}
    graph = {
        "schema": SCHEMA,
        "micro_batch": 2,
        "device": "cpu",
        "autocast": None,
        "operators": fingerprints([op]),
        "weights_digest": digest_of(NO_WEIGHTS),
        "inputs": [{"name": "x", "spec": given}, *map(named, more, more.values())],
        "weights": [],
        "nodes": [{"op": op, "args": args, "kwargs": kwargs or {}, "outputs": outputs}],
        "stages": [{**stage, "out_bytes": 0.0, "param_bytes": 0, "flops": 0.0, "peak_bytes": 0.0}],
    }
    return msgspec.json.encode(graph)


def named(name: str, shape: list[int]) -> dict[str, Any]:
    stride = list(torch.empty(shape).stride())
    return {"name": name, "spec": {"dtype": "float32", "shape": shape, "stride": stride}}


NO_WEIGHTS = weights_file.encode({})
X, ROW, WIDE, CUBE = ({"tensor": name} for name in ("x", "row", "wide", "cube"))
PAIRS = [f"{a}{b}" for a, b in zip("abcdefghijkl", "mnopqrstuvwx", strict=True)]
HARMFUL: dict[str, tuple[bytes, str]] = {
    "a type as a number": (one_node("to.dtype", [X, 64]), "dtype of to.dtype is a ScalarType, got int"),
    "a mask as an index": (
        one_node("index.Tensor", [X, [X]]),
        "index of torch.float32; allowed are torch.int64",
    ),
    "a million pieces": (one_node("split.Tensor", [X, 1, 1], [2, 1]), "gives 4 results, not 1"),
    "pieces of nothing": (one_node("split.Tensor", [X, 0]), "0 is no number of pieces"),
    "statistics that are written": (
        one_node("batch_norm.default", [X, None, None, X, X, True, 0.1, 1e-5, False]),
        "training of batch_norm.default must be False",
    ),
    "statistics that are written beside": (
        one_node("instance_norm.default", [X, None, None, X, X, True, 0.1, 1e-5, False]),
        "writes into its running statistics",
    ),
    "statistics of too few channels": (
        one_node("_native_batch_norm_legit_no_training.default", [X, None, None, *[ROW] * 2, 0.1, 1e-5]),
        "running_mean of shape \\(2,\\) for 4 channels",
    ),
    "no statistics": (
        one_node("_native_batch_norm_legit.no_stats", [X, None, None, False, 0.1, 1e-5], results=3),
        "neither statistics nor leave to make some",
    ),
    "values of another length": (
        one_node("scaled_dot_product_attention.default", [X, X, WIDE]),
        "keys of shape \\(2, 4\\) for values of \\(4, 2\\)",
    ),
    "a mask of another length": (
        one_node("scaled_dot_product_attention.default", [X, X, X, WIDE]),
        "a mask of shape \\(4, 2\\) for scores of \\(2, 2\\)",
    ),
    "a norm of another length": (
        one_node("_weight_norm.default", [X, {"tensor": "one"}, 1]),
        "g of shape \\(1, 1\\), not \\(1, 4\\)",
    ),
    "a mode that is none": (
        one_node("grid_sampler.default", [X, X, 7, 0, False]),
        "modes \\(7, 0\\), there are 3 of each",
    ),
    "a product of other than integers": (
        one_node("_int_mm.default", [X, WIDE], [2, 2]),
        "matrices of torch.float32 and torch.float32, not int8",
    ),
    "a scale that is not the sizes'": (
        one_node("upsample_nearest1d.default", [CUBE, [2], 1e-9], [1, 2, 2]),
        "a scale of 1e-09 from 4 to 2",
    ),
    "an integer that kernels multiply": (
        one_node("pixel_shuffle.default", [X, 1 << 32]),
        "upscale_factor of .* is 4294967296, at most",
    ),
    "a huge range": (one_node("arange.default", [1 << 40]), "makes a tensor of .* bytes, at most"),
    "a number for a tensor": (
        one_node("to.dtype_layout", [6], kwargs={"device": {"device": "here"}, "pin_memory": False}),
        "gives a int, not a tensor",
    ),
    "a huge fill": (one_node("full.default", [[1 << 20, 1 << 20], 0.0]), "makes a tensor of"),
    "a huge repetition": (one_node("repeat.default", [X, [1 << 20, 1 << 20]]), "makes a tensor of"),
    "more than the integers": (one_node("repeat.default", [X, [1 << 62, 1 << 62]]), "node 0"),
    "a huge detour": (
        one_node("einsum.default", [",".join(PAIRS + PAIRS) + "->", [X] * 24], [1]),
        "makes a tensor of .* bytes, at most",
    ),
    "a huge window": (
        one_node("avg_pool2d.default", [{"tensor": "x"}, [1 << 25, 1 << 25]]),
        "node 0",
    ),
    "another result": (one_node("relu.default", [X], [4, 2]), r"declares float32 \[4, 2\], gives"),
    "another type": (one_node("relu.default", [X], dtype="float64"), "declares float64"),
    "too many results": (one_node("relu.default", [X], results=2), "declares 2 results, gives 1"),
    "unknown arguments": (one_node("relu.default", [X, 1]), "takes the arguments self"),
    "another device": (one_node("_to_copy.default", [{"device": "cuda"}]), "of no known form"),
    "too long an integer": (one_node("add.Scalar", [X, 1 << 64]), "more than 64 bits"),
}


@pytest.mark.parametrize("what", sorted(HARMFUL))
def test_a_call_that_does_harm_is_refused(what: str) -> None:
    graph, words = HARMFUL[what]
    refused(graph, words, weights=NO_WEIGHTS)


def test_strides_are_part_of_what_is_declared() -> None:
    graph = json.loads(one_node("t.default", [X], [4, 2]))
    spec = graph["nodes"][0]["outputs"][0]["spec"]
    refused(msgspec.json.encode(graph), r"declares strides \[2, 1\], gives \[1, 4\]", weights=NO_WEIGHTS)
    elsewhere = msgspec.json.encode({**graph, "device": "cuda"})  # operators may choose the layout there
    assert Program.from_bytes(elsewhere, NO_WEIGHTS).num_stages == 1
    spec["stride"] = [1, 4]
    assert Program.from_bytes(msgspec.json.encode(graph), NO_WEIGHTS).num_stages == 1


def test_what_only_data_can_show_names_the_node() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2))
    program = capture(model, (torch.zeros(2, 5, dtype=torch.int64),))
    with pytest.raises(ProgramError, match=r"node 0 \(embedding.default\): index out of range"):
        program.run((torch.full((2, 5), 4),), 0, program.num_stages)


@pytest.mark.parametrize("dropout", [0.1, {"float": "nan"}])
def test_attention_with_dropout_is_refused(dropout: Any) -> None:
    for args, kwargs in (([0, 0, 0, None, dropout], {}), ([0, 0, 0], {"dropout_p": dropout})):
        with pytest.raises(ProgramError, match="random"):
            check_call("scaled_dot_product_attention.default", args, kwargs)
    check_call("scaled_dot_product_attention.default", [0, 0, 0], {"dropout_p": 0.0})


# -------------------------------------------------------------------------------- memory of a run


class Attending(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


def test_operations_and_memory_are_counted_on_what_really_runs() -> None:
    attention = check(capture(Attending(), (torch.randn(2, 3, 64, 8),)).graph)
    assert sum(attention.flops) == 2 * 2 * (2 * 3) * 64 * 64 * 8
    linear = check(PROGRAM.graph)
    assert linear.flops == (2 * 3 * 6 * 4, 0, 2 * 3 * 4 * 2)
    assert linear.work > sum(linear.flops)  # the activation counts, too
    weights = 4 * (6 * 4 + 4 + 4 * 2 + 2)
    assert weights + 4 * 3 * (6 + 4) <= linear.live_bytes <= weights + 4 * 3 * (6 + 4 + 4 + 2)


class Widening(nn.Module):
    """Make a large tensor by repeating a small one without memory, and read all of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, None, :].expand(-1, 1 << 10, -1).contiguous().sum((1, 2))[:, None]


def test_a_view_takes_no_memory_and_its_copy_does() -> None:
    program = capture(Widening(), (torch.randn(2, 4),))
    assert 4 * 8 * 1024 <= check(program.graph).live_bytes < 2 * 4 * 8 * 1024 + 1000
    with pytest.raises(ProgramError, match="alive at once"):
        check(program.graph, caps=replace(GraphCaps(), live_bytes=4 * 8 * 1024 - 1))


@pytest.mark.parametrize(
    ("layer", "nbytes"),
    some(
        1,
        [
            (nn.LayerNorm(4), 4 * (8 + 8 + 2 * 4 + 2 * 2)),  # weights, and the mean and scale of each row
            (nn.ReLU(), 4 * (8 + 8)),
            (nn.Sequential(nn.ReLU(), nn.Tanh()), 4 * (8 + 8 + 8)),  # the caller holds the input
        ],
    ),
)
def test_a_result_counts_once_in_the_bytes_alive(layer: nn.Module, nbytes: int) -> None:
    graph = capture(layer, (torch.randn(2, 4),)).graph
    assert check(graph, caps=replace(GraphCaps(), live_bytes=nbytes)).live_bytes == nbytes
    with pytest.raises(ProgramError, match=f"{nbytes} bytes would be alive at once"):
        check(graph, caps=replace(GraphCaps(), live_bytes=nbytes - 1))


class _Alive(TorchDispatchMode):
    """Count the live tensors that operators have made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.names: set[str] = set()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.most = max(self.most, sum(each() is not None for each in self.made))
        self.made.append(weakref.ref(result))
        self.names.add(func._opname)
        return result


def test_a_run_drops_what_nobody_needs_any_more() -> None:
    program = capture(nn.Sequential(*[nn.ReLU() for _ in range(30)]), (torch.randn(2, 4),))
    with _Alive() as alive:
        program.run((torch.randn(2, 4),), 0, program.num_stages)
    assert len(alive.made) == 30 + 1  # and the input
    assert alive.most <= 3


# ------------------------------------------------------------------------------ constants, lifetimes


class WithTables(nn.Module):
    """Hold a position table and a mask that depend on no input; the table is also an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = self.places(torch.arange(5)) * 2
        x = torch.relu(self.linear(x + table))
        mask = torch.ones(4, 4).tril()
        return self.linear(x @ mask), table


def test_what_depends_on_no_input_is_computed_once_and_never_crosses() -> None:
    model, x = WithTables().eval(), torch.randn(2, 5, 4)
    program = capture(model, (x,), granularity="op")
    fixed = constants(program.graph.inputs, program.graph.nodes)
    assert {"arange.default", "embedding.default", "tril.default"} <= {
        node.op for node in program.graph.nodes if {value.name for value in node.outputs if value} <= fixed
    }
    read = Program.from_bytes(program.graph_bytes, program.weights_bytes)
    for cut in range(1, read.num_stages):
        assert not fixed & {value.name for value in read.live(cut)}
    with torch.no_grad():
        wanted = model(x)
    for _ in range(2):
        with _Alive() as ran:
            answer, table = read.run((x,), 0, read.num_stages)
        assert torch.equal(answer, wanted[0]) and torch.equal(table, wanted[1])
        table.fill_(7.0)  # the caller's own tensor
    assert "addmm" in ran.names and not {"arange", "embedding", "tril", "ones"} & ran.names
    live = json.loads(program.graph_bytes)
    live["stages"][0]["live"].append(min(fixed))
    refused(msgspec.json.encode(live), "is no tensor made before its cut", weights=program.weights_bytes)


def chain(length: int, reads: Callable[[int], list[int]]) -> tuple[list[Value], list[Node]]:
    """Return nodes 1 to length; node ``n`` reads the values ``reads(n)``, where 0 is the input."""
    spec = TensorSpec(dtype="float32", shape=[1], stride=[1])
    nodes = [
        Node(
            op="cat.default",
            args=[[{"tensor": f"v{place}"} for place in reads(number)]],
            kwargs={},
            outputs=[Value(name=f"v{number}", spec=spec)],
        )
        for number in range(1, length + 1)
    ]
    return [Value(name="v0", spec=spec)], nodes


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data(), length=st.integers(1, 12))
def test_lifetimes_are_what_their_definition_says(data: st.DataObject, length: int) -> None:
    drawn = [data.draw(st.lists(st.integers(0, n), max_size=3)) for n in range(length)]
    inputs, nodes = chain(length, lambda number: drawn[number - 1])
    outputs = data.draw(st.lists(st.integers(0, length), min_size=1, unique=True))
    fixed = constants(inputs, nodes)
    alive = Lifetimes(inputs, nodes, [f"v{n}" for n in outputs], fixed)
    reachable = {0}
    for number in range(1, length + 1):
        reachable |= {number} if reachable & set(drawn[number - 1]) else set()
    assert fixed == {f"v{n}" for n in range(length + 1) if n not in reachable}
    for position, names in alive.walk():
        later = {read for reads in drawn[position:] for read in reads} | set(outputs)
        expected = [f"v{n}" for n in range(position + 1) if n in later & reachable]
        assert list(names) == expected


def test_a_chain_of_any_length_is_walked() -> None:
    inputs, nodes = chain(20_000, lambda number: [number - 1, max(0, number - 2)])
    sizes = [len(names) for _, names in Lifetimes(inputs, nodes, ["v20000"], ()).walk()]
    assert len(sizes) == 20_001 and set(sizes[1:-1]) == {2}


# --------------------------------------------------------------------------------- the weights file


def repacked(change: Callable[[dict[str, Any]], Any], body: Callable[[bytes], bytes] = bytes) -> bytes:
    """Return a weights file with another header or another body."""
    data = bytes(PROGRAM.weights_bytes)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = change(header) or header
    encoded = text if isinstance(text, bytes) else json.dumps(text).encode()
    encoded += b" " * (-(len(encoded) + 8) % 64)
    return len(encoded).to_bytes(8, "little") + encoded + body(data[8 + length :])


def entry_of(header: dict[str, Any], place: int = 0) -> dict[str, Any]:
    return header[[name for name in header if not name.startswith("__pad__")][place]]


BROKEN_WEIGHTS: dict[str, tuple[bytes, str]] = {
    "a name twice": (
        repacked(lambda h: json.dumps(h).encode()[:-1] + b"," + json.dumps(h).encode()[1:]),
        "names something twice",
    ),
    "overlap": (
        repacked(lambda h: entry_of(h, 1).update(data_offsets=[64, 64 + 96], shape=[24]) or None),
        "overlaps|leaves a hole|do not hold",
    ),
    "the same bytes twice": (repacked(lambda h: {**h, "again": entry_of(h)}), "overlaps the one before it"),
    "a hole": (repacked(lambda h: {k: v for k, v in h.items() if v is not entry_of(h)}), "leaves a hole"),
    "bytes behind the end": (repacked(lambda h: None, lambda body: body + bytes(64)), "end at byte"),
    "bytes missing": (repacked(lambda h: None, lambda body: body[:-64]), "end at byte"),
    "a shape too large": (repacked(lambda h: entry_of(h).update(shape=[1 << 40, 6])), "do not hold"),
    "a shape hidden by 0": (
        repacked(lambda h: {"z": {"dtype": "F32", "shape": [0, 1 << 62], "data_offsets": [0, 0]}, **h}),
        "do not hold",
    ),
    "a fraction": (repacked(lambda h: entry_of(h).update(shape=[6.0, 4])), "malformed"),
    "an unknown type": (
        repacked(lambda h: entry_of(h).update(dtype="F8_E4M3")),
        "type F8_E4M3, which is not supported",
    ),
    "a field more": (repacked(lambda h: entry_of(h).update(code="import os")), "malformed"),
    "no table": (repacked(lambda h: b"[]"), "not a table"),
}


@pytest.mark.parametrize("what", sorted(BROKEN_WEIGHTS))
def test_a_weights_file_that_lies_is_refused(what: str) -> None:
    data, words = BROKEN_WEIGHTS[what]
    with pytest.raises(ProgramError, match=words):
        weights_file.decode(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def test_weights_begin_on_boundaries() -> None:
    shifted = bytes(PROGRAM.weights_bytes)
    length = int.from_bytes(shifted[:8], "little")
    shifted = (length + 1).to_bytes(8, "little") + shifted[8 : 8 + length] + b" " + shifted[8 + length :]
    with pytest.raises(ProgramError, match="not at a multiple of 64"):
        weights_file.decode(torch.frombuffer(bytearray(shifted), dtype=torch.uint8))
    pieces = {"a": torch.zeros(3), "b": torch.zeros(16)}
    data = bytearray(weights_file.encode(pieces))
    moved = bytes(data).replace(b'"shape":[3],"data_offsets":[0,12]', b'"shape":[4],"data_offsets":[0,16]')
    moved = moved.replace(b'"shape":[52],"data_offsets":[12,64]', b'"shape":[44],"data_offsets":[16,60]')
    moved = moved.replace(b'"shape":[16],"data_offsets":[64,128]', b'"shape":[17],"data_offsets":[60,128]')
    assert moved != bytes(data)
    with pytest.raises(ProgramError, match="'b' starts at byte 60, not on a boundary"):
        weights_file.decode(torch.frombuffer(bytearray(moved), dtype=torch.uint8))


def test_a_bool_holds_0_or_1() -> None:
    data = bytearray(weights_file.encode({"mask": torch.ones(5, dtype=torch.bool)}))
    weights_file.decode(torch.frombuffer(data, dtype=torch.uint8))
    data[data.index(b"\x01\x01\x01")] = 2
    with pytest.raises(ProgramError, match="a bool holds 0 or 1"):
        weights_file.decode(torch.frombuffer(data, dtype=torch.uint8))


@pytest.mark.parametrize("name", ["__metadata__", "__pad__1"])
def test_a_weight_cannot_have_a_name_of_the_format(name: str) -> None:
    with pytest.raises(ProgramError, match="cannot be called"):
        weights_file.encode({name: torch.zeros(3)})


def test_a_weight_of_another_type_or_shape_is_named() -> None:
    other = capture(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), (torch.randn(3, 6),))
    graph = edited(lambda g: g.update(weights_digest=other.weights_digest))
    refused(graph, r"weight '2.weight' is float32 \[3, 4\] in its file", weights=other.weights_bytes)


# ---------------------------------------------------------------------------------- arbitrary bytes


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(leaf for key, item in items for leaf in leaves(item, (*path, key)))]


SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
FLAT = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=6), SCALARS, max_size=3)
JSON = FLAT | st.lists(FLAT, max_size=3)


@settings(max_examples=examples(300), deadline=None)
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


@settings(max_examples=examples(300), deadline=None)
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


def test_a_store_is_not_asked_for_more_than_is_allowed() -> None:
    store = Store.open("memory://caps")
    publish(PROGRAM, store)
    assert load(store, PROGRAM.digest).num_stages == 3
    for cap in ("graph_bytes", "weights_bytes"):
        with pytest.raises(ProgramError, match=r"has \d+ bytes; at most 10 are allowed"):
            load(store, PROGRAM.digest, caps=replace(GraphCaps(), **{cap: 10}))


def others(program: Program) -> list[torch.Tensor]:
    """Return values for the inputs after the first one."""
    return [torch.zeros(value.spec.shape) for value in program.live(0)[1:]]


def test_an_input_may_cross_every_cut_and_be_an_answer() -> None:
    graph = json.loads(one_node("relu.default", [X]))
    graph["stages"][0]["live"] = ["x", "y0"]
    program = Program.from_bytes(msgspec.json.encode(graph), NO_WEIGHTS)
    x = torch.randn(2, 4)
    given, answer = program.run((x, *others(program)), 0, 1)
    assert torch.equal(given, x) and torch.equal(answer, x.relu())


def test_a_program_runs_under_its_own_autocast_and_no_other() -> None:
    graph = json.loads(one_node("mm.default", [X, {"tensor": "w"}], dtype="bfloat16"))
    weights = weights_file.encode({"w": torch.eye(4)})
    spec = {"dtype": "float32", "shape": [4, 4], "stride": [4, 1]}
    graph.update(weights=[{"name": "w", "key": "w", "spec": spec}], weights_digest=digest_of(weights))
    refused(msgspec.json.encode(graph), "declares bfloat16 .* gives torch.float32", weights=weights)
    graph["autocast"] = "bfloat16"
    program = Program.from_bytes(msgspec.json.encode(graph), weights)
    x = torch.randn(2, 4)
    for around in (False, True):
        with torch.autocast("cpu", dtype=torch.float16, enabled=around):
            [answer] = program.run((x, *others(program)), 0, 1)
        assert answer.dtype is torch.bfloat16 and torch.equal(answer, x.bfloat16())
    graph["autocast"] = "float32"
    refused(msgspec.json.encode(graph), "allowed are bfloat16, float16", weights=weights)
