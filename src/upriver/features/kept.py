"""Keep the rows that a job computes, and find them again: in memory, and on disk across jobs."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Protocol

import torch

from upriver._threads.closing import close_later
from upriver.engine.fingerprint import fingerprint
from upriver.errors import CaptureError
from upriver.features import DiskFeatures, MemoryFeatures, Row, StretchFolder
from upriver.features.keep import Keep
from upriver.features.stretch import row_keys, stretch_of
from upriver.features.writer import FeatureWriter
from upriver.pipeline import Dataset, InputChain
from upriver.program.tensor_layouts import same_bits
from upriver.text import bytes_text

log = logging.getLogger("upriver")

CHECKED_ROWS = 16
"""About so many kept rows of a stretch are computed anew before a job uses any."""


class PartName(Protocol):
    """The name of a frozen part, and where its stages end."""

    @property
    def digest(self) -> str:
        """Digest that names it."""

    @property
    def num_stages(self) -> int:
        """Number of its stages."""

    @property
    def about(self) -> str:
        """The frozen part in words."""


def same_row(a: Row, b: Row) -> bool:
    """Return whether two rows are equal to the bit."""
    return len(a) == len(b) and all(map(same_bits, a, b))


class RowsLost(Exception):
    """Rows that counted as kept cannot be read any more."""


class KeptFeatures:
    """Room for the rows that a job keeps. Any number of threads may use it.

    Args:
        keep: Room in memory and on disk.
        micro_batch: Samples that the frozen stages see at once.
        seed: Seed of random input stages.
        device: Where the frozen part runs. Input stages always run on the CPU.
        saved_s: Returns the seconds that a kept row saves.
        num_threads: Threads of PyTorch's operators; by default as many as in this process.

    Attributes:
        why_not: Reason why nothing is kept any more; empty while rows are kept.
        proven: Whether rows at the freeze point were found to depend on nothing but their sample.
    """

    def __init__(
        self,
        keep: Keep,
        *,
        micro_batch: int,
        seed: int,
        device: torch.device,
        saved_s: Callable[[], float],
        num_threads: int | None = None,
    ) -> None:
        self.why_not, self.proven = "", False
        self.micro_batch, self.seed, self.saved_s = micro_batch, seed, saved_s
        self._device, self._num_threads = device, num_threads or torch.get_num_threads()
        disk_bytes = keep.disk_bytes
        self.disk = DiskFeatures(keep.path, budget_bytes=disk_bytes) if disk_bytes else None
        self.writer = FeatureWriter(keep.buffer_bytes) if self.disk is not None else None
        waiting = 2 * keep.buffer_bytes if self.disk is not None else 0
        self.memory = MemoryFeatures(max(0, keep.memory_bytes - waiting))
        self._frozen: PartName | None = None
        self._stretches: dict[str, KeptStretch] = {}
        self._lock = threading.Lock()
        if self.writer is not None:
            close_later(self, self.writer.close, at_exit=True)

    @property
    def frozen(self) -> PartName | None:
        """Name of the frozen part that gives the rows at the freeze point; None until it is known."""
        return self._frozen

    @frozen.setter
    def frozen(self, name: PartName | None) -> None:
        changed = self._frozen is not None and name is not None and self._frozen.digest != name.digest
        self._frozen = name
        for stretch in self._all() if changed else ():
            if stretch.position is None:
                stretch.reopen()

    def stretch(
        self, dataset: Dataset, *, position: int | None, view: int | None, part: PartName | None = None
    ) -> KeptStretch:
        """Return the rows that a stretch gives, of this dataset and others with the same input stages.

        Args:
            dataset: Names the input stages. ETags of a store in this process's memory mean nothing elsewhere,
                so rows of such a dataset are its own, and stay in memory.
            position: Cut after which rows are kept, at most 0; None for the freeze point.
            view: Epoch as which the input stages draw; None if none before the cut draws.
            part: Frozen part of another job, whose rows are only read; None for this job's own.
        """
        chain, shared = dataset.chain, dataset.store.is_shared
        before = chain.to_json() if position is None else chain.to_json()[: position - chain.start]
        store = None if shared else dataset.store.uri
        other = None if part is None else part.digest
        name = json.dumps([before, position, view, store, other], sort_keys=True)
        with self._lock:
            if name not in self._stretches:
                made = KeptStretch(self, name, chain, position=position, view=view, on_disk=shared, part=part)
                self._stretches[name] = made
            return self._stretches[name]

    def fingerprint(self, chain: InputChain, position: int | None) -> Mapping[str, str]:
        """Return the facts that decide the low bits of rows at a position, as in :meth:`stretch`.

        Products run input stages in different numbers of threads, and have the same rows all the same. So the
        number is named only where operators' bits may depend on it.
        """
        if position is None:
            return {**fingerprint(self._device), "num_threads": str(self._num_threads)}
        before = chain.stages[: position - chain.start]
        threads = {"num_threads": str(self._num_threads)} if any(each.threaded for each in before) else {}
        return {**fingerprint("cpu"), **threads}

    def stop(self, why: str) -> None:
        """Keep nothing from now on, and use nothing that was kept."""
        if not self.why_not:
            log.info("features are not kept: %s", why)
            self.why_not = why
            self.close()

    def flush(self, *, wait: bool = False) -> None:
        """Write rows that are in memory alone, such as those from before the frozen part had a name.

        Args:
            wait: Wait until they are written.
        """
        if self.writer is not None:
            for stretch in self._all():
                stretch.write_all(self.writer, wait=wait)
            self.writer.flush(wait=wait)

    def close(self) -> None:
        """Write what waits, and forget what is in memory. Idempotent."""
        if self.writer is not None:
            self.flush(wait=True)
            self.writer.close()
        for stretch in self._all():
            stretch.close()
        with self._lock:
            self._stretches.clear()

    @property
    def remark(self) -> str:
        """Return in words how much is kept now, for the plan; empty if there is no room at all."""
        if self.why_not:
            return f"features are not kept: {self.why_not}"
        used, most = self.memory.used_bytes, self.memory.budget_bytes
        on_disk = sum(stretch.disk_bytes for stretch in self._all())
        at_most = self.disk.budget_bytes if self.disk is not None else 0
        if not most and not at_most:
            return ""
        return (
            f"features kept: {bytes_text(used)} of at most {bytes_text(most)} in memory, "
            f"{bytes_text(on_disk)} of at most {bytes_text(at_most)} on disk"
        )

    def _all(self) -> list[KeptStretch]:
        with self._lock:
            return list(self._stretches.values())


class KeptStretch:
    """Rows that one stretch of a chain gives, of any dataset with these input stages.

    Attributes:
        position: Cut after which rows are kept; None for the freeze point.
        trusted: Whether some of the rows were computed anew and found equal.
    """

    def __init__(
        self,
        owner: KeptFeatures,
        name: str,
        chain: InputChain,
        *,
        position: int | None,
        view: int | None,
        on_disk: bool,
        part: PartName | None = None,
    ) -> None:
        self.position, self.trusted, self._part = position, False, part
        self._owner, self._name, self._chain, self._view = owner, name, chain, view
        self._found: StretchFolder | None = None
        self._on_disk, self._opened = on_disk, not on_disk
        self._lock = threading.Lock()

    @property
    def empty(self) -> bool:
        """Return whether no row is kept, of this dataset or another."""
        folder = self._folder
        return not self._owner.memory.keys(self._name) and (folder is None or not folder.keys)

    def find(self, dataset: Dataset, ids: Sequence[int]) -> frozenset[int]:
        """Return the samples whose rows are kept now."""
        if self._owner.why_not:
            return frozenset()
        folder, in_memory = self._folder, self._owner.memory.keys(self._name)
        on_disk: Set[bytes] = folder.keys if folder is not None else frozenset()
        return self._among(in_memory | on_disk, dataset, ids)

    @property
    def needs_check(self) -> bool:
        """True if it is not known yet that the job's own rows depend on nothing but their sample."""
        return not (self.trusted or self._owner.proven or self.position is not None)

    def unproven(self, dataset: Dataset, ids: Sequence[int]) -> list[frozenset[int]]:
        """Return the samples whose rows other jobs have written, by shard, without proven shards.

        Jobs with other code may have written to the same stretch, if its name does not tell them apart. So a
        row of each shard is to be computed anew before others of that shard are used.
        """
        folder = self._folder
        if folder is None or not folder.has_others:
            return []
        by_key = dict(zip(self._keys(dataset, ids), ids, strict=True))
        return [frozenset(by_key[key] for key in group) for group in folder.unproven(by_key)]

    def prove(self, dataset: Dataset, ids: Sequence[int]) -> None:
        """Note that the rows of these samples are as they are computed now."""
        if (folder := self._folder) is not None:
            folder.prove(self._keys(dataset, ids))

    def _among(self, there: Set[bytes], dataset: Dataset, ids: Sequence[int]) -> frozenset[int]:
        keys = self._keys(dataset, ids)
        return frozenset(sample for sample, key in zip(ids, keys, strict=True) if key in there)

    def found(self, dataset: Dataset, ids: Sequence[int]) -> dict[int, Row]:
        """Return the rows of those samples that are kept and can be read."""
        if self._owner.why_not or not ids:
            return {}
        memory, keys = self._owner.memory, self._keys(dataset, ids)
        rows = memory.get(self._name, keys)
        if (folder := self._folder) is not None:
            there = folder.keys
            missing = [at for at, row in enumerate(rows) if row is None and keys[at] in there]
            for at, row in zip(missing, folder.read([keys[at] for at in missing]), strict=True):
                if row is not None:
                    rows[at] = row
                    if self._part is None:  # else the job keeps what it computes from the row
                        memory.put(self._name, keys[at], row, saved_s=self._owner.saved_s())
        return {sample: row for sample, row in zip(ids, rows, strict=True) if row is not None}

    def read(self, dataset: Dataset, ids: Sequence[int]) -> list[Row]:
        """Return the rows of samples that :meth:`find` named.

        Raises:
            RowsLost: If one of them cannot be read any more.
        """
        found = self.found(dataset, ids)
        if any(sample not in found for sample in ids):
            raise RowsLost
        return [found[sample] for sample in ids]

    def check(self, dataset: Dataset, again: Mapping[int, Row]) -> bool:
        """Compare kept rows with the same rows computed anew, and drop all rows if any differs.

        Returns:
            Whether they are equal, and so may be used.

        Raises:
            CaptureError: If they differ at the freeze point, and this job computed all of them.
        """
        memory, folder, keys = self._owner.memory, self._folder, self._keys(dataset, list(again))
        kept = list(zip(memory.get(self._name, keys), again.values(), strict=True))
        if folder is not None:
            kept += zip(folder.read(keys), again.values(), strict=True)
        found = [same_row(row, right) for row, right in kept if row is not None]
        if all(found):
            self.trusted = len(found) >= len(again)
            if folder is not None and self.trusted:
                folder.prove(keys)
            self._owner.proven |= self.trusted and self.position is None
            return self.trusted
        alone = folder is None or not folder.has_others
        memory.clear(self._name)
        if folder is not None:
            folder.empty()
        if self.position is None and alone:
            raise CaptureError("a sample's features depend on its place, or on the others, in a micro-batch")
        log.warning("kept features differ from those that are computed now: all of them are dropped")
        return False

    def keep(self, dataset: Dataset, rows: Mapping[int, Row], *, patience_s: float = 0.0) -> None:
        """Keep the rows of samples, as far as there is room.

        Args:
            patience_s: Seconds to wait for the disk, for rows that memory has no room for.
        """
        owner, folder = self._owner, self._folder
        if owner.why_not or not rows:
            return
        until_s, saved_s = time.monotonic() + patience_s, owner.saved_s()
        if folder is not None:
            folder.saved_s = saved_s or folder.saved_s  # unknown when a job begins
        for key, row in zip(self._keys(dataset, list(rows)), rows.values(), strict=True):
            in_memory = owner.memory.put(self._name, key, row, saved_s=saved_s)
            if owner.writer is not None and folder is not None and key not in folder.keys:
                owner.writer.put(folder, key, row, until_s=0.0 if in_memory else until_s)

    def write_all(self, writer: FeatureWriter, *, wait: bool) -> None:
        """Hand rows that are in memory alone to a writer."""
        if (folder := self._folder) is None:
            return
        memory = self._owner.memory
        missing = sorted(memory.keys(self._name) - folder.keys - writer.waiting(folder))
        for key, row in zip(missing, memory.get(self._name, missing), strict=True):
            if row is not None:
                writer.put(folder, key, row, wait=wait)

    def refresh(self) -> None:
        """Look for rows that another job has written meanwhile."""
        if (folder := self._folder) is not None:
            folder.refresh()

    def reopen(self) -> None:
        """Look for rows on disk by the present name. What is in memory stays."""
        with self._lock:
            self._found, self._opened, self.trusted = None, not self._on_disk, False

    def close(self) -> None:
        """Forget the rows in memory."""
        self._owner.memory.clear(self._name)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the rows on disk."""
        found = self._found
        return round(len(found.keys) * found.row_bytes) if found is not None else 0

    @property
    def _folder(self) -> StretchFolder | None:
        """The rows on disk. None without a disk, and until the frozen part has a name."""
        owner = self._owner
        with self._lock:
            known = self.position is not None or self._frozen is not None
            if owner.disk is not None and known and not self._opened:
                self._opened = True
                self._found = self._open(owner.disk)
            return self._found

    @property
    def _frozen(self) -> PartName | None:
        return self._part or self._owner.frozen

    def _open(self, disk: DiskFeatures) -> StretchFolder:
        owner, frozen = self._owner, self._frozen if self.position is None else None
        stretch = stretch_of(
            self._chain,
            cut=frozen.num_stages if frozen is not None else self.position or 0,
            program=frozen.digest if frozen is not None else None,
            view=(owner.seed, self._view) if self._view is not None else None,
            micro_batch=owner.micro_batch if frozen is not None else 1,
            fingerprint=owner.fingerprint(self._chain, self.position),
        )
        about = frozen.about if frozen is not None else ""
        if frozen is None and self.position is not None and self.position > self._chain.start:
            about = f"samples after {self._chain.stage_at(self.position).name}"
        return disk.open(stretch, saved_s=owner.saved_s(), about=about)

    def _keys(self, dataset: Dataset, ids: Sequence[int]) -> list[bytes]:
        return row_keys(dataset.locate(ids), ids, drawn=self._view is not None)
