"""Check that samples survive flattening; an unsendable value is named, and a forged sample is refused."""

import math
from collections import OrderedDict, namedtuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.dataloader.toy_datasets import same
from upriver.errors import ConfigError, ProtocolError
from upriver.protocol import tree
from upriver.protocol.tree import MAX_DEPTH, build, flatten, identical

numbers = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
)
arrays = st.sampled_from(
    [
        torch.arange(6).reshape(2, 3),
        torch.tensor(1.5),
        torch.zeros(0, 3, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.tensor([True, False]),
        np.arange(4, dtype=np.int16)[::2],
        np.zeros((0, 2)),
        np.array(3.0),
        np.float64(2.5),
        np.int8(-3),
        np.bool_(True),
    ]
)
keys = st.one_of(st.text(max_size=3), st.integers(-5, 5), st.floats(allow_nan=False, width=32))
samples = st.recursive(
    numbers | arrays,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=12,
)


def through(value):
    node, tensors = flatten(value)
    return build(msgspec.json.decode(msgspec.json.encode(node)), tensors)


@given(samples)
def test_a_sample_comes_out_as_it_went_in(value):
    assert same(through(value), value)


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf, -0.0, 5e-324])
def test_floats_keep_every_bit(value):
    assert np.float64(through([value])[0]).tobytes() == np.float64(value).tobytes()


def test_tensors_are_not_copied():
    tensor = torch.ones(3)
    node, (sent,) = flatten({"x": tensor})
    assert sent.data_ptr() == tensor.data_ptr()
    assert node == ["d", "x", ["t", 0]]


def test_arrays_that_are_read_only_or_not_contiguous():
    array = np.arange(6).reshape(2, 3)
    array.flags.writeable = False
    assert same(through(array), array) and same(through(array.T), array.T)
    through(array)[0, 0] = 7
    assert array[0, 0] == 0


def layouts():
    base = np.arange(240, dtype=np.float32).reshape(6, 8, 5)
    kept = {
        "rows": base,
        "fortran": np.asfortranarray(base[0]),
        "transposed": base.transpose(2, 0, 1),
        "crop": base[1:5, 1:7],
        "crop of the transposed": base.transpose(2, 0, 1)[:, 1:5],
        "one of one": base[:1, 3:4, :1],
        "nothing": base[:, :0],
        "number": np.array(3.0),
    }
    return kept | {f"{name}, read only": read_only(array) for name, array in kept.items()}


def read_only(array):
    view = array.view()
    view.flags.writeable = False
    return view


@pytest.mark.parametrize("name", layouts())
def test_arrays_keep_their_strides_and_are_copied_where_they_are_read_only(name):
    array = layouts()[name]
    found = through(array)
    assert same(found, array)
    if array.size:
        assert found.strides == array.strides and found.ctypes.data % 64 == array.ctypes.data % 64
    assert array.size == 0 or np.shares_memory(found, array) == array.flags.writeable


@pytest.mark.parametrize(
    ("array", "order"),
    [
        (np.arange(2400.0).reshape(8, 5, 60)[..., 7].T, (1, 0)),
        (np.arange(40.0).reshape(8, 5)[::-1].T, (1, 0)),
        (np.arange(40.0).reshape(8, 5)[:, ::-1], (0, 1)),
    ],
)
def test_arrays_that_are_mostly_gaps_or_run_backwards_keep_the_order_of_their_dimensions(array, order):
    _, (sent,) = flatten(array)
    assert same(through(array), array) and sent.permute(order).is_contiguous()
    assert sent.untyped_storage().nbytes() == array.nbytes


def test_identical_looks_at_the_order_of_dimensions_in_memory_and_not_at_gaps():
    tensor = torch.rand(4, 5, 6)
    turned = tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not identical(tensor, turned) and not identical(tensor.numpy(), turned.numpy())
    assert identical(turned, turned[:]) and identical(turned.numpy(), turned.numpy())
    crop = tensor[:, 1:3]
    assert identical(crop, crop.clone()) and identical(crop.numpy(), crop.clone().numpy())
    assert identical(tensor[:1], tensor[:1].permute(1, 2, 0).contiguous().permute(2, 0, 1))
    assert identical(tensor[:, :0], tensor[:, :0].clone())


@given(samples, samples)
def test_identical_is_to_the_bit(one, other):
    assert identical(one, through(one))
    assert identical(one, other) <= same(one, other) or one != one


def test_what_differs_is_not_identical():
    nan = torch.tensor([math.nan])
    assert identical(nan, nan.clone()) and not identical(torch.tensor(0.0), torch.tensor(-0.0))
    assert not identical(torch.zeros(2), torch.zeros(2, 1)) and not identical([1], (1,))
    assert not identical(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not identical(1, 1.0) and not identical({"a": 1}, {"b": 1})
    assert identical(torch.zeros(0, 2), torch.zeros(0, 2))


Point = namedtuple("Point", "x y")


class Number(int):
    pass


class Weights(np.ndarray):
    pass


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"image": Image.new("RGB", (2, 2))}, r"\['image'\] is a PIL.Image.Image"),
        ([1, Point(1, 2)], r"\[1\] is a tests.protocol.test_tree.Point"),
        (OrderedDict(), "the sample is a collections.OrderedDict"),
        ({(1, 2): 3}, "a key of the sample is a builtins.tuple"),
        ((Number(3),), r"\[0\] is a tests.protocol.test_tree.Number"),
        ({1, 2}, "builtins.set"),
        (torch.nn.Parameter(torch.ones(1)), "torch.nn.parameter.Parameter"),
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "cannot be sent"),
        (np.array(["a"]), "numpy.ndarray of <U1"),
        (np.array([1], dtype=np.longdouble), "float128"),
        (np.array([1], dtype=">i4"), ">i4"),
        (np.array([object()]), "object"),
        ([np.ma.masked_less([1.0, 2.0], 2)], r"\[0\] is a numpy.ma.*MaskedArray"),
        (np.ones(2).view(Weights), "tests.protocol.test_tree.Weights"),
        (object(), "builtins.object"),
    ],
)
def test_what_cannot_be_sent_is_named(value, says):
    with pytest.raises(ConfigError, match=says):
        flatten(value)


def test_a_sample_that_holds_itself_is_an_error():
    value: list = []
    value.append(value)
    with pytest.raises(ConfigError, match="deep"):
        flatten(value)


TENSORS = (
    torch.arange(3),
    torch.tensor(1.5),
    torch.zeros(2, dtype=torch.uint8),
    torch.zeros(1, dtype=torch.bfloat16),
)


@pytest.mark.parametrize(
    "node",
    [
        [],
        {},
        [1],
        ["x"],
        ["t"],
        ["t", 4],
        ["t", -1],
        ["t", True],
        ["t", 0.0],
        ["t", 0, 0],
        ["g", 0],
        ["n", 3],
        ["b", 0],
        ["i", 5],
        ["i", "1_0"],
        ["i", "--1"],
        ["i", "\u0661"],
        ["i", "9" * 401],
        ["f", "00"],
        ["f", "zz" * 8],
        ["d", 1],
        ["d", ["l"], 1],
        ["d", None, 1],
        ["l", {"a": 1}],
    ],
)
def test_what_is_forged_is_refused(node):
    with pytest.raises(ProtocolError):
        build(node, TENSORS)


@pytest.mark.parametrize("kind", ["i", "f"])
def test_a_forged_number_is_quoted_by_its_first_40_characters(kind):
    with pytest.raises(ProtocolError, match=f"got '{'9' * 40}'$"):
        build([kind, "9" * 401], ())


def test_depth_is_bounded():
    node = 1
    for _ in range(MAX_DEPTH + 1):
        node = ["l", node]
    with pytest.raises(ProtocolError, match="deep"):
        build(node, ())


def test_the_number_of_parts_is_bounded(monkeypatch):
    monkeypatch.setattr(tree, "MAX_NODES", 4)
    assert build(flatten([1, 2, 3])[0], ()) == [1, 2, 3]
    with pytest.raises(ConfigError, match="at most 4 parts"):
        flatten([1, 2, 3, 4])
    with pytest.raises(ProtocolError, match="at most 4 parts"):
        build(["l", 1, 2, 3, 4], ())
