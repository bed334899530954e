"""Check the scratch memory of convolutions: the rule against torch's allocator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.profile.memory.test_estimator import allocated_at_most
from upriver.profile.memory.convolution import convolution, convolution_backward

# samples, channels in and out, pixels, kernel, stride, padding, groups
FORMS = [
    (8, 32, 16, 14, 4, 2, 1, 1),
    (8, 64, 32, 28, 2, 2, 0, 1),
    (8, 32, 32, 14, 3, 1, 1, 1),
    (8, 21, 21, 14, 4, 2, 1, 1),
    (8, 32, 32, 14, 4, 2, 1, 32),
    (8, 32, 32, 14, 4, 2, 1, 2),
    (8, 64, 3, 32, 4, 2, 1, 1),
    (4, 100, 64, 1, 4, 1, 0, 1),
    (1, 16, 16, 8, 3, 1, 1, 1),
    (32, 32, 32, 14, 1, 1, 0, 1),
]
CLOSE = {0, 1, 5, 9}
"""Indices of the forms whose rule is close: large, of whole blocks of channels."""


def call(form: tuple[int, ...], *, transposed: bool) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    samples, inner, outer, pixels, kernel, stride, padding, groups = form
    rows, columns = (inner, outer) if transposed else (outer, inner)
    x = torch.randn(samples, inner, pixels, pixels)
    w = torch.randn(rows, columns // groups, kernel, kernel)
    return x, w, [[stride] * 2, [padding] * 2, [1, 1], transposed, [0, 0], groups]


CASES = [(number, True) for number in range(len(FORMS))]
CASES += [(number, False) for number, (*_, pixels, kernel, _, _, _) in enumerate(FORMS) if pixels >= kernel]


@pytest.mark.parametrize(("number", "transposed"), CASES)
def test_no_convolution_takes_more_than_its_rule_says(number: int, transposed: bool) -> None:
    x, w, rest = call(FORMS[number], transposed=transposed)
    results: list[Any] = []
    taken = allocated_at_most(lambda: results.append(torch.ops.aten.convolution(x, w, None, *rest)))
    y = results.pop()
    says = convolution((x, w, None, *rest), [y]).nbytes
    assert taken - y.nbytes <= says
    if transposed and number in CLOSE:
        assert says <= 1.3 * (taken - y.nbytes)

    back = (torch.randn_like(y), x, w, None, *rest, [True, True, False])
    taken = allocated_at_most(lambda: results.append(torch.ops.aten.convolution_backward(*back)))
    given = [tensor for tensor in results.pop() if tensor is not None]
    assert taken - sum(tensor.nbytes for tensor in given) <= convolution_backward(back, given).nbytes
