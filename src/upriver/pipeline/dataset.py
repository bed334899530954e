"""Define a dataset: an index over stored samples and their input stages, named by its digest."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import SupportsIndex

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Subset

from upriver.errors import BadSample, ConfigError, DatasetError
from upriver.pipeline import manifest as files
from upriver.pipeline.chain import InputChain
from upriver.pipeline.errors import SampleError
from upriver.pipeline.left_out import LeftOut
from upriver.pipeline.mapstyle import row_within
from upriver.pipeline.stages.audio import DecodeWav
from upriver.pipeline.stages.base import InputStage
from upriver.pipeline.stages.tensor import LoadTensor
from upriver.program.graph.artifact_paths import digest_of
from upriver.store import DEFAULT_PREFIX, Store, check_name

_CHECKED_AT_ONCE = 2**14

_FEW = 8
"""Number of texts up to which they are read one by one: a call of Arrow's ``take`` costs as much as ten."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRef:
    """Location of one stored sample: bytes [start, stop) of an object, and its ETag at indexing."""

    object: str
    etag: str
    start: int
    stop: int


class Dataset(TorchDataset[tuple[torch.Tensor, int]]):
    """Stored samples in a fixed order, with the input stages that prepare each for a model.

    It is immutable. Rows of the index are the sample ids. PyTorch's own loader reads it as a map-style
    dataset: see :meth:`__getitem__`.

    Attributes:
        digest: SHA-256 of ``chain.json``, which covers everything else.
        classes: Names of the targets.
    """

    def __init__(
        self,
        store: Store,
        chain_bytes: bytes,
        index_bytes: bytes,
        *,
        prefix: str,
        admit: Callable[[int], None] | None = None,
    ) -> None:
        self.digest: str = digest_of(chain_bytes)
        manifest = files.decode_manifest(chain_bytes, self.digest)
        table = files.decode_index(index_bytes, manifest, admit)
        self.store = store
        self.prefix = prefix
        self.chain: InputChain = manifest.chain()
        self.classes: tuple[str, ...] = manifest.classes
        self._manifest = manifest
        self._chain_bytes = chain_bytes
        self._index_bytes = index_bytes
        self._starts, self._stops = table["start"].to_numpy(), table["stop"].to_numpy()
        self._texts = {column: _as_dictionary(table[column]) for column in ("object", "etag", "name")}
        self._targets = torch.tensor(table["target"].to_numpy(), dtype=torch.int64, device="cpu")
        _check_texts(self.objects.dictionary, self._texts["etag"].dictionary)

    def __len__(self) -> int:
        return self._manifest.count

    def __getitem__(self, index: SupportsIndex) -> tuple[torch.Tensor, int]:
        """Read one sample from the store, and return the model's input and the target.

        Random stages draw as in epoch 0 of seed 0, at every call. `upriver.DataLoader` and ``near.finetune``
        draw anew in each epoch, and read ahead.

        Args:
            index: Row of the index; a negative one counts from the end.

        Raises:
            IndexError: If the index has no such row. Truth values, slices and lists are no rows.
            BadSample: If the sample cannot pass a stage.
            StoreError: If the sample cannot be read. Only files can be read in a process that was forked
                from one that has used stores, as a loader process is by default on Linux.
        """
        row = row_within(len(self), index)
        (place,) = self.locate([row])
        value = torch.empty(place.stop - place.start, dtype=torch.uint8, device="cpu")
        self.store.read_into(place.object, place.start, value.numpy().data, etag=place.etag)
        made = self.run(value, sample=row, epoch=0, seed=0, start=self.chain.start, stop=0)
        return made, int(self._targets[row])

    def subset(self, indices: Iterable[SupportsIndex]) -> Subset[tuple[torch.Tensor, int]]:
        """Return the samples of some rows, in the given order, as PyTorch's `Subset`.

        Raises:
            IndexError: If the index has no such row, as for :meth:`__getitem__`.
        """
        return Subset(self, [row_within(len(self), index) for index in indices])

    def __repr__(self) -> str:
        return (
            f"Dataset({self.digest[:12]}, {len(self)} samples, {len(self.classes)} classes, {self.store!r})"
        )

    @property
    def targets(self) -> torch.Tensor:
        """Return all targets, int64 of shape (len,), as a copy: writing to it changes nothing else.

        Take it once before a loop, or ask :meth:`targets_of`.
        """
        return self._targets.clone()

    @property
    def left_out(self) -> Mapping[str, LeftOut]:
        """Return count and examples of possible samples that were not indexed, by reason."""
        return MappingProxyType(self._manifest.left_out)

    @property
    def stored_bytes(self) -> float:
        """Return the mean bytes of a stored sample."""
        return float((self._stops - self._starts).mean())

    @cached_property
    def nbytes(self) -> int:
        """Return the memory of the index, in bytes, as read and as used."""
        parts = (self._starts, self._stops, self._targets, *self._texts.values())
        files_nbytes = len(self._index_bytes) + files.chain_nbytes(self._chain_bytes)
        return files_nbytes + sum(int(part.nbytes) for part in parts)

    @property
    def objects(self) -> pa.DictionaryArray:
        """Return the object of each sample as in memory: each name once, and a number for each sample."""
        return self._texts["object"]

    @property
    def files(self) -> tuple[bytes, bytes]:
        """Return the contents of ``chain.json`` and ``index.parquet``."""
        return self._chain_bytes, self._index_bytes

    @property
    def layout(self) -> str:
        """Return the layout, ``webdataset`` or ``folders``."""
        return self._manifest.layout

    @property
    def format(self) -> str:
        """Return the format, ``image``, ``wav``, ``npy`` or ``safetensors``."""
        return self._manifest.format

    def names(self, ids: Sequence[int]) -> list[str]:
        """Return the samples' names: the key in a shard, the path in folders.

        Raises:
            ConfigError: If an id is not a row of the index.
        """
        return self._text("name", self._rows(ids))

    def locate(self, ids: Sequence[int]) -> list[SampleRef]:
        """Return the locations of the samples, in the given order.

        Raises:
            ConfigError: If an id is not a row of the index.
        """
        rows = self._rows(ids)
        places = zip(
            self._text("object", rows),
            self._text("etag", rows),
            self._starts[rows].tolist(),
            self._stops[rows].tolist(),
            strict=True,
        )
        return [
            SampleRef(object=name, etag=etag, start=start, stop=stop) for name, etag, start, stop in places
        ]

    def sizes(self, ids: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the stored bytes of the samples, in the given order.

        Raises:
            ConfigError: If an id is not a row of the index.
        """
        rows = self._rows(ids)
        return np.asarray(self._stops[rows] - self._starts[rows], dtype=np.int64)

    def targets_of(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the targets of the samples, in the given order: int64 of shape (len(ids),).

        Raises:
            ConfigError: If an id is not a row of the index.
        """
        return self._targets[torch.from_numpy(self._rows(ids))]

    def run(
        self, value: torch.Tensor, *, sample: int, epoch: int, seed: int, start: int, stop: int
    ) -> torch.Tensor:
        """Run the input stages from one position to another on one sample, see :meth:`InputChain.run`.

        Raises:
            BadSample: If the sample cannot pass a stage.
        """
        try:
            return self.chain.run(value, sample=sample, epoch=epoch, seed=seed, start=start, stop=stop)
        except SampleError as error:
            (place,) = self.locate([sample])
            raise BadSample(sample=sample, object_name=place.object, reason=str(error)) from None

    def targets_among(self, other: Dataset, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Return the targets as numbers of another dataset's classes, matched by name.

        Classes without samples need no match. Shards without ``classes.txt`` name no classes: their numbers
        are compared with other shards' numbers.

        Args:
            rows: Rows of the index; only their classes need a match. None for all rows.

        Raises:
            ConfigError: If the other dataset lacks a class that has samples, or the name stands for several.
        """
        if self.classes == other.classes:
            return self.targets
        counted = self._targets if rows is None else self.targets_of(rows)
        used = torch.unique(counted).tolist()
        if self.layout == other.layout == "webdataset" and _are_numbers(self) != _are_numbers(other):
            if used[-1] >= len(other.classes):
                raise ConfigError(
                    f"class {used[-1]} is none of the {len(other.classes)} classes of {other!r}"
                )
            return self.targets
        mine, theirs = Counter(self.classes), Counter(other.classes)
        number = {name: at for at, name in enumerate(other.classes)}
        mapped = torch.full((len(self.classes),), -1, dtype=torch.int64, device="cpu")
        for target in used:
            name = self.classes[target]
            if name not in number:
                hint = "; name them in a classes.txt beside the shards" if _are_numbers(self) else ""
                raise ConfigError(
                    f"class {name!r} is none of the {len(other.classes)} classes of {other!r}{hint}"
                )
            if mine[name] > 1 or theirs[name] > 1:
                raise ConfigError(f"class {name!r} stands for several: classes cannot be matched by name")
            mapped[target] = number[name]
        return mapped[self._targets]

    def with_stages(self, stages: Sequence[InputStage]) -> Dataset:
        """Return a dataset of the same samples with other input stages, not published yet."""
        chain = InputChain(tuple(stages))
        check_reads(chain, self.format)
        manifest = msgspec.structs.replace(self._manifest, stages=chain.to_json())
        return Dataset(self.store, files.encode_manifest(manifest), self._index_bytes, prefix=self.prefix)

    def with_store(self, store: Store) -> Dataset:
        """Return the same dataset, read through another client of the same store."""
        other = copy.copy(self)
        other.store = store
        return other

    def publish(self) -> None:
        """Write the dataset's files, ``chain.json`` last, so that a dataset that can be opened is complete.

        An existing dataset is left alone: its digest proves that it is the same.

        Raises:
            StoreError: If the store cannot be written.
        """
        index_path, chain_path = dataset_paths(self.prefix, self.digest)
        if self.store.exists(chain_path):
            return
        self.store.put(index_path, self._index_bytes)
        self.store.put(chain_path, self._chain_bytes)

    @classmethod
    def open(
        cls,
        store: Store,
        digest: str,
        *,
        prefix: str = DEFAULT_PREFIX,
        admit: Callable[[int], None] = lambda nbytes: None,
    ) -> Dataset:
        """Read a published dataset and check it against its digest.

        Args:
            admit: Called with the total bytes of memory needed so far, each time before opening takes more.

        Raises:
            ObjectNotFound: If no such dataset was published here.
            DatasetError: If its files are damaged, too large, or have invalid contents.
            Exception: If ``admit`` raises it.
        """
        index_path, chain_path = dataset_paths(prefix, digest)
        size = store.head(chain_path).size
        if size > files.MAX_CHAIN_BYTES:
            raise DatasetError(
                f"chain.json of dataset {digest} has {size} bytes; at most {files.MAX_CHAIN_BYTES} are "
                "allowed"
            )
        admit(size)
        chain_bytes = store.get_range(chain_path, 0, size)
        chain_nbytes = files.chain_nbytes(chain_bytes)
        admit(chain_nbytes)
        manifest = files.decode_manifest(chain_bytes, digest)
        size = store.head(index_path).size
        if size != manifest.index.bytes:
            raise DatasetError(
                f"index.parquet of dataset {digest} is damaged: {size} bytes, {manifest.index.bytes} "
                "published"
            )
        admit(chain_nbytes + manifest.index.bytes)
        index_bytes = store.get_range(index_path, 0, manifest.index.bytes)
        return cls(
            store,
            chain_bytes,
            index_bytes,
            prefix=prefix,
            admit=lambda nbytes: admit(chain_nbytes + nbytes),
        )

    def _rows(self, ids: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        rows = np.asarray(ids, dtype=np.int64).reshape(-1)
        outside = rows[(rows < 0) | (rows >= len(self))]
        if len(outside):
            raise ConfigError(f"sample ids lie in 0..{len(self) - 1}, got {outside[0]}")
        return rows

    def _text(self, name: str, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[str]:
        column = self._texts[name]
        numbers = column.indices.to_numpy(zero_copy_only=False)[rows]
        if len(rows) <= _FEW:
            return [column.dictionary[number].as_py() for number in numbers.tolist()]
        texts: list[str] = column.dictionary.take(pa.array(numbers)).to_pylist()
        return texts


def _as_dictionary(column: pa.ChunkedArray) -> pa.DictionaryArray:
    """Return a text column as each string once, and a number for each row."""
    return (column if pa.types.is_dictionary(column.type) else column.dictionary_encode()).combine_chunks()


def _are_numbers(dataset: Dataset) -> bool:
    """Return whether a dataset's classes have no names but their numbers."""
    return dataset.classes == tuple(map(str, range(len(dataset.classes))))


def dataset_paths(prefix: str, digest: str) -> tuple[str, str]:
    """Return the names of a dataset's ``index.parquet`` and ``chain.json``.

    Raises:
        DatasetError: If ``digest`` is not a digest.
        ConfigError: If ``prefix`` is not a name.
    """
    place = f"{check_name(prefix)}/datasets/{files.check_digest(digest)}"
    return f"{place}/index.parquet", f"{place}/chain.json"


def check_reads(chain: InputChain, format: str) -> None:
    """Check that a chain's first stage reads the stored format.

    Raises:
        ConfigError: If it reads another format.
    """
    first = chain.stages[0]
    if isinstance(first, LoadTensor):
        reads: str = first.format
    else:
        reads = "wav" if isinstance(first, DecodeWav) else "image"
    if reads != format:
        needed = {"image": "decode", "wav": "decode_wav"}.get(format, f"load_tensor with format {format!r}")
        raise ConfigError(
            f"the samples are stored as {format}; the first stage ({first.name}) reads {reads}; "
            f"it must be {needed}"
        )


def _check_texts(objects: pa.Array, etags: pa.Array) -> None:
    """Check the names and ETags of an index in parts, as each becomes a Python string for the check."""
    for start in range(0, len(objects), _CHECKED_AT_ONCE):
        for name in objects.slice(start, _CHECKED_AT_ONCE).to_pylist():
            try:
                check_name(name)
            except ConfigError as exc:
                raise DatasetError(f"index.parquet: {exc}") from None
    if pc.any(pc.equal(etags, "")).as_py():
        raise DatasetError("index.parquet: column 'etag' has an empty cell")
