"""Check LoADPart's node numbers: those that the paper prints, and the rule on small networks."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.program.nets import Small
from upriver.errors import CaptureError
from upriver.program.models.loadpart_nodes import PaperNode, paper_nodes
from upriver.program.models.registry import load_model
from upriver.program.split.cut_survey import survey

CONV, MATMUL = ("conv", "bias", "activation"), ("matmul", "bias", "activation")


@cache
def nodes_of(name: str, input_shape: tuple[int, ...] | None = None) -> tuple[PaperNode, ...]:
    model, inputs = load_model(name, input_shape=input_shape)
    return paper_nodes(model, inputs.example(1))


def kinds(nodes: tuple[PaperNode, ...]) -> list[str]:
    return [node.kind for node in nodes]


def test_alexnet_has_27_nodes_with_the_first_poolings_at_4_and_8_and_the_flatten_at_19() -> None:
    """Check the numbers of sections V-B and V-C.

    conv, bias, relu, pool = 4; the same = 8; three times conv, bias, relu = 17; pool = 18; flatten = 19;
    twice matmul, bias, relu = 25; matmul, bias = 27. The average pooling (6 x 6 to 6 x 6) and the Dropouts
    are not nodes. Bytes: 3 x 224 x 224 x 4, 64 x 55 x 55 x 4, 64 x 27 x 27 x 4, 192 x 27 x 27 x 4, 192 x 13 x
    13 x 4, 384 x 13 x 13 x 4, 256 x 13 x 13 x 4, 256 x 6 x 6 x 4, 4096 x 4, 1000 x 4.
    """
    nodes = nodes_of("torchvision:alexnet")
    assert [node.number for node in nodes] == list(range(28))
    assert kinds(nodes) == [
        *("input", *CONV, "pooling", *CONV, "pooling", *CONV, *CONV, *CONV, "pooling", "flatten"),
        *(*MATMUL, *MATMUL, "matmul", "bias"),
    ]
    assert [node.cut_bytes for node in nodes] == [
        *(602112, *[774400] * 3, 186624, *[559872] * 3, 129792, *[259584] * 3, *[173056] * 6),
        *(*[36864] * 2, *[16384] * 6, *[4000] * 2),
    ]
    assert all(node.tensors == 1 for node in nodes)
    named = [0, 1, 2, 3, 4, 8, 18, 19, 27]
    assert [nodes[number].name for number in named] == [
        *("input", "features.0", "features.0", "features.1", "features.2", "features.5", "features.12"),
        *("flatten", "classifier.6"),
    ]


def test_no_program_is_cut_between_a_layer_and_its_bias() -> None:
    nodes = nodes_of("torchvision:alexnet")
    inside = [node.number for node in nodes if not node.runnable]
    assert inside == [1, 5, 9, 12, 15, 20, 23, 26]
    assert all(nodes[number + 1].kind == "bias" for number in inside)


@pytest.mark.full
def test_squeezenet_has_the_papers_cuts_at_5_and_39_and_ends_at_99() -> None:
    """Check the numbers of sections V-B and V-C at 227 x 227: 193,600 and 93,312 bytes.

    conv, bias, relu, pool = 4, so the first squeeze convolution is 5: 16 x 55 x 55 x 4 bytes. A Fire has
    three convolutions with bias and relu (9 nodes) and a concatenation. If the concatenation were one node,
    three Fires of 10 would end at 34. The squeeze convolution after the second pooling would then be 36. With
    two nodes the paper's numbers match: 4 + 3 x 11 = 37, pool = 38, and 39 has 32 x 27 x 27 x 4 bytes. The
    end matches too: 38 + 4 x 11 = 82, pool = 83, + 11 = 94, conv, bias, relu = 97, average = 98, flatten =
    99, and not 91.
    """
    nodes = nodes_of("torchvision:squeezenet1_0", input_shape=(3, 227, 227))
    assert len(nodes) - 1 == 99
    fire = [*CONV * 3, "tuple", "concat"]
    assert kinds(nodes) == [
        *("input", *CONV, "pooling", *fire * 3, "pooling", *fire * 4, "pooling", *fire),
        *(*CONV, "pooling", "flatten"),
    ]
    assert (nodes[5].kind, nodes[5].name, nodes[5].cut_bytes) == ("conv", "features.3.squeeze", 193600)
    assert (nodes[39].kind, nodes[39].name, nodes[39].cut_bytes) == ("conv", "features.7.squeeze", 93312)
    # The squeezed value together with one expanded value, and the two values that are joined.
    squeezed, expanded = 193600, 64 * 55 * 55 * 4
    assert (nodes[8].tensors, nodes[8].cut_bytes) == (2, squeezed + expanded)
    assert [(node.tensors, node.cut_bytes, node.runnable) for node in nodes[13:16]] == [
        (2, 2 * expanded, True),
        (2, 2 * expanded, True),
        (1, 2 * expanded, True),
    ]
    smaller = [node for node in nodes if node.cut_bytes < nodes[0].cut_bytes]
    assert (smaller[0].number, nodes[0].cut_bytes) == (5, 3 * 227 * 227 * 4)


@pytest.mark.parametrize(
    ("name", "count", "poolings"),
    [
        # 13 x (conv, bias, relu) and 5 pools; no average (7 x 7 to 7 x 7); flatten; 3 linear, 2 relu: 39 + 5
        # + 1 + 8.
        ("torchvision:vgg16", 53, [7, 14, 24, 34, 44]),
        # conv, bn, relu, pool; 8 x (2 conv, 2 bn, 2 relu, add); 3 shortcuts of (conv, bn); average, flatten,
        # linear: 4 + 56 + 6 + 4.
        ("torchvision:resnet18", 70, [4, 67]),
        # 4; 16 x (3 conv, 3 bn, 3 relu, add); 4 shortcuts of (conv, bn); 4: 4 + 160 + 8 + 4.
        pytest.param("torchvision:resnet50", 176, [4, 173], marks=pytest.mark.full),
        # 2 x (conv, bn, relu) = 6. A separable convolution is two nodes, without biases. Block 1: sep, bn,
        # relu, sep, bn, pool = 8, plus a shortcut of conv and bn, plus add = 11. Blocks 2, 3 and 12 begin
        # with a relu = 12 each. Blocks 4 to 11: 3 x (relu, sep, bn) and add = 13 each. 2 x (sep, bn, relu) =
        # 8; average, flatten, linear = 4: 6 + 11 + 2 x 12 + 8 x 13 + 12 + 8 + 4.
        pytest.param("timm:legacy_xception", 169, [14, 26, 38, 154, 166], marks=pytest.mark.full),
    ],
)
@pytest.mark.full
def test_the_other_networks(name: str, count: int, poolings: list[int]) -> None:
    if name.startswith("timm:"):
        pytest.importorskip("timm")
    nodes = nodes_of(name)
    assert len(nodes) - 1 == count
    assert [node.number for node in nodes if node.kind == "pooling"] == poolings
    assert (nodes[-1].kind, nodes[-1].cut_bytes, nodes[-1].tensors) == ("bias", 4000, 1)


@pytest.mark.full
def test_the_first_cut_of_vgg16_that_is_smaller_than_its_input() -> None:
    """The cut is after the fourth pooling, 512 x 14 x 14 x 4 bytes.

    It is node 34 with the biases of torchvision's network, and node 24 without. The paper says 23 (section
    V-B), where neither network has a pooling.
    """
    nodes = nodes_of("torchvision:vgg16")
    first = next(node for node in nodes if node.cut_bytes < nodes[0].cut_bytes)
    assert (first.number, first.kind, first.cut_bytes) == (34, "pooling", 401408)


# ------------------------------------------------------------------------------------------- the rule


def images(samples: int = 2, channels: int = 3) -> torch.Tensor:
    return torch.randn(samples, channels, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.full
def test_bytes_are_those_of_one_sample_whatever_the_batch() -> None:
    one, many = paper_nodes(Small(), images(1)), paper_nodes(Small(), images(6))
    assert one == many
    assert len(one) - 1 == 4 + 7 + 1 + 2 * 7 + 1 + 1 + 2


@pytest.mark.full
def test_a_cut_that_can_be_run_is_one_of_those_behind_operators() -> None:
    nodes = paper_nodes(Small(), images())
    rows = survey(Small(), images(), granularity="op").rows
    offered = {(row.bytes_per_sample, row.tensors) for row in rows}
    assert {(node.cut_bytes, node.tensors) for node in nodes if node.runnable} <= offered
    block = [node for node in nodes if node.name.startswith("block1")]
    assert [node.tensors for node in block] == [2, 2, 2, 2, 2, 1, 1]  # its input is added at the end


class Kinds(nn.Module):
    """Mix nodes of several kinds with operations that are not nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(4, 8, 3, groups=4, padding=1)
        self.grouped = nn.Conv2d(8, 8, 1, groups=2, bias=False)
        self.norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(32, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.grouped(self.dropout(self.depthwise(x)))
        x = functional.adaptive_avg_pool2d(x, (16, 16))  # as it is
        x = self.norm(x.transpose(2, 3)) * torch.arange(16.0).cos()
        x = functional.adaptive_avg_pool2d(functional.max_pool2d(x, 3, 1, 1), (2, 2))
        x = torch.softmax(torch.flatten(x, 1), 1)
        return self.head(x).unsqueeze(1)


def test_what_is_a_node_and_what_is_none() -> None:
    nodes = paper_nodes(Kinds(), images(2, 4))
    assert kinds(nodes) == [
        *("input", "depthwise conv", "bias", "conv", "layer_norm", "element-wise", "pooling", "pooling"),
        *("flatten", "activation", "matmul"),
    ]
    assert [node.runnable for node in nodes] == [True, False, *[True] * 9]
    assert [node.name for node in nodes[:5]] == ["input", "depthwise", "depthwise", "grouped", "norm"]
    assert nodes[-1].cut_bytes == 12


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


def test_behind_an_operator_that_no_program_may_hold_nothing_can_be_run() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), Noise(), nn.Linear(6, 2, bias=False))
    nodes = paper_nodes(model, torch.zeros(2, 6))
    assert kinds(nodes) == [
        *("input", "matmul", "bias", "activation", "randn_like", "element-wise", "matmul"),
    ]
    assert [node.runnable for node in nodes] == [True, False, True, True, False, False, False]


def test_a_model_whose_inputs_are_joined_first() -> None:
    class Joined(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, y], 1).relu()

    nodes = paper_nodes(Joined(), (torch.zeros(2, 3), torch.zeros(2, 5)))
    assert [(node.kind, node.tensors, node.cut_bytes) for node in nodes] == [
        ("input", 2, 32),
        ("tuple", 2, 32),
        ("concat", 1, 32),
        ("activation", 1, 32),
    ]


def test_a_model_without_a_node_is_its_input() -> None:
    assert kinds(paper_nodes(nn.Dropout(0.5), torch.zeros(2, 3))) == ["input"]


def test_a_model_that_decides_by_its_data_has_no_numbers() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(CaptureError, match="control flow depends on data"):
        paper_nodes(Branch(), torch.ones(2, 3))
