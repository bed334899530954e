"""Check that a shard gives the rows that were written, or says that it is damaged."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis.strategies as st
import pytest
import safetensors.numpy
import torch
import xxhash
from hypothesis import given

from tests.features.keeping import assert_same, bits, key, row
from upriver.errors import Damaged
from upriver.features import Row, shard
from upriver.features.row_form import RowBuffer
from upriver.features.shard import OtherVersion, PackedShard, Shard, disk_bytes, pack

STRETCH = "5" * 64
ROWS: dict[bytes, Row] = {
    key(1): row(1),
    key(2): row(2),
    key(3): (torch.arange(6, dtype=torch.uint8).reshape(2, 3),),
    key(4): (),
    key(5): (torch.zeros(0, 3), torch.tensor(5.0, dtype=torch.bfloat16)),
    key(6): row(6),
}


def written(tmp_path: Path, rows: dict[bytes, Row] = ROWS) -> bytes:
    path = tmp_path / "shard"
    path.touch()
    whole = pack(STRETCH, rows)
    whole.write(path)
    assert path.stat().st_size == whole.nbytes
    return path.read_bytes()


@contextmanager
def as_file(data: bytes) -> Iterator[int]:
    file = os.memfd_create("shard", os.MFD_CLOEXEC)
    try:
        os.write(file, data)
        yield file
    finally:
        os.close(file)


def read(found: Shard, file: int, number: int) -> Row:
    return found.read(file, number, RowBuffer(64 + found.nbytes_of(number)), 64)


def outcome(data: bytes) -> set[bytes] | None:
    """Return the keys of the rows that can be read, after a check that each is right; None for no shard."""
    with as_file(data) as file:
        try:
            found = Shard(Path("shard"), file, STRETCH)
        except (Damaged, OtherVersion):
            return None
        assert found.keys == list(ROWS)
        right = set()
        for number, each in enumerate(found.keys):
            try:
                got = read(found, file, number)
            except Damaged:
                continue
            assert_same(got, ROWS[each])
            right.add(each)
        return right


def test_shard_gives_every_row_with_its_bits(tmp_path: Path) -> None:
    data = written(tmp_path)
    assert outcome(data) == ROWS.keys()
    with as_file(data) as file:
        found = Shard(tmp_path, file, STRETCH)
        assert found.rows_nbytes == sum(each.nbytes for each in pack(STRETCH, ROWS).rows)
        assert all(tensor.data_ptr() % 64 == 0 for tensor in read(found, file, 0))


def test_shard_with_any_byte_changed_gives_right_rows_or_none(tmp_path: Path) -> None:
    """Before the rows any change is found at once; in them it costs the row that has it, and no other."""
    data, chances = written(tmp_path), random.Random(1)
    start = len(data) - sum(each.nbytes for each in pack(STRETCH, ROWS).rows)
    lost = 0
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << chances.randrange(8) if at % 2 else chances.randrange(1, 256)
        right = outcome(bytes(changed))
        if at < start:
            assert right is None
        else:
            assert right is not None and len(right) == len(ROWS) - 1
            lost += 1
    assert lost == len(data) - start > 500


changes = st.one_of(
    st.tuples(st.just("cut"), st.integers(0, 10**4), st.just(0)),
    st.tuples(st.just("set"), st.integers(0, 10**4), st.integers(0, 255)),
    st.tuples(st.just("add"), st.integers(1, 200), st.integers(0, 255)),
    st.tuples(st.just("zero"), st.integers(0, 10**4), st.integers(1, 5000)),
)


@given(changing=st.lists(changes, min_size=1, max_size=4))
def test_shard_changed_in_any_way_gives_right_rows_or_none(
    tmp_path_factory: pytest.TempPathFactory, changing: list[tuple[str, int, int]]
) -> None:
    data = bytearray(written(tmp_path_factory.getbasetemp()))
    for kind, at, value in changing:
        at %= len(data) + 1
        if kind == "cut":
            del data[at:]
        elif kind == "set":
            data[at : at + 1] = bytes([value])
        elif kind == "add":
            data += bytes([value]) * at
        else:
            data[at : at + value] = bytes(len(data[at : at + value]))
    outcome(bytes(data))


@given(st.binary(max_size=200), st.booleans())
def test_file_of_anything_is_no_shard(data: bytes, with_length: bool) -> None:
    assert outcome((len(data).to_bytes(8, "little") if with_length else b"") + data) is None


def test_shard_cut_anywhere_is_no_shard(tmp_path: Path) -> None:
    data = written(tmp_path)
    assert all(outcome(data[:stop]) is None for stop in range(len(data)))


def test_shard_that_shrinks_after_opening_gives_no_row(tmp_path: Path) -> None:
    data = written(tmp_path)
    with as_file(data) as file:
        found = Shard(tmp_path, file, STRETCH)
        os.ftruncate(file, len(data) - 1)
        assert_same(read(found, file, 0), ROWS[key(1)])
        with pytest.raises(Damaged, match="it is cut short"):
            read(found, file, len(ROWS) - 1)


def test_shard_of_another_stretch_is_damage_also_if_its_name_is_changed(tmp_path: Path) -> None:
    data = written(tmp_path)
    with as_file(data) as file, pytest.raises(Damaged, match=f"it holds rows of stretch '{STRETCH}'"):
        Shard(tmp_path, file, "6" * 64)


def test_shard_of_another_version_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shard, "SCHEMA", "upriver.features/2")
        data = written(tmp_path)
    with (
        as_file(data) as file,
        pytest.raises(OtherVersion, match=r"its schema is 'upriver.features/2'; this"),
    ):
        Shard(tmp_path, file, STRETCH)


def sealed(data: bytes) -> bytes:
    """Return a shard with the checksum that its index has now."""
    start = len(data) - sum(each.nbytes for each in pack(STRETCH, ROWS).rows)
    at = data.index(b'"checksum":"') + 12
    blank = data[:at] + b"0" * 16 + data[at + 16 : start]
    return data[:at] + f"{xxhash.xxh3_64_intdigest(blank):016x}".encode() + data[at + 16 :]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (b"float32", b"float33", "no row has a tensor of the form"),
        (b"[1,16,2,2]", b"[1,16,2,3]", "no row has a tensor of the form"),
        (b'"U64"', b'"I64"', "it has another length than was written"),
        (b'"shape":[6,16]', b'"shape":[5,16]', "another"),
        (b'"forms":{', b'"farms":{', "its header is damaged"),
    ],
)
def test_shard_whose_index_says_otherwise_is_damage(
    tmp_path: Path, old: bytes, new: bytes, told: str
) -> None:
    data = written(tmp_path)
    assert outcome(sealed(data)) == ROWS.keys()
    changed = data.replace(old, new, 1)
    assert changed != data
    with as_file(sealed(changed)) as file, pytest.raises(Damaged, match=told):
        Shard(tmp_path, file, STRETCH)


def test_shard_whose_rows_have_another_length_is_damage(tmp_path: Path) -> None:
    data = bytearray(written(tmp_path))
    start = len(data) - sum(each.nbytes for each in pack(STRETCH, ROWS).rows)
    data[start - 4] = 2  # the last row has the form of an empty one
    with as_file(sealed(bytes(data))) as file, pytest.raises(Damaged, match="its rows have another length"):
        Shard(tmp_path, file, STRETCH)


def test_shard_row_with_a_number_of_no_form_is_damage(tmp_path: Path) -> None:
    data = bytearray(written(tmp_path))
    start = len(data) - sum(each.nbytes for each in pack(STRETCH, ROWS).rows)
    data[start - 4] = 4  # the form of the last row; there are four
    with as_file(sealed(bytes(data))) as file, pytest.raises(Damaged, match="a row has no form"):
        Shard(tmp_path, file, STRETCH)


def test_shard_is_a_safetensors_file(tmp_path: Path) -> None:
    found = safetensors.numpy.load(written(tmp_path))
    assert [bytes(each) for each in found["keys"]] == list(ROWS)
    assert found["checksums"].shape == found["forms"].shape == (len(ROWS),)
    assert found["forms"].tolist() == [0, 0, 1, 2, 3, 0]
    assert found["rows"].tobytes().startswith(bits(row(1)[0].permute(0, 2, 3, 1)))


def test_shard_with_a_long_index_is_read_whole(tmp_path: Path) -> None:
    many: dict[bytes, Row] = {key(n): (torch.tensor([n]),) for n in range(3000)}
    data = written(tmp_path, many)
    with as_file(data) as file:
        found = Shard(tmp_path, file, STRETCH)
        assert found.keys == list(many)
        assert [int(read(found, file, n)[0]) for n in (0, 1777, 2999)] == [0, 1777, 2999]


@pytest.mark.parametrize("room", [0, 4096, 8192, 3 * 4096, 10**6])
def test_fitting_takes_as_many_rows_as_fit(room: int) -> None:
    whole = pack(STRETCH, {key(n): row(n, 1024) for n in range(20)})
    found = whole.fitting(room)
    assert found.keys == whole.keys[: len(found.keys)]
    assert not found.keys or disk_bytes(found.nbytes) <= room
    if len(found.keys) < 20:
        assert disk_bytes(whole.first(len(found.keys) + 1).nbytes) > room


def test_packed_shard_length_does_not_depend_on_values(tmp_path: Path) -> None:
    made = [pack(STRETCH, {key(n): row(n)}) for n in range(5)]
    assert len({each.nbytes for each in made}) == 1
    assert isinstance(made[0], PackedShard)
