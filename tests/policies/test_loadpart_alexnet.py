"""Check LoADPart on AlexNet, in the paper's numbers: its cut as the link and the server's load change.

The device is of the order of the paper's, a Raspberry Pi 4. It has four cores of 1.5 GHz that can do 4
multiply-adds a cycle (24e9 a second, of which a good kernel reaches two thirds). Its memory reads or writes
2e9 bytes a second. A node's time is its multiply-adds at the first rate, plus its reads and writes (the
values before and after it, and its weights) at the second rate. A view takes no time. The whole network takes
173 ms, two thirds of it for the weights of the linear layers. The server takes a fortieth, node by node.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from upriver.cost import after, before
from upriver.latency import LatencySums
from upriver.policies.loadpart import decide
from upriver.program.models.loadpart_nodes import PaperNode, paper_nodes
from upriver.program.models.registry import load_model

MULTIPLY_ADDS_PER_S = 16e9
BYTES_PER_S = 2e9
TIMES_SLOWER = 40

MBIT = 125e3

LAYERS = {
    1: (64 * 3 * 11 * 11, 55 * 55),
    5: (192 * 64 * 5 * 5, 27 * 27),
    9: (384 * 192 * 3 * 3, 13 * 13),
    12: (256 * 384 * 3 * 3, 13 * 13),
    15: (256 * 256 * 3 * 3, 13 * 13),
    20: (4096 * 9216, 1),
    23: (4096 * 4096, 1),
    26: (1000 * 4096, 1),
}
"""Weights of each node, and the number of positions that use each weight: one multiply-add per pair."""


def device_s(previous: PaperNode, node: PaperNode) -> float:
    if node.kind == "flatten":
        return 0.0
    weights, places = LAYERS.get(node.number, (0, 0))
    moved = previous.cut_bytes + 4 * weights + node.cut_bytes
    return weights * places / MULTIPLY_ADDS_PER_S + moved / BYTES_PER_S


@pytest.fixture(scope="module")
def sums() -> LatencySums:
    model, inputs = load_model("torchvision:alexnet")
    nodes = paper_nodes(model, inputs.example(1))
    assert [number for number in LAYERS if nodes[number].kind in ("conv", "matmul")] == list(LAYERS)
    seconds = np.array([device_s(*pair) for pair in pairwise(nodes)])
    return LatencySums(
        device_s=before(seconds),
        server_s=after(seconds) / TIMES_SLOWER,
        sent_bytes=np.array([node.cut_bytes for node in nodes]),
        handling_s=np.zeros(len(nodes)),
    )


def test_the_choice_moves_back_from_4_to_8_to_19_to_27_as_the_link_slows_down(sums: LatencySums) -> None:
    """Figure 6 and section V-B. Ties (the flatten takes no time) go to the later node: 19 and never 18."""
    powers = [decide(sums, upload=rate * MBIT) for rate in (1024, 64, 32, 16, 8, 4, 2, 1)]
    assert powers == [0, 4, 4, 19, 19, 19, 27, 27]
    rates = [2 ** (6 - step / 32) for step in range(6 * 32 + 1)]
    assert (rates[0], rates[-1]) == (64, 1)
    chosen = [decide(sums, upload=rate * MBIT) for rate in rates]
    assert chosen == sorted(chosen)
    assert list(dict.fromkeys(chosen)) == [4, 8, 19, 27]


def test_each_choice_is_the_least_of_all_28(sums: LatencySums) -> None:
    total = float(sums.device_s[-1])
    for rate in (64, 27.4, 8, 1):
        found = decide(sums, upload=rate * MBIT)
        seconds = [
            float(sums.device_s[p] + sums.sent_bytes[p] / (rate * MBIT) + sums.server_s[p]) for p in range(27)
        ]
        assert found == 27 or seconds[found] == pytest.approx(min(*seconds, total), rel=1e-12)
        assert found != 27 or total <= min(seconds)


def test_the_choice_moves_from_8_to_19_to_27_as_the_server_gets_busy(sums: LatencySums) -> None:
    """Section V-C: the rate is one at which an idle server gets all nodes after 8."""
    chosen = [decide(sums, upload=27.4 * MBIT, load=load) for load in (1, 2, 4, 8, 16, 20, 40, 80)]
    assert chosen == sorted(chosen)
    assert list(dict.fromkeys(chosen)) == [8, 19, 27]
    assert chosen[-2:] == [27, 27]
