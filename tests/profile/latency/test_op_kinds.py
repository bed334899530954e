"""Check operator calls as works: the paper's kinds and features, free calls, unknown calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from tests.examples import some
from upriver._torchvision import ensure_torchvision
from upriver.profile.latency.config_sampling import call_on, tensor
from upriver.profile.latency.op_calls import calls, in_order, is_contiguous, is_view, run_length
from upriver.profile.latency.op_kinds import UNKNOWN, OpWork, features_of, works, works_of
from upriver.program.capture.prefix import capture
from upriver.program.graph.schema import Graph, TensorSpec


def network(name: str, side: int) -> Graph:
    models = pytest.importorskip("torchvision", reason="torchvision").models if ensure_torchvision() else None
    assert models is not None
    return capture(getattr(models, name)(weights=None), torch.randn(1, 3, side, side)).graph


def kinds(graph: Graph) -> list[str]:
    return [work.kind for parts in works(graph) for work in parts]


# ------------------------------------------------------------------------------------------ networks


@pytest.mark.full
def test_alexnet_is_what_the_paper_counts() -> None:
    graph = network("alexnet", 224)
    of_nodes = dict(zip([node.op.partition(".")[0] for node in graph.nodes], works(graph), strict=True))
    assert of_nodes["flatten" if "flatten" in of_nodes else "view"] == ()
    relu, max_pool = "activation.relu", "max_pool"
    convolution = ["conv", "bias", relu]
    wanted = [*convolution, max_pool] * 2 + convolution * 3 + [max_pool]
    # The paper's 19th of 27 nodes is the flatten after the last pooling: a node, and no work.
    wanted += ["matmul", "bias", relu] * 2 + ["matmul", "bias"]
    assert kinds(graph) == wanted
    assert len(wanted) == 26 and wanted[3] == wanted[7] == wanted[17] == max_pool


@pytest.mark.full
def test_operations_of_alexnet_by_hand() -> None:
    found = [work for parts in works(network("alexnet", 224)) for work in parts]
    first = found[0].features
    # 64 filters of 3 x 11 x 11 at 55 x 55 positions
    assert first["flops"] == 3 * 55 * 55 * 11 * 11 * 64 == 70_276_800
    assert (first["s_f"], first["h_in_s_f"], first["c_out_s_f"]) == (363, 224 * 363, 64 * 363)
    assert found[1].features == {"flops": 64 * 55 * 55}
    pool = found[3].features
    assert pool["flops"] == 64 * 27 * 27 * 9
    assert pool["n_c_h_w_in"] == 64 * 55 * 55
    assert (pool["n_c_h_w_out"], pool["h_w_out"]) == (64 * 27 * 27, 27 * 27)
    product = found[18].features
    assert product == {"flops": 9216 * 4096, "n_c_in": 9216, "n_c_out": 4096, "c_in_c_out": 9216 * 4096}


@pytest.mark.full
def test_resnet_has_one_work_for_each_of_its_layers() -> None:
    found = kinds(network("resnet18", 64))
    counts = {kind: found.count(kind) for kind in found}
    assert counts == {
        "conv": 20,
        "batch_norm": 20,
        "activation.relu": 17,
        "elementwise.add": 8,
        "max_pool": 1,
        "avg_pool": 1,
        "matmul": 1,
        "bias": 1,
    }


@pytest.mark.full
def test_pooling_that_changes_nothing_is_no_work() -> None:
    assert "avg_pool" not in kinds(network("resnet18", 32))  # its last image is 1 x 1 already


class Rest(nn.Module):
    """Run the function under test after a layer with weights."""

    def __init__(self, rest: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.table = nn.Buffer(torch.randn(6))
        self.rest = rest

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.layer(x))


def behind(rest: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> list[str]:
    """Return the kinds of a function's calls, without the addition that keeps them from being left out."""
    graph = capture(Rest(lambda x: rest(x) + 1), torch.randn(*(shape or (4, 6)))).graph
    first, second, *found, last = kinds(graph)
    assert (first, second, last.split(".")[:2]) == ("matmul", "bias", ["elementwise", "add"])
    return found


@pytest.mark.parametrize(
    "rest",
    some(
        2,
        [
            lambda x: x.view(2, 12),
            lambda x: x.reshape(24),
            lambda x: x.t(),
            lambda x: x.permute(1, 0).unsqueeze(0),
            lambda x: x.flatten(),
            lambda x: x[:, 2:],
            lambda x: x.split(3, 1)[1],
            lambda x: x.chunk(2)[0],
            lambda x: x.unbind(0)[2],
            lambda x: x.expand(3, 4, 6),
            lambda x: x.contiguous().to(torch.float32),
            lambda x: functional.dropout(x, 0.5, training=False),
            lambda x: functional.avg_pool1d(x, 1),
            lambda x: functional.adaptive_avg_pool1d(x, 6),
        ],
    ),
)
def test_views_and_what_changes_nothing_are_no_works(rest: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert behind(rest) == []


@pytest.mark.parametrize(
    ("rest", "wanted"),
    some(
        4,
        [
            (lambda x: x.t().contiguous(), ["copy.clone"]),
            (lambda x: x.t().reshape(-1), ["copy.clone"]),
            (lambda x: x.t().flatten(), ["copy.clone"]),
            (lambda x: torch.cat([x, x]), ["copy.cat"]),
            (lambda x: torch.stack([x, x], 1), ["copy.stack"]),
            (lambda x: x.roll(1, 0), ["copy.roll"]),
            (lambda x: x.flip(1), ["copy.flip"]),
            (lambda x: x.repeat(2, 1), ["copy.repeat"]),
            (lambda x: functional.pad(x, (1, 1)), ["copy.pad"]),
            (lambda x: functional.softmax(x, -1), ["softmax"]),
            (lambda x: x.mean(1, keepdim=True), ["reduction.mean"]),
            (lambda x: x.sum(0), ["reduction.sum"]),
            (lambda x: functional.gelu(x).tanh(), ["activation.gelu", "activation.tanh"]),
            (lambda x: x * x / 2 - x, ["elementwise.mul", "elementwise.div", "elementwise.sub"]),
            (lambda x: functional.layer_norm(x, (6,)), ["layer_norm"]),
            (lambda x: x @ x.t(), ["matmul"]),
            (lambda x: x.unsqueeze(0).repeat(2, 1, 1) @ x.t(), ["copy.repeat", "matmul"]),
            (lambda x: torch.bmm(x.expand(2, 4, 6), x.t().expand(2, 6, 4)), ["bmm"]),
            (lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None]), ["attention"]),
            (lambda x: functional.interpolate(x[None, None], scale_factor=2), ["interpolation.nearest"]),
            (lambda x: functional.avg_pool1d(x, 2), ["avg_pool"]),
            (lambda x: x.double(), ["copy.cast_float64"]),
            (lambda x: x.cumsum(1), [f"{UNKNOWN}.cumsum.default"]),
            (lambda x: functional.pad(x, (1, 1), mode="reflect"), [f"{UNKNOWN}.pad.default"]),
        ],
    ),
)
def test_each_operator_is_of_its_kind(
    rest: Callable[[torch.Tensor], torch.Tensor], wanted: list[str]
) -> None:
    found = behind(rest)
    # Export may write a product of several dimensions as one of two with views around it.
    assert found == wanted or [kind for kind in found if kind != "copy.clone"] == wanted


def test_what_is_computed_once_is_no_work() -> None:
    class Table(Rest):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * (self.table.cumsum(0) + 1).relu()

    found = works(capture(Table(lambda x: x), torch.randn(4, 6)).graph)
    assert [work.kind for parts in found for work in parts] == ["matmul", "bias", "elementwise.mul"]


def test_another_type_makes_another_kind() -> None:
    half, whole = tensor([4, 4], dtype="bfloat16"), tensor([4], dtype="int64")
    assert works_on("relu.default", ["x"], x=half).kind == "activation.relu.bfloat16"
    assert works_on("add.Tensor", ["x", "x"], x=whole).kind == "elementwise.add.int64"


def test_what_a_program_writes_over_is_known() -> None:
    graph = capture(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Tanh()), torch.randn(4, 6)).graph
    relu = next(parts[0] for parts in works(graph) if parts and parts[0].kind == "activation.relu")
    tanh = next(parts[0] for parts in works(graph) if parts and parts[0].kind == "activation.tanh")
    assert (relu.facts["in_place"], tanh.facts["in_place"]) == (1, 0)


# ------------------------------------------------------------------------------------------ features


def works_on(op: str, args: Sequence[object], **given: TensorSpec) -> OpWork:
    """Return the first work of a call; tensors whose names begin with w are weights."""
    weights = {name: spec for name, spec in given.items() if name.startswith("w")}
    call = call_on(op, args, {name: spec for name, spec in given.items() if name not in weights}, weights)
    assert call is not None
    return works_of(call)[0]


def convolution(in_channels: int, out_channels: int, groups: int) -> OpWork:
    return works_on(
        "conv2d.default",
        ["x", "weight", None, [2, 2], [1, 1], [1, 1], groups],
        x=tensor([5, in_channels, 9, 9]),
        weight=tensor([out_channels, in_channels // groups, 3, 3]),
    )


@pytest.mark.parametrize(
    ("in_channels", "out_channels", "groups", "kind"),
    [
        (8, 8, 1, "conv"),
        (1, 8, 1, "conv"),
        (8, 8, 8, "dwconv"),
        (8, 24, 8, "dwconv"),
        (8, 8, 2, "group_conv"),
        (8, 24, 4, "group_conv"),
    ],
)
def test_a_depthwise_convolution_has_a_group_for_each_channel(
    in_channels: int, out_channels: int, groups: int, kind: str
) -> None:
    found = convolution(in_channels, out_channels, groups)
    assert found.kind == kind
    assert found.features["flops"] == 5 * 5 * 5 * 9 * out_channels * in_channels // groups


def test_features_of_a_depthwise_convolution_are_those_of_both_columns() -> None:
    features = convolution(8, 8, 8).features
    assert features_of("dwconv", "edge") == ("flops", "s_f", "padded_size")
    assert features_of("dwconv", "device") == ("flops", "n_c_out_s_f")
    assert features["flops"] == 5 * 8 * 5 * 5 * 9
    assert features["s_f"] == 8 * 9
    assert features["padded_size"] == 5 * 8 * 11 * 11
    assert features["n_c_out_s_f"] == 5 * 8 * 8 * 9


def test_both_columns_are_the_same_elsewhere() -> None:
    for kind in ("conv", "matmul", "avg_pool", "max_pool", "bias", "elementwise.add", "batch_norm"):
        assert features_of(kind, "edge") == features_of(kind, "device")


def test_padding_in_words() -> None:
    same = works_on(
        "conv2d.padding",
        ["x", "weight", None, [1, 1], "same", [2, 2], 4],
        x=tensor([1, 4, 10, 10]),
        weight=tensor([4, 1, 3, 3]),
    )
    assert (same.features["padded_size"], same.features["flops"]) == (4 * 14 * 14, 4 * 100 * 9)


def test_a_transposed_convolution_has_operations_for_each_place_of_its_input() -> None:
    found = works_on(
        "conv_transpose2d.input",
        ["x", "weight", None, [2, 2], [0, 0], [0, 0], 1, [1, 1]],
        x=tensor([3, 6, 5, 5]),
        weight=tensor([6, 7, 2, 2]),
    )
    assert (found.kind, found.features["flops"]) == ("conv_transpose", 3 * 6 * 5 * 5 * 4 * 7)


def test_a_linear_layer_over_tokens_has_a_row_for_each() -> None:
    found = works_on("linear.default", ["x", "weight"], x=tensor([2, 7, 5]), weight=tensor([3, 5]))
    assert found.features == {
        "flops": 14 * 5 * 3,
        "n_c_in": 14 * 5,
        "n_c_out": 14 * 3,
        "c_in_c_out": 15,
    }


def test_a_batch_of_products() -> None:
    found = works_on("bmm.default", ["x", "y"], x=tensor([4, 7, 5]), y=tensor([4, 5, 3]))
    assert (found.kind, found.features["flops"]) == ("bmm", 4 * 7 * 5 * 3)
    alone = works_on("bmm.default", ["x", "y"], x=tensor([1, 7, 5]), y=tensor([1, 5, 3]))
    assert (alone.kind, alone.features["flops"]) == ("matmul", 7 * 5 * 3)


def test_attention_has_two_products() -> None:
    spec = tensor([2, 3, 7, 4])
    op = "scaled_dot_product_attention.default"
    found = works_on(op, ["q", "k", "v"], q=spec, k=tensor([2, 3, 9, 4]), v=tensor([2, 3, 9, 4]))
    assert (found.kind, found.features["flops"]) == ("attention", 2 * 3 * 7 * 9 * 8)


def test_pooling_to_a_size() -> None:
    found = works_on("adaptive_avg_pool2d.default", ["x", [1, 1]], x=tensor([2, 8, 7, 7]))
    assert found.features == {
        "flops": 2 * 8 * 49,
        "n_c_h_w_in": 2 * 8 * 49,
        "n_c_h_w_out": 2 * 8,
        "h_w_out": 1,
    }


def test_a_weight_for_each_channel_is_a_bias_and_a_whole_tensor_is_none() -> None:
    image, channels = tensor([2, 8, 5, 5]), tensor([8, 1, 1])
    assert works_on("add.Tensor", ["x", "w"], x=image, w=channels).kind == "bias"
    assert works_on("add.Tensor", ["x", "y"], x=image, y=channels).kind == "elementwise.add"
    assert works_on("add.Tensor", ["x", "w"], x=image, w=tensor([8, 5, 5])).kind == "elementwise.add"
    assert works_on("add.Tensor", ["x", 1.0], x=image).kind == "elementwise.add"
    assert works_on("add.Tensor", ["x", "w"], x=image, w=channels).features == {"flops": 400}


@pytest.mark.parametrize(
    ("shape", "run"), [([2, 8, 5, 5], 400), ([8, 1, 1], 25), ([5], 5), ([2, 1, 5, 5], 25), ([1], 400)]
)
def test_a_loop_is_as_long_as_the_smaller_operand_lets_it_be(shape: list[int], run: int) -> None:
    image, other = tensor([2, 8, 5, 5]), tensor(shape)
    assert works_on("mul.Tensor", ["x", "y"], x=image, y=other).facts["run"] == run


def test_an_unknown_operator_has_no_features_to_be_nothing_by() -> None:
    found = works_on("cumsum.default", ["x", 0], x=tensor([4, 5]))
    assert (found.family, found.kind, found.features) == (UNKNOWN, "unknown.cumsum.default", {})
    assert found.facts["bytes_in"] == 80


# -------------------------------------------------------------------------------------- calls, forms


def test_the_same_call_has_the_same_signature_in_every_graph() -> None:
    def signatures(width: int) -> list[str]:
        torch.manual_seed(width)
        graph = capture(nn.Sequential(nn.Linear(width, 6), nn.ReLU()), torch.randn(4, width)).graph
        return [call.signature for call in calls(graph) if call is not None]

    first, again, other = signatures(6), signatures(6), signatures(5)
    assert first == again
    assert first[0] != other[0] and first[1] == other[1]


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(shapes, st.data())
def test_a_reshape_is_a_view_where_torch_makes_one(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.sampled_from(list(permutations(range(len(shape))))))
    spec = tensor(shape, order)
    count = math.prod(shape)
    wanted = data.draw(st.sampled_from([[d, count // d] for d in range(1, count + 1) if count % d == 0]))
    real = spec.empty("cpu")
    assert is_view(spec, wanted) == (real.reshape(wanted).data_ptr() == real.data_ptr())


@given(shapes, st.data())
def test_a_copy_runs_to_the_first_gap(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.sampled_from(list(permutations(range(len(shape))))))
    source = tensor(shape, order)
    assert is_contiguous(source) == source.empty("cpu").is_contiguous()
    places = torch.arange(source.span).as_strided(source.shape, source.stride).reshape(-1).tolist()
    gap = next((i for i in range(1, len(places)) if places[i] != places[i - 1] + 1), len(places))
    assert run_length(in_order(source), [source]) == gap
    assert run_length(source, [source]) == math.prod(shape)
