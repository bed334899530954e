"""Check that a dataset matches its digest or is refused."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import Subset

from tests.finetune.children import ended, fork
from tests.pipeline.making import samples, shard, write
from upriver.errors import BadSample, ConfigError, DatasetError, ObjectChanged, ObjectNotFound
from upriver.pipeline import (
    Dataset,
    InputChain,
    LoadTensor,
    Resize,
    imagenet_eval,
    imagenet_train,
    index,
    stored_tensor,
)
from upriver.pipeline.manifest import decode_index
from upriver.pipeline.subset import rows_of
from upriver.store import Store


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    write(tmp_path, {"train/a.tar": shard(samples(4)), "train/b.tar": shard(samples(3, first=4))})
    return index(tmp_path.as_uri(), "train", stages=imagenet_eval(16, 20))


def files_of(dataset: Dataset) -> tuple[str, str]:
    place = f".upriver/datasets/{dataset.digest}"
    return f"{place}/index.parquet", f"{place}/chain.json"


def test_published_and_opened_it_is_the_same(dataset: Dataset) -> None:
    dataset.publish()
    back = Dataset.open(dataset.store, dataset.digest)
    assert back.digest == dataset.digest
    assert len(back) == 7
    assert back.targets.tolist() == dataset.targets.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert back.classes == dataset.classes == ("0", "1", "2")
    assert back.chain == InputChain(imagenet_eval(16, 20))
    assert back.locate(range(7)) == dataset.locate(range(7))
    assert back.names([6, 0, 6]) == ["000006", "000000", "000006"]
    assert back.stored_bytes == dataset.stored_bytes
    assert (back.layout, back.format) == ("webdataset", "image")


def test_the_digest_is_that_of_the_file_and_the_file_names_the_index(dataset: Dataset) -> None:
    dataset.publish()
    index_path, chain_path = files_of(dataset)
    chain_bytes, index_bytes = dataset.store.get(chain_path), dataset.store.get(index_path)
    assert hashlib.sha256(chain_bytes).hexdigest() == dataset.digest
    chain = json.loads(chain_bytes)
    assert chain["schema"] == "upriver.dataset/1"
    assert chain["count"] == 7
    assert chain["classes"] == ["0", "1", "2"]
    assert chain["index"] == {"bytes": len(index_bytes), "sha256": hashlib.sha256(index_bytes).hexdigest()}
    assert InputChain.from_json(chain["stages"]) == dataset.chain
    table = pq.read_table(io.BytesIO(index_bytes))
    assert table.column_names == ["object", "etag", "start", "stop", "target", "name"]
    assert table["object"].to_pylist() == ["train/a.tar"] * 4 + ["train/b.tar"] * 3


def test_indexing_again_gives_the_same_digest(dataset: Dataset) -> None:
    assert index(dataset.store, "train", stages=imagenet_eval(16, 20)).digest == dataset.digest
    assert index(dataset.store, "train", stages=imagenet_eval(16, 21)).digest != dataset.digest


def test_samples_lie_where_the_index_says(dataset: Dataset) -> None:
    stored = [data for name, data in samples(7) if name.endswith(".jpg")]
    for ref, data in zip(dataset.locate(range(7)), stored, strict=True):
        assert dataset.store.get_range(ref.object, ref.start, ref.stop, etag=ref.etag) == data
    assert dataset.stored_bytes == sum(map(len, stored)) / 7


def test_other_stages_make_another_dataset(dataset: Dataset) -> None:
    other = dataset.with_stages(imagenet_train(16))
    assert other.digest != dataset.digest
    assert other.chain == InputChain(imagenet_train(16))
    assert other.locate(range(7)) == dataset.locate(range(7))
    assert dataset.with_stages(imagenet_eval(16, 20)).digest == dataset.digest
    with pytest.raises(ObjectNotFound):
        Dataset.open(dataset.store, other.digest)
    other.publish()
    assert Dataset.open(dataset.store, other.digest).chain == other.chain
    with pytest.raises(ConfigError, match=r"stored as image; the first stage \(load_tensor\) reads npy"):
        dataset.with_stages([LoadTensor("npy")])


def test_another_way_to_the_store(dataset: Dataset) -> None:
    way = Store.open(dataset.store.uri, name="metered")
    other = dataset.with_store(way)
    assert other.store is way
    assert other.digest == dataset.digest
    assert dataset.store is not way


def test_samples_are_made_by_the_stages(tmp_path: Path) -> None:
    write(tmp_path, {"a.tar": shard(samples(4)), "b.tar": shard(samples(3, first=4))})
    dataset = index(tmp_path, stages=imagenet_train(16))
    for row in range(7):
        (ref,) = dataset.locate([row])
        stored = stored_tensor(dataset.store.get_range(ref.object, ref.start, ref.stop))
        wanted = dataset.chain.run(stored, sample=row, epoch=0, seed=0, start=dataset.chain.start, stop=0)
        for index_of in (row, row - 7, np.int64(row), np.uint8(row), torch.tensor(row)):
            made, target = dataset[index_of]
            assert torch.equal(made, wanted) and target == [0, 1, 2, 0, 1, 2, 0][row]
    assert [target for _, target in dataset] == dataset.targets.tolist()  # ends at an IndexError


@pytest.mark.parametrize(
    "at", [7, -8, 10**12, True, np.True_, torch.tensor(True), 1.0, "1", slice(2), [1], None]
)
def test_what_is_no_row_is_an_index_error(dataset: Dataset, at: Any) -> None:
    with pytest.raises(IndexError, match=r"samples have numbers in 0\.\.6, got "):
        dataset[at]
    with pytest.raises(IndexError, match=r"samples have numbers in 0\.\.6, got "):
        dataset.subset([0, at])


def test_samples_that_cannot_be_made_are_named(tmp_path: Path) -> None:
    dataset = index(write(tmp_path, {"cat/1.jpg": b"no image"}), stages=imagenet_eval(16, 20))
    with pytest.raises(BadSample, match=r"sample 0 in object 'cat/1\.jpg'"):
        dataset[-1]
    (tmp_path / "cat/1.jpg").write_bytes(b"another file")
    with pytest.raises(ObjectChanged, match=r"cat/1\.jpg"):
        dataset[0]


def test_subset_has_the_rows_in_their_order(dataset: Dataset) -> None:
    part = dataset.subset(np.array([5, -1, 0, 5]))
    assert type(part) is Subset and part.indices == [5, 6, 0, 5]
    assert list(rows_of(part)) == [5, 6, 0, 5]
    assert torch.equal(part[1][0], dataset[6][0])
    assert len(dataset.subset([])) == 0


def test_targets_cannot_be_changed(dataset: Dataset) -> None:
    targets = dataset.targets
    targets[:] = 99
    targets.numpy()[0] = 98
    assert dataset.targets.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert dataset.targets_of([6, 1, 1]).tolist() == [0, 1, 1]
    dataset.targets_among(dataset)[0] = 99
    assert dataset[0][1] == 0 and dataset.targets_among(dataset)[0] == 0
    with pytest.raises(AttributeError):
        dataset.targets = targets  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"0\.\.6, got 7"):
        dataset.targets_of([7])


def test_ids_are_rows(dataset: Dataset) -> None:
    for bad in (-1, 7, 10**12):
        with pytest.raises(ConfigError, match=rf"0\.\.6, got {bad}"):
            dataset.locate([0, bad])
    assert dataset.locate([]) == []
    assert dataset.names([]) == []


def test_the_operators_prefix(tmp_path: Path, dataset: Dataset) -> None:
    mine = index(dataset.store, "train", stages=imagenet_eval(16, 20), prefix="own/place")
    mine.publish()
    assert (tmp_path / "own/place/datasets" / mine.digest / "chain.json").is_file()
    assert Dataset.open(mine.store, mine.digest, prefix="own/place").digest == mine.digest
    with pytest.raises(ObjectNotFound):
        Dataset.open(mine.store, mine.digest)


def test_its_own_files_are_not_indexed(dataset: Dataset) -> None:
    dataset.publish()
    assert index(dataset.store, stages=imagenet_eval(16, 20)).digest == dataset.digest


@pytest.mark.parametrize("digest", ["", "x" * 64, "A" * 64, "0" * 63, "../" * 20 + "etcetc", "0" * 64 + "\n"])
def test_only_a_digest_names_a_dataset(tmp_path: Path, digest: str) -> None:
    with pytest.raises(DatasetError, match="64 hexadecimal digits"):
        Dataset.open(Store.open(tmp_path.as_uri()), digest)


def test_a_dataset_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFound, match=r"chain\.json"):
        Dataset.open(Store.open(tmp_path.as_uri()), "0" * 64)


def test_chain_json_is_written_last(dataset: Dataset, tmp_path: Path) -> None:
    """A directory in the place of chain.json makes its put fail: the rest cannot be opened."""
    index_path, chain_path = files_of(dataset)
    (tmp_path / chain_path).mkdir(parents=True)
    with pytest.raises(Exception, match=r"chain\.json"):
        dataset.publish()
    assert dataset.store.exists(index_path)
    with pytest.raises(ObjectNotFound):
        Dataset.open(dataset.store, dataset.digest)


# --------------------------------------------------------------------------------- damaged or forged


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("how", ["flip", "cut", "longer"])
def test_damage_is_noticed(dataset: Dataset, which: int, how: str) -> None:
    dataset.publish()
    path = files_of(dataset)[which]
    data = bytearray(dataset.store.get(path))
    if how == "flip":
        data[len(data) // 2] ^= 1
    dataset.store.put(path, data[:-1] if how == "cut" else data + b" " if how == "longer" else data)
    with pytest.raises(DatasetError, match=r"(chain\.json|index\.parquet).* is damaged"):
        Dataset.open(dataset.store, dataset.digest)


def forge(
    dataset: Dataset, *, table: pa.Table | None = None, index_bytes: bytes | None = None, **changes: Any
) -> str:
    """Publish files that match each other and their digest, yet hold forbidden content."""
    dataset.publish()
    index_path, chain_path = files_of(dataset)
    if table is not None:
        sink = io.BytesIO()
        pq.write_table(table, sink, store_schema=False)
        index_bytes = sink.getvalue()
    index_bytes = index_bytes or dataset.store.get(index_path)
    chain = json.loads(dataset.store.get(chain_path))
    chain["index"] = {"bytes": len(index_bytes), "sha256": hashlib.sha256(index_bytes).hexdigest()}
    chain |= changes
    chain = {name: value for name, value in chain.items() if value is not ...}
    chain_bytes = json.dumps(chain).encode()
    digest = hashlib.sha256(chain_bytes).hexdigest()
    place = f".upriver/datasets/{digest}"
    dataset.store.put(f"{place}/index.parquet", index_bytes)
    dataset.store.put(f"{place}/chain.json", chain_bytes)
    return digest


def test_a_file_of_another_writer_keeps_its_digest(dataset: Dataset) -> None:
    digest = forge(dataset)  # same content, other spacing
    assert digest != dataset.digest
    assert Dataset.open(dataset.store, digest).digest == digest


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"extra": 1}, "unknown field `extra`"),
        ({"count": ...}, "missing required field `count`"),
        ({"count": "7"}, r"Expected `int`, got `str` - at `\$\.count`"),
        ({"count": -1}, "count must be at least 1, got -1"),
        ({"count": 6}, "has 7 rows, chain.json counts 6"),
        ({"schema": "upriver.dataset/2"}, "schema must be upriver.dataset/1, got 'upriver.dataset/2'"),
        ({"layout": "lmdb"}, "layout must be webdataset or folders, got 'lmdb'"),
        ({"format": "pickle"}, "format must be image or wav or npy or safetensors, got 'pickle'"),
        ({"classes": ["a", "b"]}, r"row 2: target is not in 0\.\.1 \(2\)"),
        ({"classes": [1, 2, 3]}, r"Expected `str`, got `int` - at `\$\.classes"),
        ({"index": {"bytes": 2**40, "sha256": "0" * 64}}, "index.bytes must lie in 1..1073741824"),
        ({"index": {"bytes": -1, "sha256": "0" * 64}}, "index.bytes must lie in"),
        ({"stages": [{"stage": "exec", "code": "x"}]}, "unknown input stage 'exec'"),
        ({"stages": {"stage": "decode"}}, r"Expected `array`, got `object` - at `\$\.stages"),
        ({"stages": [3]}, r"Expected `object`, got `int`"),
    ],
)
def test_a_false_chain_json_is_refused_by_name(
    dataset: Dataset, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DatasetError, match=problem):
        Dataset.open(dataset.store, forge(dataset, **changes))


def test_a_chain_json_that_nests_too_deep_is_refused(dataset: Dataset) -> None:
    chain = b'{"stages": [{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}"
    digest = hashlib.sha256(chain).hexdigest()
    dataset.store.put(f".upriver/datasets/{digest}/chain.json", chain)
    with pytest.raises(DatasetError, match="maximum recursion depth"):
        Dataset.open(dataset.store, digest)


def test_bad_values_of_stages_are_refused_by_name(dataset: Dataset) -> None:
    stages = [*InputChain(imagenet_eval()).to_json()]
    stages[1] = Resize(8).to_json() | {"size": 10**9}
    with pytest.raises(
        ConfigError, match=r"resize\.size must be a whole number in 1\.\.16384, got 1000000000"
    ):
        Dataset.open(dataset.store, forge(dataset, stages=stages))


def table_of(dataset: Dataset) -> pa.Table:
    dataset.publish()
    return pq.read_table(io.BytesIO(dataset.store.get(files_of(dataset)[0])))


def with_cell(table: pa.Table, column: str, value: Any) -> pa.Table:
    values = table[column].to_pylist()
    values[3] = value
    return table.set_column(table.column_names.index(column), column, [values])


@pytest.mark.parametrize(
    ("column", "value", "problem"),
    [
        ("start", -1, r"row 3: start is negative \(-1\)"),
        ("stop", 5, r"row 3: stop lies before start \(5\)"),
        ("stop", 2**40, r"row 3: a sample has more than 268435456 bytes"),
        ("target", -1, r"row 3: target is not in 0\.\.2 \(-1\)"),
        ("target", 3, r"row 3: target is not in 0\.\.2 \(3\)"),
        ("object", "../../etc/passwd", "segment '..'"),
        ("object", "http://169.254.169.254/x", "looks like a URL"),
        ("etag", "", "column 'etag' has an empty cell"),
        ("name", None, "column 'name' has empty cells"),
        ("start", None, "column 'start' has empty cells"),
        ("start", 1.5, "column 'start' must be int64, got double"),
    ],
)
def test_a_false_row_is_refused_by_name(dataset: Dataset, column: str, value: Any, problem: str) -> None:
    with pytest.raises(DatasetError, match=problem):
        Dataset.open(dataset.store, forge(dataset, table=with_cell(table_of(dataset), column, value)))


def test_a_missing_or_extra_column_is_refused_by_name(dataset: Dataset) -> None:
    table = table_of(dataset)
    with pytest.raises(DatasetError, match="column 'etag' must be string, got none"):
        Dataset.open(dataset.store, forge(dataset, table=table.drop_columns(["etag"])))
    with pytest.raises(DatasetError, match="column 'more' must be absent, got int64"):
        Dataset.open(dataset.store, forge(dataset, table=table.append_column("more", table["start"])))


def test_an_index_that_is_no_parquet(dataset: Dataset) -> None:
    with pytest.raises(DatasetError, match=r"index\.parquet cannot be read"):
        Dataset.open(dataset.store, forge(dataset, index_bytes=b"PAR1 nonsense PAR1"))


def test_an_index_is_read_without_threads(dataset: Dataset) -> None:
    """Arrow's own threads would release Python's memory later, and abort a process that ends just then."""
    manifest, (chain, table) = dataset._manifest, (dataset._chain_bytes, dataset._index_bytes)
    assert hashlib.sha256(chain).hexdigest() == dataset.digest

    def starts_none() -> bool:
        before = len(os.listdir("/proc/self/task"))
        decode_index(table, manifest)
        return before == len(os.listdir("/proc/self/task"))

    assert ended(fork(starts_none)) == 0


def test_caps_come_before_reading(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset.publish()
    monkeypatch.setattr("upriver.pipeline.manifest.MAX_CHAIN_BYTES", 100)
    with pytest.raises(DatasetError, match="at most 100 are allowed"):
        Dataset.open(dataset.store, dataset.digest)


def test_what_takes_too_much_memory_is_refused(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset.publish()
    monkeypatch.setattr("upriver.pipeline.manifest.MAX_OPENING_BYTES", 100)
    with pytest.raises(DatasetError, match=r"7 rows takes \d+ bytes of memory to open; at most 100 are"):
        Dataset.open(dataset.store, dataset.digest)


def test_memory_is_asked_for_before_it_is_taken(dataset: Dataset) -> None:
    dataset.publish()
    asked: list[int] = []
    opened = Dataset.open(dataset.store, dataset.digest, admit=asked.append)
    assert asked == sorted(asked) and asked[-1] >= opened.nbytes

    def refuse(nbytes: int) -> None:
        if nbytes == asked[-1]:
            raise MemoryError(nbytes)

    with pytest.raises(MemoryError):
        Dataset.open(dataset.store, dataset.digest, admit=refuse)


@pytest.mark.parametrize(
    "changes",
    [{"classes": ["a"] * 100}, {"stages": [{"a": [{}] * 100}]}, {"stages": [{"a": [[]] * 100}]}],
)
def test_a_chain_json_of_too_many_values_is_refused(
    dataset: Dataset, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upriver.pipeline.manifest.MAX_CHAIN_VALUES", 90)
    with pytest.raises(DatasetError, match=r"has some \d+ values; at most 90 may be"):
        Dataset.open(dataset.store, forge(dataset, **changes))


def test_one_long_name_for_many_rows_stays_small(dataset: Dataset) -> None:
    """A dictionary of one long string would fill a gigabyte if it were materialised."""
    count = 20_000
    names = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), ["n" * 50_000])
    table = table_of(dataset)
    table = pa.concat_tables([table.slice(0, 1)] * count).set_column(5, "name", names)
    before = pa.total_allocated_bytes()
    opened = Dataset.open(dataset.store, forge(dataset, table=table, count=count))
    assert pa.total_allocated_bytes() - before < 50_000_000
    assert opened.names([count - 1]) == ["n" * 50_000]


# -------------------------------------------------------------------------------- targets of another set


def of_classes(root: Path, names: dict[str, int], *, layout: str, listed: Sequence[str] = ()) -> Dataset:
    """Return a dataset with so many samples of each class; in shards numbers stand for ``names``."""
    if layout == "folders":
        jpegs = {f"{name}/{n}.jpg": b"." for name, count in names.items() for n in range(count)}
        return index(write(root, jpegs), stages=imagenet_eval(8))
    members = [
        member
        for name, count in names.items()
        for n in range(count)
        for member in ((f"{name}-{n}.jpg", b"."), (f"{name}-{n}.cls", name.encode()))
    ]
    text = {"classes.txt": "\n".join(listed).encode()} if listed else {}
    return index(write(root, {"a.tar": shard(members), **text}), stages=imagenet_eval(8))


@pytest.mark.parametrize(
    ("held", "train", "targets"),
    [
        ({"b": 1, "c": 2}, {"a": 1, "b": 1, "c": 1}, [1, 2, 2]),
        ({"d": 1}, {"a": 1, "b": 1, "c": 1, "d": 3}, [3]),
        ({"a": 1, "c": 1}, {"a": 1, "b": 1, "c": 1}, [0, 2]),
        ({"10": 1, "2": 1}, {"1": 1, "10": 1, "2": 1}, [1, 2]),
        ({"0": 1, "1": 1}, {"0": 1, "00": 1, "1": 1}, [0, 2]),
        ({"a": 1}, {"a": 1}, [0]),
    ],
)
def test_targets_among_folders_of_more_classes_follow_the_names(
    tmp_path: Path, held: dict[str, int], train: dict[str, int], targets: list[int]
) -> None:
    one = of_classes(tmp_path / "held", held, layout="folders")
    other = of_classes(tmp_path / "train", train, layout="folders")
    assert torch.equal(one.targets_among(other), torch.tensor(targets))


@pytest.mark.parametrize(
    ("held", "train", "targets"),
    [
        (("cat", "dog"), ("bird", "cat", "dog"), [1, 2]),
        (("cat", "dog", "extra"), ("dog", "cat"), [1, 0]),
        ((), ("cat", "dog", "fish"), [0, 1]),
        (("cat", "dog"), (), [0, 1]),
        ((), (), [0, 1]),
    ],
)
def test_targets_among_shards_follow_names_where_both_have_some(
    tmp_path: Path, held: Sequence[str], train: Sequence[str], targets: list[int]
) -> None:
    one = of_classes(tmp_path / "held", {"0": 1, "1": 1}, layout="webdataset", listed=held)
    other = of_classes(tmp_path / "train", {"0": 1, "1": 1}, layout="webdataset", listed=train)
    assert torch.equal(one.targets_among(other), torch.tensor(targets))


def test_targets_among_shards_of_unused_classes_need_no_match(tmp_path: Path) -> None:
    one = of_classes(tmp_path / "1", {"1": 1}, layout="webdataset", listed=("unknown", "dog"))
    other = of_classes(tmp_path / "2", {"cat": 1, "dog": 1}, layout="folders")
    assert one.targets_among(other).tolist() == [1]


@pytest.mark.parametrize(
    ("held", "train", "problem"),
    [
        (
            ("folders", {"a": 1, "zebra": 1}, ()),
            ("folders", {"a": 1, "b": 1}, ()),
            "class 'zebra' is none of the 2",
        ),
        (("folders", {"A": 1}, ()), ("folders", {"a": 1}, ()), "class 'A' is none of"),
        (("webdataset", {"0": 1}, ()), ("folders", {"a": 1}, ()), "class '0' .*; name them in a classes.txt"),
        (("webdataset", {"2": 1}, ()), ("webdataset", {"0": 1}, ("a", "b")), "class 2 is none of the 2"),
        (("webdataset", {"2": 1}, ()), ("webdataset", {"1": 1}, ()), "class '2' is none of the 2"),
        (
            ("webdataset", {"0": 1}, ("c", "d")),
            ("webdataset", {"0": 1}, ("c", "c", "d")),
            "'c' stands for several",
        ),
    ],
)
def test_targets_among_other_classes_are_refused_by_name(
    tmp_path: Path, held: tuple[Any, ...], train: tuple[Any, ...], problem: str
) -> None:
    one, other = (
        of_classes(tmp_path / str(at), names, layout=layout, listed=listed)
        for at, (layout, names, listed) in enumerate((held, train))
    )
    with pytest.raises(ConfigError, match=problem):
        one.targets_among(other)
