"""Keep rows on disk: all stretches under one root, with one budget in bytes for all processes."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from upriver import files
from upriver.features.budget import free_on_disk
from upriver.features.eviction import KeptPart, to_remove
from upriver.features.folder import StretchFolder
from upriver.features.listing import (
    LOCK_FILE,
    KeptFolder,
    ShardFile,
    kept_folder,
    kept_folders,
    remove_files,
    remove_unfinished,
)
from upriver.features.open_files import Descriptor, OpenFiles
from upriver.features.shard import BLOCK_NBYTES
from upriver.features.stretch import Stretch
from upriver.types import require_finite

UNUSED_S = 24 * 3600.0
"""Seconds without use after which a stretch gives way to any other: longer than an epoch or a night. What a
finished project has left would else hold its place for ever."""

LOCK_S = 10.0
"""Seconds to wait for others that make room. It takes them milliseconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureFolder:
    """Rows that are kept of one stretch.

    Attributes:
        digest: Digest of the stretch.
        cut: Position up to which rows are computed; None if nothing says so.
        program: Digest of the program; None if the cut lies before the model, or nothing says so.
        about: What the rows are, in words; empty if nothing says so.
        num_bytes: Bytes on disk.
        saved_s: Seconds that a row saves.
        last_used_s: Time of the last use, in seconds since 1970.
    """

    digest: str
    cut: int | None
    program: str | None
    about: str
    rows: int
    num_bytes: int
    saved_s: float
    last_used_s: float


class DiskFeatures:
    """The stretches under one root.

    Nothing is created before there are rows to write. A root that fails costs rows and one warning.

    Args:
        root: Folder for the stretches; created with mode 0700. Other files in it stay.
        budget_bytes: Most bytes on disk of all stretches, those of other jobs included.
    """

    def __init__(self, root: Path, *, budget_bytes: int) -> None:
        self.root, self.budget_bytes = Path(root).absolute(), budget_bytes
        self._open_files = OpenFiles()

    def open(self, stretch: Stretch, *, saved_s: float, about: str = "") -> StretchFolder:
        """Open the rows of a stretch, and shrink the root to the budget.

        Args:
            saved_s: Seconds that a row saves each time it is read.
            about: Words for those who list what is kept.

        Raises:
            ConfigError: If ``saved_s`` is not a finite number >= 0.
        """
        require_finite("saved_s", saved_s)
        folder = StretchFolder(
            self.root / stretch.digest,
            stretch,
            saved_s=float(saved_s),
            about=about,
            space=self,
            open_files=self._open_files,
        )
        if self.used_bytes > self.budget_bytes:
            with contextlib.suppress(OSError):  # the next rows are then not written, either
                self.collect(at_most=self.budget_bytes)
            folder.refresh()
        return folder

    @property
    def used_bytes(self) -> int:
        """Bytes on disk of all stretches, unfinished files included."""
        return sum(folder.num_bytes for folder in kept_folders(self.root))

    def entries(self) -> list[FeatureFolder]:
        """Return what is kept, the last used first."""
        found = [_entry(folder) for folder in kept_folders(self.root)]
        return sorted(found, key=lambda entry: -entry.last_used_s)

    def collect(self, *, at_most: int | None = None, older_than_s: float | None = None) -> int:
        """Remove rows, and what killed jobs have left.

        Args:
            at_most: Bytes that may stay; the least useful go first.
            older_than_s: Seconds without use after which a stretch goes.

        Returns:
            Bytes freed.

        Raises:
            OSError: If the root cannot be locked.
        """
        if not self.root.is_dir():
            return 0
        with self.locked():
            before, now = self.used_bytes, time.time()
            for folder in kept_folders(self.root):
                old = older_than_s is not None and now - folder.last_used_s > older_than_s
                for shard in folder.shards if old else ():
                    self._unlink(shard.path)
            self._clear_up()
            if at_most is not None:
                self._shrink(at_most)
            return max(0, before - self.used_bytes)

    @contextlib.contextmanager
    def making_room(
        self,
        folder: Path,
        num_bytes: int,
        *,
        at_least: int,
        saved_s_per_byte: float,
        spare: Callable[[], Collection[Path]],
    ) -> Iterator[int]:
        """Remove what is less useful than new rows; nobody else makes room during the block.

        Args:
            folder: Folder of the new rows. Its own rows stay, unless they are unused.
            num_bytes: Bytes on disk of the new rows.
            at_least: Bytes without which there is no use in removing anything.
            saved_s_per_byte: Seconds that a byte of them saves.
            spare: Returns shards that nobody needs.

        Yields:
            Bytes that may be written, which may be less.

        Raises:
            OSError: If the root cannot be created or locked.
        """
        _create(self.root)
        with self.locked():
            missing = num_bytes - self._room()
            if missing > 0:
                self._clear_up()
                missing = num_bytes - self._room()
            if missing > 0:
                parts = self._parts(frozenset(spare()), own=folder)
                going = to_remove(parts, missing, saved_s_per_byte)
                if num_bytes - missing + sum(part.num_bytes for part in going) >= at_least:
                    self._remove(going)
            yield max(0, self._room())

    def _room(self) -> int:
        """Return the bytes left. A file that is being replaced takes its room twice for a moment."""
        return self.budget_bytes - BLOCK_NBYTES - self.used_bytes

    def _shrink(self, at_most: int) -> None:
        parts = self._parts(frozenset(), own=None)
        self._remove(to_remove(parts, self.used_bytes - at_most, math.inf))
        self._clear_up()

    def _parts(self, spare: frozenset[Path], *, own: Path | None) -> list[KeptPart[ShardFile]]:
        """Return all shards, the oldest of each folder first. With the newest the folder goes, too."""
        now = time.time()
        return [
            KeptPart(
                name=shard,
                num_bytes=shard.num_bytes + (folder.other_bytes if shard is folder.shards[-1] else 0),
                saved_s_per_byte=math.inf if folder.path == own else folder.saved_s_per_byte,
                last_used=folder.last_used_s,
                unused=shard.path in spare or (folder.path != own and _is_unused(folder, now)),
            )
            for folder in kept_folders(self.root)
            for shard in folder.shards
        ]

    def _remove(self, parts: list[KeptPart[ShardFile]]) -> None:
        for part in parts:
            self._unlink(part.name.path)
        for path in {part.name.path.parent for part in parts}:
            self._clear_up_folder(kept_folder(path))

    def _clear_up(self) -> None:
        """Remove what killed jobs have left, and folders without rows."""
        for folder in kept_folders(self.root):
            self._clear_up_folder(folder)

    def _clear_up_folder(self, folder: KeptFolder | None) -> None:
        if folder is None or (folder.shards and not folder.unfinished):
            return
        with contextlib.suppress(OSError):
            number = files.try_lock(folder.path / LOCK_FILE)
            if number is not None:  # else a job writes there
                lock = Descriptor(number)
                remove_unfinished(folder.path)
                if not folder.shards:
                    remove_files(folder)
                files.release(lock.number)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the root against other threads and processes that make room.

        Raises:
            OSError: If it cannot be locked, or others hold it for `LOCK_S`.
        """
        number = files.try_lock(self.root / LOCK_FILE, within_s=LOCK_S)
        if number is None:
            raise TimeoutError(f"another process has locked {self.root} for {LOCK_S:g} s")
        lock = Descriptor(number)
        try:
            yield
        finally:
            files.release(lock.number)

    def _unlink(self, path: Path) -> None:
        """Remove a shard. What this process has open of it would keep its room on disk."""
        self._open_files.close(path)
        with contextlib.suppress(OSError):
            path.unlink()


def disk_room(root: Path) -> int:
    """Return the bytes that rows under a root have, and those that its disk has free."""
    return free_on_disk(root) + sum(folder.num_bytes for folder in kept_folders(root))


def _is_unused(folder: KeptFolder, now: float) -> bool:
    # A clock that was set back gives times in the future, which say as little as old ones.
    return abs(now - folder.last_used_s) > UNUSED_S


def _create(root: Path) -> None:
    if not root.is_dir():
        files.make_folders(root.parent)
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)


def _entry(folder: KeptFolder) -> FeatureFolder:
    cut, program = folder.description.get("cut"), folder.description.get("program")
    return FeatureFolder(
        digest=folder.path.name,
        cut=cut if isinstance(cut, int) else None,
        program=program if isinstance(program, str) else None,
        about=folder.about,
        rows=folder.rows,
        num_bytes=folder.num_bytes,
        saved_s=folder.saved_s,
        last_used_s=folder.last_used_s,
    )
