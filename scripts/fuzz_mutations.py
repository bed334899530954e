"""Make broken programs for ``fuzz_program.py`` by mutating valid ones captured from small networks.

A seed and a number determine every input, so each input can be made again.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from upriver.program.capture.prefix import capture
from upriver.program.graph.call_validator import check_arguments
from upriver.program.graph.operators import ALLOWED, fingerprints, resolve
from upriver.program.graph.schedule import ScheduledNode
from upriver.program.graph.schema import DTYPES, Graph, Node, TensorSpec, references

Json = Any


@dataclass(frozen=True, kw_only=True)
class Files:
    """The two files of a program."""

    graph: bytes
    weights: bytes


@dataclass(frozen=True, kw_only=True)
class Input:
    """The input of a reader.

    Attributes:
        kind: The mutation of a valid program.
        deep: Whether JSON and the schema's types still accept it, and it differs from the original.
    """

    kind: str
    files: Files
    deep: bool


# ------------------------------------------------------------------------------------ valid programs


class Convolutions(nn.Module):
    """A small residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.conv = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the answer to a batch of images."""
        x = functional.max_pool2d(self.stem(x), 2)
        x = functional.gelu(self.conv(x) + x)
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Attention(nn.Module):
    """A transformer's layer on embedded tokens, with a causal mask made of constants."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(16, 8), nn.Embedding(6, 8)
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the answer to a batch of token numbers."""
        batch, length = tokens.shape
        x = self.tokens(tokens) + self.places(torch.arange(length))
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mask = torch.full((length, length), float("-inf")).triu(1)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(batch, length, 8)) + x


class Masked(nn.Module):
    """Explicit attention, with a mask given as an input and gathered positions."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("order", torch.tensor([3, 1, 0, 2]))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the answer to vectors and their mask."""
        scores = torch.einsum("bic,bjc->bij", self.query(x), self.key(x)) / 8**0.5
        scores = scores.masked_fill(mask[:, None, :] == 0, torch.finfo(x.dtype).min)
        y = scores.softmax(-1) @ x[:, self.order]
        return torch.where(y > 0, y, y.abs().clamp(max=3.0)).mean(1)


class Pieces(nn.Module):
    """A network with several results and types, and shapes of all origins."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the answer to a batch of matrices."""
        a, b, c = x.split([2, 3, 3], dim=-1)
        d, _ = torch.cat([b, c.flip(-1)], -1).chunk(2, -1)
        e = functional.pad(a, (1, 0), value=float("inf")).half().float().expand(2, -1, -1, -1)
        f = torch.stack([e[0].roll(1, -1), d], 0).sum(0) + torch.arange(3, dtype=x.dtype).repeat(1)
        mean, var = torch.var_mean(f.double(), dim=-1)
        return f.unsqueeze(2).squeeze(2).tril(), (mean > var).to(torch.uint8)


@cache
def seeds() -> tuple[Files, ...]:
    """Return the valid programs, captured once in a process."""
    torch.manual_seed(0)
    given: list[tuple[nn.Module, tuple[torch.Tensor, ...]]] = [
        (Convolutions(), (torch.randn(2, 3, 12, 12),)),
        (Attention(), (torch.randint(0, 16, (2, 6)),)),
        (Masked(), (torch.randn(2, 4, 8), torch.ones(2, 4, dtype=torch.int64))),
        (Pieces(), (torch.randn(2, 4, 8),)),
        (nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)), (torch.randn(3, 6),)),
    ]
    programs = [capture(model, inputs, granularity="op") for model, inputs in given]
    return tuple(Files(graph=p.graph_bytes, weights=bytes(p.weights_bytes)) for p in programs)


# ------------------------------------------------------------------------------------------- values

INTEGERS = (0, 1, -1, 2, 3, 7, 64, 1000, 65537, 1 << 24, 1 << 31, (1 << 32) + 1, 1 << 40, (1 << 62) + 3)
INTEGERS += ((1 << 63) - 1, -(1 << 63), 1 << 63, -(1 << 40), 1 << 70, -2, -3, 10**9, 10**12)
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-300, 1e300, -1e38, 3.5e38, 2**63)
TEXTS = (
    "",
    "same",
    "valid",
    "bic,bjc->bij",
    "ab->ba",
    "...",
    "reflect",
    "none",
    "tanh",
    "\ud7ff\x00",
    "é" * 9,
)


def any_value(rng: random.Random, names: list[str]) -> Json:
    """Return a value that may or may not be valid among a node's arguments."""
    return rng.choice(
        [
            lambda: rng.choice(INTEGERS),
            lambda: rng.choice(FLOATS),
            lambda: rng.choice([None, True, False]),
            lambda: rng.choice(TEXTS),
            lambda: {"tensor": rng.choice(names)} if names else None,
            lambda: {"dtype": rng.choice([*DTYPES, "complex64", "quint8"])},
            lambda: {"float": rng.choice(["inf", "-inf", "nan", "1"])},
            lambda: {"device": rng.choice(["here", "cuda", "meta"])},
            lambda: {"memory_format": rng.choice(["channels_last", "contiguous", "preserve", "x"])},
            lambda: {"layout": rng.choice(["strided", "sparse_coo"])},
            lambda: [rng.choice(INTEGERS) for _ in range(rng.randrange(5))],
            lambda: [any_value(rng, names) for _ in range(rng.randrange(4))],
        ]
    )()


def nudged(rng: random.Random, value: Json, names: list[str]) -> Json:
    """Return a value mostly of the same type, and often near."""
    match value:
        case bool():
            return not value
        case int() if rng.random() < 0.8:
            return rng.choice([value + 1, value - 1, -value, value * 2, value // 2, rng.choice(INTEGERS)])
        case float() if rng.random() < 0.8:
            return rng.choice([value * 2, -value, rng.choice(FLOATS)])
        case list() if value and rng.random() < 0.8:
            return nudged_list(rng, value, names)
        case {"tensor": _} if names and rng.random() < 0.8:
            return {"tensor": rng.choice(names)}
        case {"dtype": _} if rng.random() < 0.8:
            return {"dtype": rng.choice(list(DTYPES))}
    return any_value(rng, names)


def nudged_list(rng: random.Random, value: list[Json], names: list[str]) -> list[Json]:
    """Return a list with one changed item."""
    if rng.random() < 0.5:
        return rearranged(rng, value)
    changed, place = list(value), rng.randrange(len(value))
    changed[place] = nudged(rng, changed[place], names)
    return changed


def rearranged(rng: random.Random, value: list[Json]) -> list[Json]:
    """Return a list with one item left out or doubled, or with the same items in another order."""
    changed, place = list(value), rng.randrange(len(value))
    match rng.randrange(3):
        case 0:
            del changed[place]
        case 1:
            changed.insert(place, copy.deepcopy(changed[place]))
        case _:
            rng.shuffle(changed)
    return changed


# -------------------------------------------------------------------------------- changes to a graph


def made_before(graph: Json, index: int) -> list[str]:
    """Return the names that node ``index`` may read."""
    names = [value["name"] for value in (*graph["inputs"], *graph["weights"])]
    for node in graph["nodes"][:index]:
        names += [output["name"] for output in node["outputs"] if output]
    return names


def a_node(rng: random.Random, graph: Json) -> tuple[int, Json]:
    """Return any node, with its index."""
    index = rng.randrange(len(graph["nodes"]))
    return index, graph["nodes"][index]


def a_spec(rng: random.Random, graph: Json) -> Json:
    """Return the spec of any tensor."""
    values = [*graph["inputs"], *graph["weights"]]
    values += [output for node in graph["nodes"] for output in node["outputs"] if output]
    return rng.choice(values)["spec"]


def change_operator(rng: random.Random, graph: Json) -> None:
    """Replace an operator and keep its arguments. The new operator is mostly an allowed one."""
    _, node = a_node(rng, graph)
    others = ["as_strided.default", "bernoulli.p", "relu_.default", "nonzero.default", "os.system"]
    node["op"] = rng.choice(OPERATORS) if rng.random() < 0.95 else rng.choice(others)


def change_argument(rng: random.Random, graph: Json) -> None:
    """Change one argument of one node."""
    index, node = a_node(rng, graph)
    names = made_before(graph, index)
    places = [*range(len(node["args"])), *node["kwargs"]]
    if not places:
        return add_argument(rng, graph)
    place = rng.choice(places)
    holder = node["kwargs"] if isinstance(place, str) else node["args"]
    holder[place] = nudged(rng, holder[place], names)
    return None


def add_argument(rng: random.Random, graph: Json) -> None:
    """Add an argument, by position or by name."""
    index, node = a_node(rng, graph)
    value = any_value(rng, made_before(graph, index))
    if rng.random() < 0.5:
        node["args"].append(value)
    else:
        known = ("out", "dtype", "device", "layout", "pin_memory", "dropout_p", "self", "dim", "generator")
        node["kwargs"][rng.choice(known)] = value


def drop_argument(rng: random.Random, graph: Json) -> None:
    """Drop an argument."""
    _, node = a_node(rng, graph)
    if node["args"]:
        del node["args"][rng.randrange(len(node["args"]))]


def change_shape(rng: random.Random, graph: Json) -> None:
    """Change the sizes or strides of one tensor."""
    spec = a_spec(rng, graph)
    key = rng.choice(["shape", "stride"])
    spec[key] = [abs(n) if isinstance(n, int) else 1 for n in nudged_list(rng, spec[key] or [1], [])]


def change_type(rng: random.Random, graph: Json) -> None:
    """Change the type of one tensor."""
    a_spec(rng, graph)["dtype"] = rng.choice([*DTYPES, "complex64", "object", ""])


def change_name(rng: random.Random, graph: Json) -> None:
    """Change the name of one value, where it is made."""
    values = [*graph["inputs"], *graph["weights"]]
    values += [output for node in graph["nodes"] for output in node["outputs"] if output]
    rng.choice(values)["name"] = rng.choice(
        [rng.choice(values)["name"], "", "x" * 2000, "é\u0000", "__class__"]
    )


def change_results(rng: random.Random, graph: Json) -> None:
    """Change how many results a node has, or which results are read."""
    _, node = a_node(rng, graph)
    outputs = node["outputs"]
    match rng.randrange(4):
        case 0:
            outputs.append(None)
        case 1 if outputs:
            outputs[rng.randrange(len(outputs))] = None
        case 2:
            outputs.append({"name": f"more{rng.randrange(99)}", "spec": copy.deepcopy(a_spec(rng, graph))})
        case _:
            node["outputs"] = rearranged(rng, outputs) if outputs else []


def move_node(rng: random.Random, graph: Json) -> None:
    """Swap two nodes, or leave one out."""
    nodes = graph["nodes"]
    first, _ = a_node(rng, graph)
    second, _ = a_node(rng, graph)
    if rng.random() < 0.5:
        nodes[first], nodes[second] = nodes[second], nodes[first]
    elif len(nodes) > 1:
        del nodes[first]
        for stage in graph["stages"]:
            stage["stop"] -= stage["stop"] > first


def insert_node(rng: random.Random, graph: Json) -> None:
    """Insert a call of any operator, with arguments of its types. No node reads the result."""
    index, _ = a_node(rng, graph)
    names = made_before(graph, index)
    op = rng.choice(OPERATORS)
    args, kwargs = fitting(rng, op, names)
    outputs = [{"name": f"new{rng.randrange(10**6)}", "spec": copy.deepcopy(a_spec(rng, graph))}]
    graph["nodes"].insert(index, {"op": op, "args": args, "kwargs": kwargs, "outputs": outputs})
    for stage in graph["stages"]:
        stage["stop"] += stage["stop"] > index


def fitting(rng: random.Random, op: str, names: list[str]) -> tuple[list[Json], dict[str, Json]]:
    """Return arguments for an operator, of the right types and with random values."""
    args: list[Json] = []
    kwargs: dict[str, Json] = {}
    for argument in resolve(op)._schema.arguments:
        value = of_type(rng, str(argument.real_type), names)
        optional = argument.has_default_value()
        if not argument.kwarg_only:
            if optional and rng.random() < 0.3:
                break
            args.append(argument.default_value if optional and rng.random() < 0.3 else value)
        elif not optional or rng.random() < 0.5:
            kwargs[argument.name] = value
    return args, kwargs


def of_type(rng: random.Random, kind: str, names: list[str]) -> Json:
    """Return a value of a type in the notation of signatures."""
    if kind.startswith("Optional["):
        return None if rng.random() < 0.4 else of_type(rng, kind[9:-1], names)
    if kind.startswith("List["):
        return [of_type(rng, kind[5:-1], names) for _ in range(rng.choice([1, 1, 2, 2, 3, 4]))]
    match kind:
        case "Tensor":
            return {"tensor": rng.choice(names)}
        case "int" | "number" | "Scalar" if rng.random() < 0.9:
            return rng.choice([0, 1, 1, 2, 2, 3, 4, 8, -1, -2, rng.choice(INTEGERS)])
        case "float" | "number" | "Scalar":
            return rng.choice([0.0, 0.5, 1.0, 2.0, rng.choice(FLOATS), {"float": "nan"}])
        case "bool":
            return rng.random() < 0.5
        case "str":
            return rng.choice(TEXTS)
        case "ScalarType" if rng.random() < 0.9:
            return {"dtype": rng.choice(list(DTYPES))}
        case "MemoryFormat" if rng.random() < 0.9:
            return {"memory_format": rng.choice(["channels_last", "contiguous", "preserve"])}
        case "Layout" if rng.random() < 0.9:
            return {"layout": "strided"}
        case "ScalarType" | "MemoryFormat" | "Layout":
            return rng.choice([0, 1, 8, 64, -1, rng.choice(INTEGERS)])
        case "Device":
            return {"device": "here"}
    return any_value(rng, names)


def change_stage(rng: random.Random, graph: Json) -> None:
    """Change the end of a stage, its crossing tensors, or its description."""
    stages = graph["stages"]
    stage = rng.choice(stages)
    names = made_before(graph, len(graph["nodes"]))
    match rng.randrange(6):
        case 0:
            stage["stop"] = abs(stage["stop"] + rng.choice([-2, -1, 1, 2, 9, 1 << 62]))
        case 1:
            stage["live"] = rearranged(rng, stage["live"]) if stage["live"] else ["x"]
        case 2:
            stage["live"].append(rng.choice(names))
        case 3:
            stages.remove(stage)
        case 4:
            stages.insert(rng.randrange(len(stages)), copy.deepcopy(stage))
        case _:
            stage[rng.choice(["out_bytes", "flops", "peak_bytes"])] = rng.choice([0.0, -1.0, 1e308])


def change_head(rng: random.Random, graph: Json) -> None:
    """Change a field of the whole file."""
    match rng.randrange(6):
        case 0:
            graph["micro_batch"] = abs(rng.choice(INTEGERS))
        case 1:
            graph["autocast"] = rng.choice(["bfloat16", "float16", "float32", "", None])
        case 2:
            graph["weights_digest"] = rng.choice(["", "0" * 64, "../../etc/passwd", "é" * 64])
        case 3 if graph["operators"]:
            graph["operators"][rng.choice(list(graph["operators"]))] = "0" * 16
        case 4:
            graph["operators"]["as_strided.default"] = "0" * 16
        case _:
            graph["inputs"] = rearranged(rng, graph["inputs"])


def change_weight(rng: random.Random, graph: Json) -> None:
    """Change the graph's description of a weight."""
    if not graph["weights"]:
        return change_head(rng, graph)
    weight = rng.choice(graph["weights"])
    match rng.randrange(3):
        case 0:
            weight["key"] = rng.choice([rng.choice(graph["weights"])["key"], "", "__pad__1", "__metadata__"])
        case 1:
            weight["spec"] = copy.deepcopy(a_spec(rng, graph))
        case _:
            graph["weights"] = rearranged(rng, graph["weights"])
    return None


def whole_batch(rng: random.Random, graph: Json) -> None:
    """Change the micro-batch everywhere in the graph.

    Large ones are consistent in every shape, and too large.
    """
    old, new = graph["micro_batch"], rng.choice([0, 1, 5, 100, 5000, 65_536])
    graph["micro_batch"] = new

    def renewed(value: Json) -> Json:
        if isinstance(value, list):
            return [renewed(item) for item in value]
        return new if value == old and isinstance(value, int) and not isinstance(value, bool) else value

    for value in graph["inputs"]:
        value["spec"]["shape"] = renewed(value["spec"]["shape"])
    for node in graph["nodes"]:
        node["args"] = renewed(node["args"])


CHANGES: dict[str, Callable[[random.Random, Json], None]] = {
    "operator": change_operator,
    "argument": change_argument,
    "argument added": add_argument,
    "argument dropped": drop_argument,
    "shape": change_shape,
    "type": change_type,
    "name": change_name,
    "results": change_results,
    "nodes moved": move_node,
    "node inserted": insert_node,
    "stage": change_stage,
    "head": change_head,
    "weight": change_weight,
    "micro-batch": whole_batch,
}
OPERATORS = sorted(ALLOWED)


def changed_graph(rng: random.Random, files: Files) -> Input:
    """Return a graph with one to three mutations, and everything else repaired."""
    graph = msgspec.json.decode(files.graph)
    kind = rng.choices(list(CHANGES), weights=[6 if each == "node inserted" else 1 for each in CHANGES])[0]
    for name in [kind, *rng.choices(list(CHANGES), k=rng.choice([0, 0, 0, 1, 2]))]:
        # A second change may find nothing left to change: no inputs, no stages.
        with contextlib.suppress(LookupError, TypeError, ValueError):
            CHANGES[name](rng, graph)
    if rng.random() < (0.9 if kind == "node inserted" else 0.4):
        repair(graph, files.graph)
    if rng.random() < 0.95:
        used = {str(node["op"]) for node in graph["nodes"]}
        graph["operators"] = {
            **fingerprints(used & ALLOWED),
            **dict.fromkeys(sorted(used - ALLOWED), "0" * 16),
        }
    data = msgspec.json.encode(graph)
    return Input(kind=kind, files=Files(graph=data, weights=files.weights), deep=is_graph(data, files.graph))


def repair(graph: Json, original: bytes) -> None:
    """Make changed nodes and their readers declare their new results, so that later checks are reached.

    The repair ends where the graph fails to run. The readers must handle arguments that do not fit their
    operator.
    """
    before = msgspec.json.decode(original)
    same = {value["name"]: value for value in (*before["inputs"], *before["weights"])}
    known = before["nodes"]
    values = Declared({value["name"]: value["spec"] for value in (*graph["inputs"], *graph["weights"])})
    dirty = {name for name, spec in values.specs.items() if same.get(name, {}).get("spec") != spec}
    mode, device = FakeTensorMode(allow_fallback_kernels=False), torch.device("cpu")
    with contextlib.suppress(Exception), mode, torch.no_grad():
        for index, node in enumerate(graph["nodes"]):
            outputs = node["outputs"]
            if node not in known or not dirty.isdisjoint(references([node["args"], node["kwargs"]])):
                dirty |= {output["name"] for output in outputs if output}
                results = _results(index, node, values, device)
                outputs += [None] * (len(results) - len(outputs))
                del outputs[len(results) :]
                for output, result in zip(outputs, results, strict=True):
                    if output is not None:
                        output["spec"] = msgspec.to_builtins(TensorSpec.of(result))
            values.specs |= {output["name"]: output["spec"] for output in outputs if output}


def _results(index: int, node: Json, values: Declared, device: torch.device) -> Sequence[torch.Tensor]:
    step = ScheduledNode(index, msgspec.convert(node, Node), {}, device)
    args, kwargs = step.arguments(values)
    check_arguments(node["op"], args, kwargs, num_results=len(node["outputs"]))
    return step.call(values)


class Declared(dict[str, torch.Tensor]):
    """Tensors without data, made on request from their declared specs."""

    def __init__(self, specs: dict[str, Json]) -> None:
        """Store the specs."""
        super().__init__()
        self.specs = specs

    def __missing__(self, name: str) -> torch.Tensor:
        """Make the tensor."""
        spec = TensorSpec(**self.specs[name])
        return torch.empty_strided(spec.shape, spec.stride, dtype=DTYPES[spec.dtype])


def is_graph(data: bytes, original: bytes) -> bool:
    """Return whether JSON and the schema's types still hold, and the data differs."""
    try:
        msgspec.json.decode(data, type=Graph)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return data != original


# ------------------------------------------------------------------------- changes to a weights file


def taken_apart(weights: bytes) -> tuple[Json, bytes]:
    """Return the header and the body."""
    length = int.from_bytes(weights[:8], "little")
    return json.loads(weights[8 : 8 + length]), weights[8 + length :]


def put_together(text: bytes, body: bytes) -> bytes:
    """Return a file of a header and a body, which begins on a boundary."""
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text + body


def changed_header(rng: random.Random, files: Files) -> Input:
    """Change the header of a weights file. The graph names the file by its new digest."""
    header, body = taken_apart(files.weights)
    name = rng.choice(list(header) or ["none"])
    entry = header.setdefault(name, {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
    other = rng.choice(list(header.values()))
    match rng.randrange(9):
        case 0:
            entry["data_offsets"] = nudged_list(rng, entry["data_offsets"], [])
        case 1:
            entry["data_offsets"] = list(other["data_offsets"])
        case 2:
            entry["shape"] = nudged_list(rng, entry["shape"] or [1], [])
        case 3:
            entry["dtype"] = rng.choice(["F32", "F64", "BOOL", "I64", "U8", "F8_E4M3", "C64", ""])
        case 4:
            header[rng.choice(["__metadata__", "__pad__x", "é", "x" * 3000])] = header.pop(name)
        case 5:
            entry[rng.choice(["dtype", "more", "shape"])] = any_value(rng, [])
        case 6:
            header[name] = any_value(rng, [])
        case 7:
            entry.update(dtype="BOOL", shape=[entry["data_offsets"][-1] - entry["data_offsets"][0]])
        case _:
            header = {**header, "late": copy.deepcopy(other)}
    text = json.dumps(header).encode()
    if rng.random() < 0.1:
        text = text[:-1] + b"," + text[1:]  # every name twice
    if rng.random() < 0.1:
        body += bytes(rng.randrange(200))
    return renamed("weights header", files, put_together(text, body), deep=True)


def changed_body(rng: random.Random, files: Files) -> Input:
    """Change, drop or add bytes of weights."""
    data = bytearray(files.weights)
    start = 8 + int.from_bytes(data[:8], "little")
    match rng.randrange(4):
        case 0:
            data = data[: rng.randrange(start, len(data) + 1)]
        case 1:
            data += bytes(rng.randrange(1, 300))
        case _:
            for _ in range(rng.randrange(1, 20)):
                if start < len(data):
                    data[rng.randrange(start, len(data))] = rng.randrange(256)
    return renamed("weights body", files, bytes(data), deep=True)


def changed_anywhere(rng: random.Random, files: Files) -> Input:
    """Change bytes of the weights file without regard for their meaning."""
    return renamed("weights bytes", files, scrambled(rng, files.weights), deep=False)


def renamed(kind: str, files: Files, weights: bytes, *, deep: bool) -> Input:
    """Return a program whose graph names another weights file by its digest."""
    before = hashlib.sha256(files.weights).hexdigest().encode()
    graph = files.graph.replace(before, hashlib.sha256(weights).hexdigest().encode())
    return Input(kind=kind, files=Files(graph=graph, weights=weights), deep=deep and weights != files.weights)


# --------------------------------------------------------------------------------------- other bytes


def scrambled(rng: random.Random, data: bytes) -> bytes:
    """Flip, cut off, double and insert bytes."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        place = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0:
                del changed[place:]
            case 1:
                changed[place : place + 1] = bytes([rng.randrange(256)])
            case 2:
                changed[place : place + rng.randrange(1, 40)] = b""
            case 3:
                piece = changed[place : place + rng.randrange(1, 60)]
                changed[place:place] = piece
            case _:
                changed[place:place] = rng.choice(TOKENS)
    return bytes(changed)


TOKENS = (
    b'"',
    b"{",
    b"]",
    b"[[[[",
    b"-1",
    b"9" * 30,
    b"1e999",
    b"null",
    b"\xff",
    b"\\ud800",
    b'{"tensor":"x"}',
    b"\x00",
)


def random_bytes(rng: random.Random, files: Files) -> Input:
    """Return random bytes, or a distorted imitation of a program."""
    data = rng.choice(
        [
            lambda: rng.randbytes(rng.randrange(200)),
            lambda: b"[" * rng.randrange(100_000),
            lambda: b'{"schema":' * rng.randrange(5000),
            lambda: b'{"schema":"upriver.program/%d"}' % rng.randrange(9),
            lambda: b"9" * rng.randrange(10_000),
            lambda: json.dumps({"schema": "upriver.program/2", "nodes": any_value(rng, [])}).encode(),
        ]
    )()
    return Input(kind="random bytes", files=Files(graph=data, weights=files.weights), deep=False)


def changed_bytes(rng: random.Random, files: Files) -> Input:
    """Change bytes of the graph without regard for their meaning."""
    data = scrambled(rng, files.graph)
    return Input(kind="graph bytes", files=Files(graph=data, weights=files.weights), deep=False)


def make(seed: int, index: int, programs: Sequence[Files]) -> Input:
    """Return input number ``index``."""
    rng = random.Random(f"{seed}:{index}")
    files = rng.choice(programs)
    dice = rng.random()
    if dice < 0.60:
        return changed_graph(rng, files)
    for limit, change in (
        (0.72, changed_header),
        (0.78, changed_body),
        (0.92, changed_bytes),
        (0.97, changed_anywhere),
    ):
        if dice < limit:
            return change(rng, files)
    return random_bytes(rng, files)
