"""Check stored tensors: files of NumPy and safetensors are read, files with false headers are refused."""

from __future__ import annotations

import io
import json
import pickle
import struct
from typing import Literal

import numpy as np
import pytest
import torch
from safetensors.torch import save

from tests.examples import some
from tests.pipeline.making import npy
from upriver.pipeline import Draw, LoadTensor, SampleError, stored_tensor

DRAW = Draw(seed=0, epoch=0, sample=0, stage=0)


def load(data: bytes, form: str) -> torch.Tensor:
    return LoadTensor(form).apply(stored_tensor(data), DRAW)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "?"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_is_read_back(dtype: str, order: str) -> None:
    array = np.asarray(np.random.default_rng(0).integers(0, 2, (2, 3, 5)), dtype=dtype, order=order)  # type: ignore[call-overload]
    got = load(npy(array), "npy")
    assert torch.equal(got, torch.tensor(np.ascontiguousarray(array)))
    assert got.is_contiguous()
    assert got.data_ptr() % 64 == 0
    got.add_(1) if got.dtype is not torch.bool else got.logical_not_()


NPY_DTYPES = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "c16", "c8", "?"]


@pytest.mark.parametrize("byte_order", ["<", ">"])
@pytest.mark.parametrize("dtype", NPY_DTYPES)
@pytest.mark.parametrize(
    ("shape", "order"), some(1, [((2, 3, 5), "F"), ((2, 3, 5), "C"), ((), "C"), ((0, 3), "F")])
)
def test_npy_of_any_type_and_form_is_what_from_numpy_gives(
    dtype: str, byte_order: str, shape: tuple[int, ...], order: Literal["C", "F"]
) -> None:
    bits = {"?": 1, "i1": 7, "u1": 8, "f2": 11, "i2": 15, "u2": 16, "i4": 31, "u4": 32, "u8": 64}.get(
        dtype, 52
    )
    values = np.random.default_rng(0).integers(0, 2**bits - 1, shape, dtype=np.uint64, endpoint=True)
    native = np.asarray(values).astype(dtype, order=order)
    wanted = torch.from_numpy(np.array(native, order="C"))
    for version in ((1, 0), (2, 0), (3, 0)):
        out = io.BytesIO()
        np.lib.format.write_array(out, native.astype(f"{byte_order}{dtype}"), version=version)
        got = load(out.getvalue(), "npy")
        assert torch.equal(got, wanted)
        assert (got.dtype, got.is_contiguous(), got.data_ptr() % 64) == (wanted.dtype, True, 0)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_npy_in_fortran_order_without_dimensions_is_read(version: int) -> None:
    data = header("()", version=bytes([version, 0])).replace(b"False", b"True ") + struct.pack("<f", 3)
    assert torch.equal(load(data, "npy"), torch.tensor(3.0))


@pytest.mark.parametrize("shape", [(0,), (2, 0), ()])
def test_safetensors_of_unsigned_and_empty_tensors_are_read(shape: tuple[int, ...]) -> None:
    for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.float32, torch.bool):
        got = load(save({"x": torch.ones(shape).to(dtype)}), "safetensors")
        assert torch.equal(got, torch.ones(shape).to(dtype))
        assert got.dtype is dtype


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool],
)
def test_safetensors_is_read_back(dtype: torch.dtype) -> None:
    tensor = torch.arange(30).view(2, 3, 5).remainder(2).to(dtype)
    got = load(save({"anything": tensor}, metadata={"by": "a test"}), "safetensors")
    assert got.dtype is dtype
    assert torch.equal(got, tensor)
    assert got.data_ptr() % 64 == 0


def test_of_several_tensors_the_one_named_tensor_is_taken() -> None:
    both = {"tensor": torch.arange(4), "aux": torch.zeros(9)}
    assert torch.equal(load(save(both), "safetensors"), torch.arange(4))
    with pytest.raises(SampleError, match="must hold one tensor, or one named 'tensor'"):
        load(save({"a": torch.zeros(2), "b": torch.zeros(2)}), "safetensors")


def test_python_objects_are_never_unpickled() -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return pytest.fail, ("unpickled",)

    with pytest.raises(SampleError, match=r"dtype '\|O'"):
        load(npy(np.array([Evil()], dtype=object), allow_pickle=True), "npy")
    with pytest.raises(SampleError, match=r"not a \.npy file"):
        load(pickle.dumps([1, 2]), "npy")


def header(shape: str, descr: str = "'<f4'", version: bytes = b"\x01\x00") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY" + version + struct.pack("<H" if version == b"\x01\x00" else "<I", len(text)) + text


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "not a .npy file"),
        (header("(2,)"), "takes 8 bytes, 0 are stored"),
        (header("(2,)") + bytes(9), "takes 8 bytes, 9 are stored"),
        (header("(1000000000000,)") + bytes(8), "takes 4000000000000 bytes, 8 are stored"),
        (header("(-1, -2)") + bytes(8), "at least 0"),
        (header("(-1, 0)"), "at least 0"),
        (header("(0,)") + bytes(4), "takes 0 bytes, 4 are stored"),
        (header("(0, 1099511627776, 1099511627776)"), "without an element"),
        (header("(True,)") + bytes(4), "at least 0"),
        (header("(" + "1," * 40 + ")") + bytes(4), "at most 16 sizes"),
        (header("'x'"), "not a .npy file"),
        (header("(2,)", "'>M8[s]'") + bytes(16), r"dtype '>M8\[s\]'; allowed: <f8"),
        (header("(2,)", "'<U1'") + bytes(8), "dtype '<U1'"),
        (header("(2,)", "'<f16'") + bytes(32), "dtype '<f16'"),
        (header("(2,)", "[('a', '<f4')]") + bytes(8), "dtype"),
        (header("(2,)", version=b"\x04\x00") + bytes(8), "not a .npy file"),
        (header("(2,)", "[('\u00e4', '<f4')]", version=b"\x03\x00") + bytes(8), "dtype"),
        (header("(" * 9000), "not a .npy file"),
        (header("(2,)", "'|b1'") + b"\x00\x02", "bool tensor with bytes other than"),
    ],
)
def test_npy_that_lies_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(SampleError, match=problem):
        load(data, "npy")


def safetensors(head: object, body: bytes = b"") -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + body


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "not a .safetensors file"),
        (struct.pack("<Q", 2**63) + b"{}", "not a .safetensors file"),
        (safetensors(b"nonsense"), "not a .safetensors file"),
        (safetensors(b"[" * 100_000), "not a .safetensors file"),
        (safetensors([]), "not a .safetensors file"),
        (safetensors({}), "must hold one tensor"),
        (safetensors({"x": {}}), "not a .safetensors file: 'dtype'"),
        (safetensors({"x": 3}), "not a .safetensors file"),
        (safetensors(entry(), bytes(7)), "offsets 0 to 8 leave its 7 bytes"),
        (safetensors(entry(offsets=(-8, 0)), bytes(8)), "offsets -8 to 0"),
        (safetensors(entry(offsets=(0, 4)), bytes(8)), "takes 8 bytes, 4 are stored"),
        (safetensors(entry(offsets=(0, 8.0)), bytes(8)), "whole numbers"),
        (safetensors(entry(shape=(True, 2)), bytes(8)), "whole numbers"),
        (safetensors(entry(shape=(-1, -2)), bytes(8)), "at least 0"),
        (safetensors(entry(dtype="F8_E4M3"), bytes(8)), "dtype 'F8_E4M3'; allowed: F64"),
        (safetensors(entry(dtype=["F32"]), bytes(8)), "dtype must be a string"),
        (safetensors(entry(shape=(1,) * 17), bytes(8)), "at most 16 sizes"),
    ],
)
def test_safetensors_that_lie_are_refused(data: bytes, problem: str) -> None:
    with pytest.raises(SampleError, match=problem):
        load(data, "safetensors")
