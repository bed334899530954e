"""Check that weights are found in any place and any writer's form, and no forged file or index passes."""

from __future__ import annotations

import io
import json
import re
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

from tests.examples import often
from tests.store.s3_server import S3Server, UnlistedServer
from upriver.coldstart.format.checkpoint import (
    MOST_SHARDS,
    SHARDS_AT_ONCE,
    WeightSource,
    find,
    in_order,
    keep_order,
    order_path,
)
from upriver.coldstart.format.manifest import CHUNK_BYTES, manifest_path, publish
from upriver.errors import AccessDenied, ConfigError, ObjectChanged, ObjectNotFound, ProgramError, StoreError
from upriver.program.graph.caps import DEFAULT_CAPS
from upriver.program.graph.schema import DTYPES
from upriver.program.graph.weights_file import encode
from upriver.store import Store

PATH = "models/net.safetensors"
INDEX = "models/net/model.safetensors.index.json"
SHARDS = tuple(f"models/net/model-{number}-of-00002.safetensors" for number in ("00001", "00002"))


@pytest.fixture(params=often(["memory", "file"], "file"))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store.open(f"memory://{tmp_path}" if request.param == "memory" else tmp_path.as_uri())


@pytest.fixture
def remote() -> Iterator[tuple[Store, S3Server]]:
    with S3Server() as server:
        options = {"endpoint": server.url, "access_key_id": "key", "secret_access_key": "secret"}
        yield Store.open("s3://bucket", options=options), server


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {f"of.{name}": (torch.rand(3, 5) * 2).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(3.5), "nothing": torch.empty(0, 4), "näme": torch.ones(1)}
    tensors["large"] = torch.randn(CHUNK_BYTES // 2 + 3)
    return tensors


def raw(source: WeightSource, name: str) -> bytes:
    tensor = next(tensor for tensor in source.tensors if tensor.name == name)
    return source.store.get_range(tensor.path, tensor.start, tensor.stop, etag=source.etags[tensor.path])


def values(source: WeightSource) -> dict[str, torch.Tensor]:
    """Return each tensor, decoded by the fields that the source states."""
    found = {}
    for tensor in source.tensors:
        data = raw(source, tensor.name)
        own = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)]
        found[tensor.name] = own.clone().view(DTYPES[tensor.dtype]).view(tensor.shape)
    return found


def assert_holds(source: WeightSource, tensors: Mapping[str, torch.Tensor]) -> None:
    found = values(source)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def names(source: WeightSource) -> list[str]:
    return [tensor.name for tensor in source.tensors]


def save_sharded(store: Store, tensors: Mapping[str, torch.Tensor], index: str = INDEX) -> dict[str, Any]:
    """Write two files and their index, as Hugging Face's libraries do."""
    folder, shards = index.rpartition("/")[0], [path.rpartition("/")[2] for path in SHARDS]
    halves = [dict(list(tensors.items())[number::2]) for number in range(2)]
    for shard, half in zip(shards, halves, strict=True):
        store.put(f"{folder}/{shard}".lstrip("/"), save(half, metadata={"format": "pt"}))
    places = {name: shard for shard, half in zip(shards, halves, strict=True) for name in half}
    table = {"metadata": {"total_size": 1}, "weight_map": places}
    store.put(index, json.dumps(table, indent=2, sort_keys=True).encode())
    return table


# ------------------------------------------------------------------------------ tensors that are found


def test_what_was_published_is_in_order_and_has_checksums(store: Store) -> None:
    tensors = some_tensors()
    manifest = publish(tensors | {"too": tensors["scalar"]}, store, PATH)
    source = find(store, PATH)
    assert_holds(source, tensors)
    assert source.ordered
    assert names(source) == list(tensors)
    assert [tensor.crc32c for tensor in source.tensors] == [tuple(t.crc32c) for t in manifest.tensors]
    assert (source.path, source.chunk_bytes, source.ties) == (PATH, CHUNK_BYTES, {"too": "scalar"})
    assert source.etags == {PATH: store.head(PATH).etag}


def test_a_file_of_the_safetensors_library_is_found_by_its_header(store: Store) -> None:
    tensors = some_tensors()
    store.put(PATH, save(tensors, metadata={"format": "pt", "large": "of.float32"}))
    source = find(store, PATH)
    assert_holds(source, tensors)
    assert not source.ordered
    assert [tensor.start for tensor in source.tensors] == sorted(tensor.start for tensor in source.tensors)
    assert all(tensor.crc32c == () and tensor.path == PATH for tensor in source.tensors)
    assert (source.path, source.chunk_bytes, source.ties) == (PATH, CHUNK_BYTES, {})
    assert source.etags == {PATH: store.head(PATH).etag}


def test_padding_is_no_weight(store: Store) -> None:
    tensors = some_tensors()
    store.put(PATH, encode(tensors))  # a program's weights have no manifest
    source = find(store, PATH)
    assert_holds(source, tensors)
    assert names(source) == list(tensors)


def test_a_manifest_that_is_denied_once_is_asked_for_again(remote: tuple[Store, S3Server]) -> None:
    store, server = remote
    publish(some_tensors(), store, PATH)
    server.faults.append(404)
    source = find(store, PATH)
    assert source.ordered and any(tensor.crc32c for tensor in source.tensors)
    assert not server.faults


@pytest.mark.parametrize("tensors", [some_tensors(), nn.Linear(16, 16).state_dict()], ids=["padded", "even"])
def test_a_published_file_without_its_manifest_is_anybodys_and_told_of(
    tensors: dict[str, torch.Tensor], store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    publish(tensors, store, PATH)
    store.delete(manifest_path(PATH))
    source = find(store, PATH)
    assert_holds(source, tensors)
    assert not source.ordered and not any(tensor.crc32c for tensor in source.tensors)
    assert f"there is no {manifest_path(PATH)}: it is loaded without checksums" in caplog.text


def test_a_wrong_bit_in_the_header_does_not_hide_who_wrote_a_file(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    publish({"a": torch.ones(3), "b": torch.ones(3)}, store, PATH)
    store.delete(manifest_path(PATH))
    store.put(PATH, store.get(PATH).replace(b'"__pad__1"', b'"__pad__9"'))
    assert names(find(store, PATH)) == ["a", "b"]
    assert "laid out as published files" in caplog.text


def test_a_file_that_others_lay_out_needs_no_manifest(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    tensors = nn.Linear(16, 16).state_dict()
    store.put(PATH, save(tensors))
    assert_holds(find(store, PATH), tensors)
    ours = encode(tensors)
    body = 8 + int.from_bytes(ours[:8], "little")
    respelt = json.dumps(json.loads(ours[8:body])).encode()
    store.put(PATH, len(respelt).to_bytes(8, "little") + respelt + ours[body:])
    assert_holds(find(store, PATH), tensors)
    assert "laid out as published files" not in caplog.text


@pytest.fixture
def unlisted() -> Iterator[tuple[Store, S3Server]]:
    with UnlistedServer() as server:
        options = {"endpoint": server.url, "access_key_id": "key", "secret_access_key": "secret"}
        yield Store.open("s3://bucket", options=options), server


@pytest.mark.parametrize("path", [PATH, "models/net"])
def test_anybodys_file_loads_where_the_bucket_may_not_be_listed(
    path: str, unlisted: tuple[Store, S3Server]
) -> None:
    store, _ = unlisted
    tensors = some_tensors()
    store.put(PATH, save(tensors))
    source = find(store, path)
    assert_holds(source, tensors)
    assert not source.ordered


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json"])
def test_a_folder_is_looked_into_where_the_bucket_may_not_be_listed(
    file: str, unlisted: tuple[Store, S3Server]
) -> None:
    store, _ = unlisted
    tensors = some_tensors()
    if file == "model.safetensors":
        store.put(f"models/net/{file}", save(tensors))
    else:
        save_sharded(store, tensors)
    assert_holds(find(store, "models/net"), tensors)


def test_anybodys_file_that_looks_like_ours_loads_there_too(
    unlisted: tuple[Store, S3Server], caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = unlisted
    tensors = nn.Linear(16, 16).state_dict()
    store.put(PATH, encode(tensors))  # no padding byte shows which program wrote the file
    assert_holds(find(store, PATH), tensors)
    assert f"the store refuses {manifest_path(PATH)}: it is loaded without checksums" in caplog.text


def test_what_is_refused_when_it_is_asked_for_again_was_refused(store: Store) -> None:
    publish(some_tensors(), store, PATH)

    class Erring(Store):
        """Report a missing manifest first, and a manifest that may not be read later."""

        asked = 0

        def get(self, path: str, **arguments: Any) -> bytes:
            if path != manifest_path(PATH):
                return super().get(path, **arguments)
            self.asked += 1
            raise ObjectNotFound("not there") if self.asked == 1 else AccessDenied("refused")

    with pytest.raises(StoreError, match=r"refused; models/net\.safetensors is laid out as published files"):
        find(Erring(store._backend, name=store.name, uri=store.uri, root=store._root), PATH)


@pytest.mark.parametrize("data", [b"{", b"x", b"{}", None], ids=["cut", "garbage", "empty", "respelt"])
def test_a_manifest_that_cannot_be_read_is_named(data: bytes | None, store: Store) -> None:
    publish(some_tensors(), store, PATH)
    beside = manifest_path(PATH)
    store.put(beside, data or store.get(beside) + b" ")
    problem = rf"^{re.escape(beside)} in store 'default' cannot be read: .*; publish {re.escape(PATH)} again$"
    with pytest.raises(ProgramError, match=problem):
        find(store, PATH)


@pytest.mark.parametrize("path", [PATH, "models/net"])
def test_a_published_file_whose_manifest_is_refused_does_not_load(
    path: str, unlisted: tuple[Store, S3Server]
) -> None:
    store, _ = unlisted
    publish(some_tensors(), store, PATH)
    assert find(store, path).ordered
    store.delete(manifest_path(PATH))
    store.put("models/net/model.safetensors", save({"another": torch.ones(1)}))
    problem = r"models/net\.manifest\.json.* refuses these credentials.*without its manifest.*list the bucket"
    with pytest.raises(StoreError, match=problem):
        find(store, path)


@pytest.mark.parametrize("path", [PATH, "models/net", INDEX])
def test_what_is_refused_is_named_where_nothing_is_found(path: str, unlisted: tuple[Store, S3Server]) -> None:
    store, _ = unlisted
    with pytest.raises(AccessDenied, match=r"cannot read 'models/net.* refuses these credentials"):
        find(store, path)


def test_files_with_an_index_are_one_model(store: Store) -> None:
    tensors = some_tensors()
    save_sharded(store, tensors)
    source = find(store, INDEX)
    assert_holds(source, tensors)
    assert source.etags == {path: store.head(path).etag for path in SHARDS}
    assert {tensor.path for tensor in source.tensors} == set(SHARDS)
    assert not source.ordered


def test_files_at_the_root_of_a_store(store: Store) -> None:
    tensors = some_tensors()
    save_sharded(store, tensors, "model.safetensors.index.json")
    assert_holds(find(store, "model.safetensors.index.json"), tensors)
    store.put("net.safetensors", save(tensors))
    assert_holds(find(store, "net"), tensors)


@pytest.mark.parametrize("path", ["models/net", "models/net/"])
def test_a_name_stands_for_what_is_there(store: Store, path: str) -> None:
    save_sharded(store, {"a": torch.ones(1), "b": torch.ones(2)})
    assert names(find(store, path)) == ["a", "b"]
    store.put("models/net/model.safetensors", save({"c": torch.ones(3)}))
    assert names(find(store, path)) == ["c"]
    publish({"d": torch.ones(4)}, store, PATH)
    source = find(store, path)
    assert (names(source), source.path, source.tensors[0].path) == (["d"], "models/net", PATH)


def test_a_directory_may_be_written_down_as_an_empty_object() -> None:
    store = Store.open("memory://source-marker")
    store.put("models/net", b"")
    store.put("models/net/model.safetensors", save({"c": torch.ones(3)}))
    assert names(find(store, "models/net")) == ["c"]


def test_a_model_without_weights(store: Store) -> None:
    store.put(PATH, save({}))
    source = find(store, PATH)
    assert (source.tensors, source.ordered) == ((), False)
    store.put("empty.safetensors.index.json", b'{"weight_map": {}}')
    assert find(store, "empty.safetensors.index.json").tensors == ()


def test_no_weight_is_read(remote: tuple[Store, S3Server]) -> None:
    store, server = remote
    data = save(some_tensors())
    store.put(PATH, data)
    server.requests.clear()
    source = find(store, PATH)
    first = source.tensors[0].start
    ranges = [asked for method, path, asked in server.requests if method == "GET" and path.endswith(PATH)]
    assert ranges == ["bytes=0-7", f"bytes=8-{first - 1}"]
    publish(some_tensors(), store, PATH)
    server.requests.clear()
    find(store, PATH)
    methods = [(method, path.rpartition(".")[2]) for method, path, _ in server.requests]
    assert methods == [("GET", "json"), ("HEAD", "safetensors")]


def test_headers_are_of_one_version_of_the_object(remote: tuple[Store, S3Server]) -> None:
    store, server = remote

    class Changing(dict[str, bytes]):
        def get(self, key: str, default: Any = None) -> Any:
            found = super().get(key, default)
            if key.endswith(PATH) and found is not None:
                self[key] = found + b"\0"
            return found

    store.put(PATH, save(some_tensors()))
    server.objects = Changing(server.objects)
    with pytest.raises(ObjectChanged, match=r"was replaced while its header was read; load again$"):
        find(store, PATH)


def test_what_is_not_there_is_named(store: Store) -> None:
    with pytest.raises(ObjectNotFound, match=r"models/net\.safetensors"):
        find(store, PATH)
    with pytest.raises(ObjectNotFound, match=r"model\.safetensors\.index\.json"):
        find(store, INDEX)
    looked = (
        r"no weights of 'models/net' .*'models/net\.safetensors', 'models/net/model\.safetensors' and "
        r"'models/net/model\.safetensors\.index\.json'"
    )
    with pytest.raises(ObjectNotFound, match=looked):
        find(store, "models/net")
    save_sharded(store, some_tensors())
    store.delete(SHARDS[1])
    with pytest.raises(ObjectNotFound, match="model-00002-of-00002"):
        find(store, "models/net")


@pytest.mark.parametrize("path", ["", "/", "../net.safetensors", "a//b.safetensors", "s3://b/a.safetensors"])
def test_a_path_that_is_no_name(store: Store, path: str) -> None:
    with pytest.raises(ConfigError, match="object name"):
        find(store, path)


def test_an_object_that_is_not_the_manifests(store: Store) -> None:
    publish(some_tensors(), store, PATH)
    store.put(PATH, save({"other": torch.ones(3)}))
    with pytest.raises(ObjectChanged, match="not the one that its manifest was written for"):
        find(store, PATH)
    store.delete(manifest_path(PATH))
    assert names(find(store, PATH)) == ["other"]


# ---------------------------------------------------------------------------------- untrusted headers


def file_of(header: Mapping[str, Any] | bytes, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def entry(start: int, stop: int, dtype: str = "U8", shape: list[Any] | None = None) -> dict[str, Any]:
    sizes = [stop - start] if shape is None else shape
    return {"dtype": dtype, "shape": sizes, "data_offsets": [start, stop]}


@pytest.mark.parametrize("spaces", range(8))
def test_tensors_may_lie_at_any_byte_in_any_order(spaces: int) -> None:
    store = Store.open("memory://source-any-byte")
    one, two = torch.arange(5.0), torch.arange(7, dtype=torch.int64)
    body = b"#" + two.numpy().tobytes() + b"###" + one.numpy().tobytes() + b"behind"
    header = {
        "one": entry(60, 80, "F32", [5]),
        "__metadata__": {"format": "pt", "anything": "at all"},
        "two": entry(1, 57, "I64", [7]),
        "nothing": entry(30, 30, "F32", [2, 0]),
    }
    store.put(PATH, file_of(json.dumps(header).encode() + b" " * spaces, body))
    source = find(store, PATH)
    assert names(source) == ["two", "nothing", "one"]
    assert_holds(source, {"one": one, "two": two, "nothing": torch.empty(2, 0)})


A = {"a": entry(0, 10)}

FORGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "weights file of 0 bytes has no header"),
    "seven bytes": (b"\2\0\0\0\0\0\0", "weights file of 7 bytes has no header"),
    "giant header": (file_of(b"{}", length=1 << 62), "header of 4611686018427387904 bytes in a file of 10"),
    "header behind the end": (file_of(b"{}", length=3), "header of 3 bytes in a file of 10"),
    "cut off in the header": (file_of(A, bytes(10))[:40], "header of .* in a file of 40"),
    "cut off in a tensor": (file_of(A, bytes(9)), "'a': bytes 0..10 do not hold its shape"),
    "no JSON": (file_of(b"{"), "weights header is not JSON"),
    "no text": (file_of(b'{"\xff": 1}'), "weights header is not JSON"),
    "another encoding": (file_of(json.dumps(A).encode("utf-16"), bytes(10)), "weights header is not JSON"),
    "nothing at all": (file_of(b""), "weights header is not JSON"),
    "deep": (file_of(b"[" * 100_000), "weights header is not JSON"),
    "many digits": (file_of(b"1" * 5_000), "weights header is not JSON"),
    "no table": (file_of(b"[]"), "not a table"),
    "name twice": (
        file_of(json.dumps(A).encode()[:-1] + b"," + json.dumps(A).encode()[1:], bytes(10)),
        "names something twice",
    ),
    "name that is no text": (file_of({"\ud800": entry(0, 10)}, bytes(10)), "name that is no text"),
    "long name": (file_of({"a" * 1025: entry(0, 10)}, bytes(10)), "too long"),
    "overlap": (file_of(A | {"b": entry(9, 12)}, bytes(12)), "'b' overlaps 'a': it starts at byte 9"),
    "inside": (file_of(A | {"b": entry(2, 5)}, bytes(10)), "'b' overlaps 'a'"),
    "the same bytes": (file_of(A | {"b": entry(0, 10)}, bytes(10)), "'b' overlaps 'a'"),
    "overlap of padding": (file_of(A | {"__pad__1": entry(8, 12)}, bytes(12)), "overlaps"),
    "out of range": (file_of({"a": entry(5, 15)}, bytes(10)), "'a': bytes 5..15 do not hold"),
    "backwards": (file_of({"a": entry(10, 0, shape=[0])}, bytes(10)), "do not hold"),
    "before the body": (file_of({"a": entry(-4, 6)}, bytes(10)), "malformed"),
    "too few bytes": (file_of({"a": entry(0, 10, "F32", [3])}, bytes(12)), "do not hold its shape of F32"),
    "giant tensor": (file_of({"a": entry(0, 1 << 62)}, bytes(10)), "do not hold"),
    "giant tensor of nothing": (file_of({"a": entry(0, 0, "F32", [0, 1 << 62])}), "do not hold"),
    "many sizes": (file_of({"a": entry(0, 1, shape=[1] * 13)}, bytes(1)), "too long"),
    "negative size": (file_of({"a": entry(0, 1, shape=[-1, -1])}, bytes(1)), "malformed"),
    "fraction": (file_of({"a": entry(0, 1, shape=[1.0])}, bytes(1)), "malformed"),
    "size that is a flag": (file_of({"a": entry(0, 1, shape=[True])}, bytes(1)), "malformed"),
    "place that is a flag": (
        file_of({"a": {"dtype": "U8", "shape": [1], "data_offsets": [False, True]}}, b"1"),
        "malformed",
    ),
    "three places": (
        file_of({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, b"1"),
        "malformed",
    ),
    "unknown type": (
        file_of({"a": entry(0, 10, "F8_E4M3")}, bytes(10)),
        "'a' has the type F8_E4M3, which is not supported; supported are F32, F64",
    ),
    "field more": (file_of({"a": entry(0, 10) | {"code": "x"}}, bytes(10)), "malformed"),
    "no entry": (file_of({"a": 3}), "malformed"),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_file_is_refused_and_named(store: Store, forged: str) -> None:
    data, problem = FORGED[forged]
    store.put(PATH, data)
    with pytest.raises(ProgramError, match=rf"^models/net\.safetensors .*{problem}"):
        find(store, PATH)


def test_nothing_of_a_claimed_size_is_allocated() -> None:
    store = Store.open("memory://source-claims")
    claims = [FORGED[name][0] for name in ("giant header", "giant tensor", "giant tensor of nothing")]
    for claim in claims:
        store.put(PATH, claim)
        tracemalloc.start()
        with pytest.raises(ProgramError):
            find(store, PATH)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20


@pytest.mark.parametrize(
    ("cap", "most", "problem"),
    [
        ("weights_bytes", 100, "a weights file has 1..100 bytes"),
        ("header_bytes", 64, "header of .* bytes in a file of .*; at most 64"),
        ("header_entries", 2, "not a table of at most 2"),
        ("tensor_bytes", 4, "do not hold"),
        ("text", 3, "too long"),
        ("dimensions", 1, "too long"),
    ],
)
def test_every_cap_is_kept_and_named(store: Store, cap: str, most: int, problem: str) -> None:
    store.put(PATH, save({"a": torch.ones(3, 3), "b": torch.ones(9), "name": torch.ones(1)}))
    with pytest.raises(ProgramError, match=problem):
        find(store, PATH, caps=replace(DEFAULT_CAPS, **{cap: most}))


SMALL = save({"a": torch.arange(20.0), "b": torch.ones(3, 3), "c": torch.zeros(2, dtype=torch.bool)})


@given(st.data())
def test_a_file_with_any_byte_of_its_header_changed_stays_within_itself(data: st.DataObject) -> None:
    store = Store.open("memory://source-changed")
    body = 8 + int.from_bytes(SMALL[:8], "little")
    changed = bytearray(SMALL)
    for at in data.draw(st.lists(st.integers(0, body - 1), min_size=1, max_size=3)):
        changed[at] = data.draw(st.integers(0, 255))
    store.put(PATH, bytes(changed))
    try:
        source = find(store, PATH)
    except ProgramError:
        return
    end = 8
    for tensor in source.tensors:
        assert 8 <= tensor.start <= tensor.stop <= len(changed)
        assert tensor.start == tensor.stop or end <= tensor.start
        end = max(end, tensor.stop)
    values(source)


# ---------------------------------------------------------------------------------------- the index


def test_an_index_is_held_against_its_files(store: Store) -> None:
    table = save_sharded(store, {"a": torch.ones(1), "b": torch.ones(2), "c": torch.ones(3)})

    def indexed(places: dict[str, Any], problem: str) -> None:
        store.put(INDEX, json.dumps({"weight_map": places}).encode())
        with pytest.raises(ProgramError, match=problem):
            find(store, INDEX)

    places = dict(table["weight_map"])
    first, last = sorted(set(places.values()))
    elsewhere = {name: last if place == first else first for name, place in places.items()}
    indexed(elsewhere, r"model\.safetensors\.index\.json: weight '.' is not in models/net/model-0000")
    indexed(places | {"more": first}, "weight 'more' is not in models/net/model-00001-of-00002")


def one(value: float) -> torch.Tensor:
    return torch.full((3,), value)


OVERLAID: dict[str, tuple[dict[str, dict[str, float]], dict[str, str], dict[str, float]]] = {
    # The files' tensors, the index's entries, the model's values.
    "overlay": (
        {"base": {"a": 1, "b": 2}, "overlay": {"b": 7}},
        {"a": "base", "b": "overlay"},
        {"a": 1, "b": 7},
    ),
    "overlay that sorts first": (
        {"z": {"a": 1, "b": 2}, "a": {"b": 7}},
        {"a": "z", "b": "a"},
        {"a": 1, "b": 7},
    ),
    "stale copy in a later shard": (
        {"1": {"a": 1}, "2": {"a": 9, "b": 2}},
        {"a": "1", "b": "2"},
        {"a": 1, "b": 2},
    ),
    "copies in all of three": (
        {"1": {"a": 1, "b": 9, "c": 9}, "2": {"a": 9, "b": 2, "c": 9}, "3": {"a": 9, "b": 9, "c": 3}},
        {"a": "1", "b": "2", "c": "3"},
        {"a": 1, "b": 2, "c": 3},
    ),
    "copies of another shape elsewhere": (
        {"1": {"a": 1, "long": 4}, "2": {"b": 2}},
        {"a": "1", "b": "2", "long": "1"},
        {"a": 1, "b": 2, "long": 4},
    ),
    "swapped": (
        {"1": {"a": 1, "b": 9}, "2": {"a": 9, "b": 2}},
        {"a": "1", "b": "2"},
        {"a": 1, "b": 2},
    ),
    "not in the index but in one file": (
        {"1": {"a": 1, "b": 9, "more": 5}, "2": {"b": 2}},
        {"a": "1", "b": "2"},
        {"a": 1, "b": 2, "more": 5},
    ),
    "a file in a folder": (
        {"part/1": {"a": 1, "b": 9}, "2": {"b": 2}},
        {"a": "part/1", "b": "2"},
        {"a": 1, "b": 2},
    ),
}


@pytest.mark.parametrize("case", OVERLAID)
def test_find_where_two_files_hold_one_name_takes_what_the_index_says(store: Store, case: str) -> None:
    files, places, expected = OVERLAID[case]
    for file, held in files.items():
        tensors = {name: one(value) for name, value in held.items()}
        store.put(f"models/net/{file}.safetensors", save(tensors))
    table = {
        "metadata": {"total_size": -3, "format": "pt"},  # the sizes in the index are ignored
        "weight_map": {name: f"{file}.safetensors" for name, file in places.items()},
        "more": [1],
    }
    store.put(INDEX, json.dumps(table).encode())
    for path in (INDEX, "models/net", "models/net/"):
        assert_holds(find(store, path), {name: one(value) for name, value in expected.items()})


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ({"a": "model", "b": "overlay"}, {"a": 1, "b": 7}),  # the index includes that file, too
        ({"a": "overlay", "b": "overlay"}, {"a": 1, "b": 2}),  # another form of the model
        (None, {"a": 1, "b": 2}),
    ],
)
def test_find_of_a_file_and_an_index_in_one_folder_takes_the_index_where_it_names_the_file(
    store: Store, places: dict[str, str] | None, expected: dict[str, float]
) -> None:
    store.put("models/net/model.safetensors", save({"a": one(1), "b": one(2)}))
    store.put("models/net/overlay.safetensors", save({"a": one(9), "b": one(7)}))
    if places is not None:
        table = {"weight_map": {name: f"{file}.safetensors" for name, file in places.items()}}
        store.put(INDEX, json.dumps(table).encode())
    assert_holds(find(store, "models/net"), {name: one(value) for name, value in expected.items()})


@pytest.mark.parametrize(
    ("files", "places", "error", "problem"),
    [
        (
            {"1": "a", "2": "ab"},
            {"a": "1", "b": "1"},
            ProgramError,
            r"weight 'b' is not in models/net/1\.saf",
        ),
        (
            {"1": "a", "2": "bc"},
            {"a": "1", "b": "1", "c": "2"},
            ProgramError,
            r"'b' is not in models/net/1\.\w+, but in models/net/2\.",
        ),
        (
            {"1": "ac", "2": "bc"},
            {"a": "1", "b": "2"},
            ProgramError,
            "'c' is there twice, .* does not say which",
        ),
        ({"1": "a"}, {"a": "1", "b": "2"}, ObjectNotFound, r"index\.json names models/net/2\.safetensors: "),
        ({"1": "a"}, {"a": "1", "b": "../net/1"}, ProgramError, r"weight_map: .* has the segment '\.\.'"),
        ({"1": "a"}, {"a": "1", "A": "1"}, ProgramError, "weight 'A' is not in models/net/1"),
    ],
)
def test_find_where_an_index_and_its_files_disagree_refuses(
    store: Store, files: dict[str, str], places: dict[str, str], error: type[Exception], problem: str
) -> None:
    for file, held in files.items():
        store.put(f"models/net/{file}.safetensors", save({name: one(1) for name in held}))
    table = {"weight_map": {name: f"{file}.safetensors" for name, file in places.items()}}
    store.put(INDEX, json.dumps(table).encode())
    with pytest.raises(error, match=problem):
        find(store, "models/net")


@pytest.mark.parametrize(
    ("held", "problem"),
    [
        (
            ["a.safetensors", "b.safetensors"],
            r"name one of the files that it holds: a\.saf\w+, b\.safetensors$",
        ),
        (["adapter_model.safetensors", "x/b.safetensors"], r"holds: adapter_model\.safetensors$"),
        (["diffusion.safetensors.index.json"], r"holds: diffusion\.safetensors\.index\.json$"),
        ([f"{number}.safetensors" for number in range(7)], r"holds: 0\..*, 4\.safetensors and more$"),
        (["Model.SAFETENSORS", "README.md"], r"index\.json'$"),
    ],
)
def test_find_of_a_folder_with_other_names_names_them_and_guesses_none(
    store: Store, held: list[str], problem: str
) -> None:
    for name in held:
        store.put(f"models/net/{name}", save({"a": one(1)}))
    with pytest.raises(ObjectNotFound, match=problem):
        find(store, "models/net")


def test_what_lies_in_a_file_besides_belongs_to_the_model(store: Store) -> None:
    table = save_sharded(store, {"a": torch.ones(1), "b": torch.ones(2), "c": torch.ones(3)})
    del table["weight_map"]["c"]
    store.put(INDEX, json.dumps(table).encode())
    assert sorted(names(find(store, INDEX))) == ["a", "b", "c"]


FORGED_INDEXES: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"{", r"index\.json is not JSON"),
    "no table": (b"[]", "is not a table"),
    "no map": (b'{"metadata": {}}', "has no weight_map"),
    "map that is none": (b'{"weight_map": ["a"]}', "has no weight_map"),
    "name twice": (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "names something twice"),
    "file that is none": (b'{"weight_map": {"a": 3}}', "gives a name its file, got a int"),
    "file that is a list": (b'{"weight_map": {"a": []}}', "gives a name its file, got a list"),
    "way out": (b'{"weight_map": {"a": "../x.safetensors"}}', "has the segment '..'"),
    "absolute": (b'{"weight_map": {"a": "/x.safetensors"}}', "has the segment ''"),
    "elsewhere": (b'{"weight_map": {"a": "s3://b/x.safetensors"}}', "looks like a URL"),
    "no file": (b'{"weight_map": {"a": ""}}', "has the segment ''"),
    "no text": (b'{"weight_map": {"a": "\\ud800.safetensors"}}', "is not valid Unicode"),
    "another kind": (b'{"weight_map": {"a": "x.gguf"}}', "names files NAME.safetensors, got 'x.gguf'"),
    "pickled": (b'{"weight_map": {"a": "x.bin"}}', "models/net/x.bin is a pickled checkpoint"),
}


@pytest.mark.parametrize("forged", FORGED_INDEXES)
def test_a_forged_index_is_refused(store: Store, forged: str) -> None:
    data, problem = FORGED_INDEXES[forged]
    store.put(INDEX, data)
    with pytest.raises(ProgramError, match=problem):
        find(store, INDEX)


def test_an_index_may_not_name_any_number_of_files(store: Store) -> None:
    places = {str(number): f"{number}.safetensors" for number in range(MOST_SHARDS + 1)}
    store.put(INDEX, json.dumps({"weight_map": places}).encode())
    with pytest.raises(ProgramError, match=f"names {MOST_SHARDS + 1} files; at most {MOST_SHARDS}"):
        find(store, INDEX)


def test_caps_are_for_all_files_together(store: Store) -> None:
    save_sharded(store, {"a": torch.ones(100), "b": torch.ones(100)})
    largest = max(store.head(path).size for path in SHARDS)
    with pytest.raises(ProgramError, match=f"files of .* bytes; at most {largest} are allowed"):
        find(store, INDEX, caps=replace(DEFAULT_CAPS, weights_bytes=largest))
    save_sharded(store, {name: torch.ones(1) for name in "abcd"})
    places = {name: Path(shard).name for name, shard in zip("ab", SHARDS, strict=True)}
    store.put(INDEX, json.dumps({"weight_map": places}).encode())
    with pytest.raises(ProgramError, match="4 tensors; at most 3 are allowed"):
        find(store, INDEX, caps=replace(DEFAULT_CAPS, header_entries=3))


def test_a_broken_file_among_many_ends_the_search(store: Store) -> None:
    places = {str(number): f"{number:03}.safetensors" for number in range(5 * SHARDS_AT_ONCE)}
    for name, file in places.items():
        store.put(f"models/net/{file}", save({name: torch.ones(1)}))
    store.put(INDEX, json.dumps({"weight_map": places}).encode())
    assert names(find(store, INDEX)) == list(places)
    store.put("models/net/020.safetensors", b"{}")
    with pytest.raises(ProgramError, match=r"models/net/020\.safetensors .*2 bytes has no header"):
        find(store, INDEX)


# ------------------------------------------------------------------------------- pickled checkpoints


@pytest.mark.parametrize(
    "path", ["net.pt", "net.PTH", "a/net.ckpt", "net/pytorch_model.bin", "net/pytorch_model.bin.index.json"]
)
def test_pickled_checkpoints_are_refused_by_their_names(store: Store, path: str) -> None:
    with pytest.raises(ProgramError, match=r"pickled .*safetensors\.torch\.save_model.*safe_serialization"):
        find(store, path)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("path", [PATH, "models/checkpoint"])
def test_pickled_checkpoints_are_refused_by_what_they_begin_with(
    store: Store, path: str, zipped: bool
) -> None:
    written = io.BytesIO()
    torch.save({"a": torch.ones(3)}, written, _use_new_zipfile_serialization=zipped)
    store.put(path, written.getvalue())
    with pytest.raises(ProgramError, match=f"{path} is a pickled checkpoint"):
        find(store, path)


def test_a_header_as_long_as_a_pickle_begins_is_none(store: Store) -> None:
    text = json.dumps({"a": entry(0, 4)}).encode().ljust(0x0480)
    store.put(PATH, file_of(text, bytes(4)))
    assert store.get(PATH)[:2] == b"\x80\x04"
    assert names(find(store, PATH)) == ["a"]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_a_directory_of_pickled_checkpoints_is_told_apart_from_an_empty_one(store: Store, name: str) -> None:
    store.put(f"models/net/{name}", b"")
    with pytest.raises(ProgramError, match=f"models/net/{name} is a pickled checkpoint"):
        find(store, "models/net")


def test_an_object_of_another_kind_is_no_model(store: Store) -> None:
    store.put("models/net", b"GGUF and more")
    with pytest.raises(ProgramError, match=r"models/net .* is no weights file: those are called NAME"):
        find(store, "models/net")


# -------------------------------------------------------------------------------------------- the order


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("a/net", "a/net.order.json"),
        ("a/net.safetensors", "a/net.order.json"),
        ("a/model.safetensors.index.json", "a/model.order.json"),
    ],
)
def test_where_an_order_is_kept(path: str, kept: str) -> None:
    assert order_path(path) == kept


@pytest.mark.parametrize("path", [PATH, "models/net", INDEX])
def test_an_order_that_is_kept_is_found_by_the_next_one(store: Store, path: str) -> None:
    tensors = {name: torch.full((3,), ord(name)) for name in "abcde"}
    save_sharded(store, tensors)
    if path == PATH:
        store.put(PATH, save(tensors))
    found = find(store, path)
    keep_order(found, ["d", "not there", "b", "d", "a"])
    source = find(store, path)
    assert source.ordered
    assert names(source) == ["d", "b", "a", *[name for name in names(found) if name in "ce"]]
    assert_holds(source, tensors)
    assert source == in_order(found, names(source))
    data = store.get(order_path(path))
    assert json.loads(data) == {
        "schema": "upriver.order/1",
        "etags": dict(source.etags),
        "names": names(source),
    }
    assert msgspec.json.encode(json.loads(data)) == data


def test_other_names_of_a_tied_weight_put_it_in_its_place(store: Store) -> None:
    embedding = torch.ones(3)
    publish({"a": torch.ones(1), "embedding": embedding, "head": embedding}, store, PATH)
    assert names(in_order(find(store, PATH), ["head", "a", "embedding"])) == ["embedding", "a"]


def test_an_order_of_other_files_is_not_used(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    save_sharded(store, {"a": torch.ones(1), "b": torch.ones(2)})
    keep_order(find(store, INDEX), ["b", "a"])
    assert names(find(store, INDEX)) == ["b", "a"]
    store.put(SHARDS[0], save({"a": torch.zeros(1)}))
    with caplog.at_level("INFO", logger="upriver.coldstart.format.checkpoint"):
        source = find(store, INDEX)
    assert (names(source), source.ordered) == (["a", "b"], False)
    assert "models/net/model.order.json is not used: it is that of other files" in caplog.text
    keep_order(source, ["b", "a"])
    assert names(find(store, INDEX)) == ["b", "a"]


def orders(etags: Mapping[str, str]) -> dict[str, bytes]:
    order = {"schema": "upriver.order/1", "etags": dict(etags), "names": ["b", "a"]}
    changed: dict[str, Any] = {
        "other schema": order | {"schema": "upriver.order/2"},
        "other etags": order | {"etags": {PATH: '"other"'}},
        "no etags": order | {"etags": {}},
        "name missing": order | {"names": ["b"]},
        "name more": order | {"names": ["b", "a", "c"]},
        "name twice": order | {"names": ["b", "a", "a"]},
        "another name": order | {"names": ["b", "c"]},
        "names that are none": order | {"names": [1, 2]},
        "field more": order | {"more": 1},
        "field missing": {"schema": "upriver.order/1", "names": ["b", "a"]},
    }
    texts = {what: json.dumps(value).encode() for what, value in changed.items()}
    return texts | {"no JSON": b"{", "empty": b"", "deep": b"[" * 100_000, "no text": b'"\\ud800"'}


@pytest.mark.parametrize("what", sorted(orders({})))
def test_an_order_that_does_not_fit_is_not_used(store: Store, what: str) -> None:
    store.put(PATH, save({"a": torch.ones(1), "b": torch.ones(2)}))
    before = find(store, PATH)
    store.put(order_path(PATH), orders(before.etags)[what])
    assert find(store, PATH) == before


def test_an_order_that_is_too_large_is_not_used(store: Store) -> None:
    store.put(PATH, save({"a": torch.ones(1), "b": torch.ones(2)}))
    before = find(store, PATH)
    keep_order(before, ["b", "a"])
    store.put(order_path(PATH), store.get(order_path(PATH)) + b" " * 2_000)
    assert names(find(store, PATH)) == ["b", "a"]
    assert find(store, PATH, caps=replace(DEFAULT_CAPS, header_bytes=2_000)) == before


def test_an_order_that_cannot_be_read_or_written_is_done_without(
    remote: tuple[Store, S3Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, server = remote
    store.put(PATH, save({"a": torch.ones(1), "b": torch.ones(2)}))
    source = find(store, PATH)
    server.faults = [403]
    with pytest.raises(StoreError, match=r"cannot write 'models/net\.order\.json'"):
        keep_order(source, ["b", "a"])
    keep_order(source, ["b", "a"])
    assert names(find(store, PATH)) == ["b", "a"]

    get = store.get

    def refused(path: str, **options: Any) -> bytes:
        if path.endswith(".order.json"):
            server.faults = [403]
        return get(path, **options)

    monkeypatch.setattr(store, "get", refused)
    assert find(store, PATH) == source
    assert server.faults == []
