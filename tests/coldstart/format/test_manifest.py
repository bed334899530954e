"""Check that any safetensors reader reads published weights back, and that no forged manifest passes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors
from torch import nn

from upriver.coldstart.format.manifest import (
    CHUNK_BYTES,
    Manifest,
    check_head,
    damaged,
    decode,
    manifest_path,
    publish,
    read,
)
from upriver.coldstart.roofline import Execution
from upriver.errors import ConfigError, ObjectChanged, ObjectNotFound, ProgramError, StoreError
from upriver.program.graph.caps import DEFAULT_CAPS
from upriver.program.graph.schema import DTYPES
from upriver.program.graph.weights_file import decode as decode_weights
from upriver.store import Store

PATH = "models/net.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(f"memory://{tmp_path.name}")


def some_tensors() -> dict[str, torch.Tensor]:
    """Return tensors of each type, and of shapes that hide a size or a stride."""
    torch.manual_seed(0)
    tensors = {f"of.{name}": (torch.rand(3, 5) * 2).to(dtype) for name, dtype in DTYPES.items()}
    tensors["scalar"] = torch.tensor(3.5)
    tensors["nothing"] = torch.empty(0, 4)
    tensors["transposed"] = torch.arange(12.0).reshape(3, 4).T
    tensors["channels_last"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tensors["one.row"] = torch.arange(4.0).expand(1, 4)
    tensors["large"] = torch.randn(CHUNK_BYTES // 2 + 3)
    tensors["näme"] = torch.ones(1)
    return tensors


def published(store: Store, **arguments: Any) -> tuple[dict[str, torch.Tensor], Manifest]:
    tensors = some_tensors()
    return tensors, publish(tensors, store, PATH, **arguments)


# ------------------------------------------------------------------------------------------ contents


def test_any_safetensors_reader_reads_it(store: Store) -> None:
    tensors, _ = published(store)
    found = load_safetensors(store.get(PATH))
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert all(name.startswith("__pad__") for name in found.keys() - tensors.keys())


def test_it_is_a_weights_file_as_programs_have_them(store: Store) -> None:
    tensors, _ = published(store)
    data = torch.frombuffer(bytearray(store.get(PATH)), dtype=torch.uint8)
    found = decode_weights(data)
    assert list(found) == list(tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_manifest_says_where_everything_lies(store: Store) -> None:
    tensors, manifest = published(store)
    data, info = store.get(PATH), store.head(PATH)
    assert (manifest.nbytes, manifest.etag) == (len(data), info.etag)
    assert [tensor.name for tensor in manifest.tensors] == list(tensors)
    assert manifest.ties == {}
    for stored in manifest.tensors:
        assert stored.start % 64 == 0
        raw = torch.frombuffer(bytearray(data[stored.start : stored.stop]) or bytearray(1), dtype=torch.uint8)
        raw = raw[: stored.stop - stored.start]
        assert torch.equal(raw.view(DTYPES[stored.dtype]).view(stored.shape), tensors[stored.name])
        assert len(stored.crc32c) == math.ceil(len(raw) / CHUNK_BYTES)
        assert damaged(stored, data[stored.start : stored.stop], chunk_bytes=CHUNK_BYTES) == []


def test_what_was_published_is_read_and_checked(store: Store) -> None:
    _, manifest = published(store)
    assert read(store, PATH) == manifest
    check_head(store, PATH, manifest)


def test_checksums_are_crc32c(store: Store) -> None:
    nine = torch.tensor(list(b"123456789"), dtype=torch.uint8)
    manifest = publish({"a": nine, "zeros": torch.zeros(32, dtype=torch.uint8)}, store, PATH)
    # RFC 3720, B.4, and the check value of the CRC catalogues.
    assert [tensor.crc32c for tensor in manifest.tensors] == [[0xE3069283], [0x8A9136AA]]


def test_a_tied_weight_is_stored_once(store: Store) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("rows", self.embed.weight.detach()[:5])
            self.register_buffer("turned", self.embed.weight.detach().T)

    manifest = publish(Tied().state_dict(), store, PATH)
    assert manifest.ties == {"head.weight": "embed.weight"}
    assert {tensor.name for tensor in manifest.tensors} == {"embed.weight", "rows", "turned"}
    assert read(store, PATH).ties == manifest.ties


def test_a_model_without_weights_is_an_empty_file(store: Store) -> None:
    manifest = publish({}, store, PATH)
    assert read(store, PATH) == manifest
    check_head(store, PATH, manifest)
    assert load_safetensors(store.get(PATH)) == {}


def test_somebody_else_who_publishes_the_same_name_meanwhile_is_noticed(tmp_path: Path) -> None:
    uri = f"memory://{tmp_path.name}"

    class Shared(Store):
        """A store where another client publishes weights of the same sizes before a manifest exists."""

        def put(self, path: str, data: bytes | bytearray | memoryview) -> None:
            publish({"a": torch.zeros(100)}, Store.open(uri), PATH)
            super().put(path, data)

    with pytest.raises(ObjectChanged, match="somebody else"):
        publish({"a": torch.ones(100)}, Shared.open(uri), PATH)


@given(st.data())
def test_every_flipped_byte_is_found_in_its_chunk(data: st.DataObject) -> None:
    store = Store.open("memory://layout-flipped")
    size = data.draw(st.integers(1, 300))
    manifest = publish({"a": torch.arange(size, dtype=torch.uint8)}, store, PATH, chunk_bytes=64)
    stored = manifest.tensors[0]
    raw = bytearray(store.get_range(PATH, stored.start, stored.stop))
    at = data.draw(st.integers(0, size - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    chunk = at // 64 * 64
    assert damaged(stored, raw, chunk_bytes=64) == [range(chunk, min(chunk + 64, size))]
    with pytest.raises(ProgramError, match=f"'a': {size - 1} bytes, it has {size}"):
        damaged(stored, raw[1:], chunk_bytes=64)


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"a": torch.ones(2, dtype=torch.complex64)}, "'a' is of type 'complex64'; allowed are float32"),
        ({"__metadata__": torch.ones(2)}, "cannot be called '__metadata__'"),
        ({"__pad__7": torch.ones(2)}, "cannot be called '__pad__7'"),
        ({"x" * 2000: torch.ones(2)}, "cannot be called 'xxx"),
        ({"a": torch.ones(2, device="meta")}, "'a' is on the meta device"),
        ({"a": torch.eye(2).to_sparse()}, "'a' is of layout torch.sparse_coo"),
        ({"a": torch.ones([1] * 13)}, "'a': 13 sizes; at most 12"),
    ],
)
def test_what_cannot_be_written_is_told_before_anything_is(
    store: Store, tensors: dict[str, torch.Tensor], problem: str
) -> None:
    with pytest.raises(ProgramError, match=problem):
        publish(tensors, store, PATH)
    assert list(store.list()) == []


def test_a_name_of_another_kind_of_file_is_refused(store: Store) -> None:
    for use in (lambda: publish({}, store, "net.bin"), lambda: read(store, "net.bin")):
        with pytest.raises(ConfigError, match=r"NAME\.safetensors, got 'net\.bin'"):
            use()
    for path in (".safetensors", "models/.safetensors"):
        with pytest.raises(ConfigError, match=r"NAME\.safetensors, got"):
            publish({}, store, path)


def test_what_is_not_there_is_named(store: Store) -> None:
    with pytest.raises(ObjectNotFound, match=r"net\.manifest\.json"):
        read(store, PATH)
    published(store)
    store.delete(PATH)
    with pytest.raises(ObjectNotFound, match=r"net\.safetensors"):
        read(store, PATH)


def test_an_object_that_changed_is_a_typed_error(store: Store) -> None:
    _, manifest = published(store)
    store.put(PATH, store.get(PATH))
    with pytest.raises(ObjectChanged, match="not the one that its manifest was written for"):
        read(store, PATH)
    with pytest.raises(ObjectChanged):
        check_head(store, PATH, manifest)


def test_a_copy_is_as_good_where_its_bytes_are_checked(store: Store, tmp_path: Path) -> None:
    _, manifest = published(store)
    (tmp_path / "copy").mkdir()
    other = Store.open((tmp_path / "copy").as_uri())
    for path in (PATH, manifest_path(PATH)):
        other.put(path, store.get(path))
    found = read(other, PATH, copies=True)
    assert found == msgspec.structs.replace(manifest, etag=other.head(PATH).etag) != manifest
    with pytest.raises(ObjectChanged, match="not the one that its manifest was written for"):
        read(other, PATH)


def test_another_file_of_the_same_size_is_no_copy(store: Store) -> None:
    publish({"a": torch.ones(4, 4), "b": torch.ones(16)}, store, PATH)
    nbytes, stale = store.head(PATH).size, store.get(manifest_path(PATH))
    publish({"b": torch.ones(4, 4), "a": torch.ones(16)}, store, PATH)
    assert store.head(PATH).size == nbytes
    store.put(manifest_path(PATH), stale)
    with pytest.raises(ObjectChanged, match="not the one that its manifest was written for"):
        read(store, PATH, copies=True)


def test_who_reads_while_somebody_publishes_finds_the_new_manifest(store: Store) -> None:
    publish({"a": torch.ones(100)}, store, PATH)
    stale = store.get(manifest_path(PATH))
    manifest = publish({"a": torch.zeros(100)}, store, PATH)

    class Late(Store):
        """Return the new manifest only at the second request."""

        asked = 0

        def get(self, path: str, **arguments: Any) -> bytes:
            self.asked += path == manifest_path(PATH)
            return stale if self.asked == 1 else super().get(path, **arguments)

    late = Late(store._backend, name=store.name, uri=store.uri, root=store._root)
    assert read(late, PATH) == manifest and late.asked == 2


@pytest.mark.parametrize("there", ["nothing", "another", "another since", "the same since"])
def test_weights_whose_manifest_cannot_be_written_do_not_stay(
    there: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    if there == "another":
        published(store)
    put = store.put

    def broken(*_: object) -> None:
        if there == "another since":
            put(PATH, b"another")
        if there == "the same since":
            put(manifest_path(PATH), b"another's")
        raise StoreError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(store, "put", broken)
        with pytest.raises(
            StoreError, match=r"no room$" if there != "another" else "no room; .* is written already"
        ):
            publish({"a": torch.ones(5)}, store, PATH)
    assert store.exists(PATH) == (there != "nothing")
    publish({"a": torch.ones(5)}, store, PATH)
    assert read(store, PATH, copies=True).etag == store.head(PATH).etag


@pytest.mark.parametrize("bytes_more", [1, -1])
def test_a_forged_manifest_of_an_object_of_another_size(store: Store, bytes_more: int) -> None:
    _, manifest = published(store)
    store.put(PATH, (store.get(PATH) + b"\0")[: manifest.nbytes + bytes_more])
    forged = msgspec.structs.replace(manifest, etag=store.head(PATH).etag)
    store.put(manifest_path(PATH), forged.encode())
    with pytest.raises(ProgramError, match=f"bytes; its manifest says {manifest.nbytes}"):
        read(store, PATH)


@pytest.mark.parametrize("old", [b'"of.float32"', b'"dtype":"F32"', b"}  "])
def test_a_header_that_is_not_the_manifests(store: Store, old: bytes) -> None:
    _, manifest = published(store)
    data = store.get(PATH)
    assert old in data
    new = {b'"of.float32"': b'"of.float31"', b'"dtype":"F32"': b'"dtype":"I32"', b"}  ": b"} \n"}[old]
    store.put(PATH, data.replace(old, new, 1))
    with pytest.raises(ProgramError, match="does not begin with the header"):
        check_head(store, PATH, msgspec.structs.replace(manifest, etag=store.head(PATH).etag))


SMALL = {"a": torch.arange(20.0), "b": torch.ones(3, 3), "tied": torch.zeros(2)}
SMALL["too"] = SMALL["tied"]


SMALL_MANIFEST = publish(SMALL, Store.open("memory://layout-small"), PATH, chunk_bytes=64)


def small() -> tuple[bytes, dict[str, Any]]:
    data = SMALL_MANIFEST.encode()
    return data, json.loads(data)


def edited(change: Callable[[dict[str, Any]], Any]) -> bytes:
    _, manifest = small()
    change(manifest)
    return msgspec.json.encode(manifest)


def tensor(index: int, **values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: manifest["tensors"][index].update(values)


def shifted(index: int, by: int) -> Callable[[dict[str, Any]], Any]:
    def change(manifest: dict[str, Any]) -> None:
        for key in ("start", "stop"):
            manifest["tensors"][index][key] += by

    return change


def counts(execution: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: manifest.update(execution=execution)


FORGED = {
    "overlap": (shifted(1, -64), "'b' overlaps what is before it"),
    "hole": (shifted(1, 64), "'b' leaves a hole before it"),
    "not aligned": (shifted(1, 8), "'b' leaves a hole before it"),
    "in the header": (tensor(0, start=0, stop=80), "'a' overlaps what is before it"),
    "too long": (tensor(0, stop=10_000), "'a': bytes .* do not hold its shape of float32"),
    "too short": (tensor(0, stop=0), "'a': bytes .* do not hold its shape of float32"),
    "another shape": (tensor(1, shape=[3, 4]), "'b'"),
    "no known type": (tensor(1, dtype="float7"), "'b': type 'float7' is not allowed"),
    "type of the file": (tensor(1, dtype="F32"), "'b': type 'F32' is not allowed"),
    "giant tensor": (tensor(1, shape=[1 << 40]), "'b': takes 4398046511104 bytes, at most"),
    "giant tensor of nothing": (tensor(1, shape=[0, 1 << 62, 1 << 62]), "'b': takes .* bytes, at most"),
    "negative size": (tensor(1, shape=[-3, 3]), "manifest: .*>= 0.*shape"),
    "size that is no number": (tensor(1, shape=[3.0, "3"]), "manifest: .*shape"),
    "too many sizes": (tensor(1, shape=[1] * 13), "'b': 13 sizes; at most 12"),
    "beyond 64 bits": (tensor(1, stop=1 << 64), "manifest: "),
    "name twice": (tensor(1, name="a"), "'a' is there twice"),
    "name of padding": (tensor(1, name="__pad__1"), "cannot be called '__pad__1'"),
    "long name": (tensor(1, name="b" * 1025), "cannot be called 'bbb"),
    "checksum missing": (tensor(0, crc32c=[1]), "'a': 1 checksums for 2 chunks"),
    "checksum too many": (tensor(1, crc32c=[1, 2]), "'b': 2 checksums for 1 chunks"),
    "checksum too large": (tensor(1, crc32c=[1 << 32]), "manifest: .*crc32c"),
    "trailing bytes": (lambda m: m.update(nbytes=m["nbytes"] + 64), "the weights end at byte"),
    "tensor left out": (lambda m: m["tensors"].pop(), "the weights end at byte|'a' leaves a hole|ties"),
    "other order": (lambda m: m["tensors"].reverse(), "'.*' leaves a hole before it"),
    "tie to nothing": (lambda m: m.update(ties={"too": "c"}), "'too' must be a new name .*, got 'c'"),
    "tie in a chain": (lambda m: m.update(ties={"too": "tied", "c": "too"}), "'c' must be a new name"),
    "tie of a stored one": (lambda m: m.update(ties={"a": "b"}), "'a' must be a new name"),
    "tie of padding": (lambda m: m.update(ties={"__pad__": "b"}), "cannot be called '__pad__'"),
    "chunks of nothing": (lambda m: m.update(chunk_bytes=0), "chunk_bytes must be a multiple of 64"),
    "odd chunks": (lambda m: m.update(chunk_bytes=100), "chunk_bytes must be a multiple of 64"),
    "giant chunks": (lambda m: m.update(chunk_bytes=1 << 40), "chunk_bytes must be a multiple of 64"),
    "long etag": (lambda m: m.update(etag="x" * 2000), "an ETag of 2000 characters"),
    "other schema": (lambda m: m.update(schema="upriver.weights/9"), "schema 'upriver.weights/9'; this"),
    "unknown field": (lambda m: m.update(more=1), "manifest: .*unknown field `more`"),
    "missing field": (lambda m: m.pop("etag"), "manifest: .*missing required field `etag`"),
    "another type of field": (lambda m: m.update(tensors={}), "manifest: "),
    "counts of fewer": (counts([[1, 2]] * 2), "execution: 2 counts for 3 weights"),
    "counts of more": (counts([[1, 2]] * 4), "execution: 4 counts for 3 weights"),
    "no counts of some": (counts([]), "execution: 0 counts for 3 weights"),
    "half a count": (counts([[1, 2], [1], [1, 2]]), "manifest: .*execution"),
    "three for one": (counts([[1, 2], [1, 2, 3], [1, 2]]), "manifest: .*execution"),
    "negative count": (counts([[1, 2], [1, -2], [1, 2]]), "manifest: .*>= 0.*execution"),
    "count of a part": (counts([[1, 2], [1, 2.5], [1, 2]]), "manifest: .*execution"),
    "infinite count": (counts([[1, 2], [1, 1e300], [1, 2]]), "manifest: .*execution"),
    "count beyond 64 bits": (counts([[1, 2], [1, 1 << 63], [1, 2]]), "manifest: .*execution"),
    "count that is no number": (counts([[1, 2], [1, None], [1, 2]]), "manifest: .*execution"),
    "counts that are none": (counts(None), "manifest: .*execution"),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_manifest_is_refused(forged: str) -> None:
    change, problem = FORGED[forged]
    with pytest.raises(ProgramError, match=problem):
        decode(edited(change))


def test_counts_are_read_as_they_were_written(store: Store) -> None:
    data, _ = small()
    without = decode(data)
    assert without.execution is msgspec.UNSET and b"execution" not in data
    written = {"a": Execution(7, 1), "tied": Execution(1 << 40, 2), "too": Execution(5, 0)}
    manifest = publish(SMALL, store, PATH, chunk_bytes=64, execution=written)
    assert manifest.execution == [Execution(7, 1), Execution(0, 0), Execution((1 << 40) + 5, 2)]
    assert read(store, PATH) == manifest and decode(manifest.encode()).encode() == manifest.encode()
    assert (manifest.tensors, manifest.ties) == (without.tensors, without.ties)


def test_one_manifest_has_one_spelling() -> None:
    data, manifest = small()
    assert decode(data).encode() == data
    twice = data.replace(b'"etag":', b'"etag":"x","etag":', 1)
    for other in (data + b" ", json.dumps(manifest).encode(), twice, data.replace(b'"a"', b'"\\u0061"')):
        assert json.loads(other) == manifest
        with pytest.raises(ProgramError, match="not written as this version writes it"):
            decode(other)


NO_MANIFESTS = [b"", b"{", b"[]", b"null", b'{"schema":1}', b"\xff", b"[" * 100_000, b'"\\ud800"']


@pytest.mark.parametrize("data", NO_MANIFESTS)
def test_what_is_no_manifest_is_a_typed_error(data: bytes) -> None:
    with pytest.raises(ProgramError, match="manifest: "):
        decode(data)


@given(st.data())
def test_a_manifest_with_any_byte_changed_is_refused_or_says_something_else(data: st.DataObject) -> None:
    whole, _ = small()
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[at] = data.draw(st.integers(0, 255))
    try:
        manifest = decode(bytes(changed))
    except ProgramError:
        return
    assert manifest.encode() == changed
    places = [(tensor.start, tensor.stop) for tensor in manifest.tensors]
    assert places == [(tensor.start, tensor.stop) for tensor in decode(whole).tensors]


@pytest.mark.parametrize(
    ("cap", "most", "problem"),
    [
        ("weights_bytes", 100, "a weights file has 1..100 bytes"),
        ("header_bytes", 300, "manifest.* bytes; at most 300"),
        ("header_entries", 4, "3 tensors and their padding; at most 4"),
        ("tensor_bytes", 40, "'a': takes 80 bytes, at most 40"),
        ("text", 3, "cannot be called 'tied'|an ETag of"),
        ("dimensions", 1, "'b': 2 sizes; at most 1"),
    ],
)
def test_every_cap_is_kept_and_named(store: Store, cap: str, most: int, problem: str) -> None:
    data, _ = small()
    caps = replace(DEFAULT_CAPS, **{cap: most})
    with pytest.raises(ProgramError, match=problem):
        decode(data, caps)
    store.put(manifest_path(PATH), data)
    with pytest.raises(ProgramError, match=problem):
        read(store, PATH, caps=caps)


def test_what_readers_would_refuse_is_not_published(store: Store) -> None:
    with pytest.raises(ProgramError, match="takes 80 bytes, at most 40"):
        publish(SMALL, store, PATH, caps=replace(DEFAULT_CAPS, tensor_bytes=40))
    with pytest.raises(ProgramError, match="chunk_bytes must be a multiple of 64"):
        publish(SMALL, store, PATH, chunk_bytes=0)
    assert list(store.list()) == []
