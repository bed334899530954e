"""Read and append the rows of one stretch: a folder of shards, whose writers take turns."""

from __future__ import annotations

import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Protocol

from upriver import files
from upriver._threads.forks import ForkSafeLock, reset_in_child
from upriver.errors import ConfigError, Damaged
from upriver.features.listing import (
    LOCK_FILE,
    STRETCH_FILE,
    remove_unfinished,
    shard_files,
    shard_name,
    stretch_text,
    write_stretch,
)
from upriver.features.open_files import Descriptor, OpenFiles
from upriver.features.row_form import Row, RowBuffer
from upriver.features.shard import BLOCK_NBYTES, OtherVersion, PackedShard, Shard, disk_bytes, pack
from upriver.features.stretch import Stretch
from upriver.text import error_text

log = logging.getLogger("upriver")

USED_EVERY_S = 60.0
"""Seconds between two notes of a folder's use. Jobs tell each other apart by hours."""

TURN_S = 30.0
"""Most seconds to wait until other jobs have written their shards."""

SLOW_S = 10.0
"""Seconds of writing or reading after which a disk may count as slow: shorter ones may be an accident."""


class _Pace:
    """Seconds and rows of all accesses to a disk but the slowest: the job may have been stopped in it."""

    def __init__(self) -> None:
        self.seconds, self.rows, self._slowest = 0.0, 0, (0.0, 0)

    def add(self, seconds: float, rows: int) -> None:
        """Add an access."""
        counted, self._slowest = sorted([self._slowest, (seconds, rows)])
        self.seconds, self.rows = self.seconds + counted[0], self.rows + counted[1]


class Space(Protocol):
    """Room on disk that the stretches of a root share."""

    def making_room(
        self,
        folder: Path,
        num_bytes: int,
        *,
        at_least: int,
        saved_s_per_byte: float,
        spare: Callable[[], Collection[Path]],
    ) -> AbstractContextManager[int]:
        """Remove what is less useful, and yield the bytes that may be written."""

    def locked(self) -> AbstractContextManager[None]:
        """Hold back all that count the bytes in use."""


class StretchFolder:
    """The kept rows of one stretch on disk. Any thread may call any method.

    A folder or disk that fails costs rows and one warning, and never raises.

    Attributes:
        saved_s: Seconds that a row saves each time it is read; 0 while that is unknown.
    """

    def __init__(
        self,
        path: Path,
        stretch: Stretch,
        *,
        saved_s: float,
        about: str,
        space: Space,
        open_files: OpenFiles,
    ) -> None:
        self.path, self.saved_s = path, saved_s
        self._stretch, self._digest, self._about = stretch, stretch.digest, about
        self._space, self._files = space, open_files
        self._lock, self._writing = ForkSafeLock(), ForkSafeLock()
        self._shards: dict[Path, Shard] = {}
        self._written: set[Path] = set()
        self._proven: set[Path] = set()
        self._places: dict[bytes, tuple[Shard, int]] = {}
        self._keys: frozenset[bytes] | None = None
        self._wanted: AbstractSet[bytes] | None = None
        self._owned: Descriptor | None = None
        self._told: set[str] = set()
        self._given_up, self._unread = False, False
        self._wrote, self._read, self._used_at_s = _Pace(), _Pace(), -USED_EVERY_S
        self._patience_s = TURN_S
        reset_in_child(self)
        self._begin()

    @property
    def keys(self) -> AbstractSet[bytes]:
        """Keys of the rows that can be read, as they are now."""
        with self._lock:
            if self._keys is None:
                self._keys = frozenset(self._places)
            return self._keys

    @property
    def has_others(self) -> bool:
        """Return whether another job has written some of the rows."""
        with self._lock:
            return not self._shards.keys() <= self._written

    def unproven(self, keys: Iterable[bytes]) -> Sequence[Sequence[bytes]]:
        """Return the keys whose rows other jobs have written, by shard, without shards that were proven."""
        groups: dict[Path, list[bytes]] = {}
        with self._lock:
            known = self._written | self._proven
            for key in keys:
                place = self._places.get(key)
                if place is not None and place[0].path not in known:
                    groups.setdefault(place[0].path, []).append(key)
        return list(groups.values())

    def prove(self, keys: Sequence[bytes]) -> None:
        """Note that these rows are as they are computed now. So their shards are of the same code."""
        with self._lock:
            places = [self._places.get(key) for key in keys]
            self._proven |= {place[0].path for place in places if place is not None}

    @property
    def row_bytes(self) -> float:
        """Mean bytes of a row; 0 if there is none."""
        with self._lock:
            rows = sum(len(shard.keys) for shard in self._shards.values())
            return sum(shard.rows_nbytes for shard in self._shards.values()) / max(1, rows)

    def read(self, keys: Sequence[bytes]) -> list[Row | None]:
        """Read rows into main memory. The rows of one call share an allocation.

        Returns:
            A row for each key; None if it is missing or damaged. A damaged shard is removed.
        """
        with self._lock:
            places = [self._places.get(key) for key in keys]
        asked: dict[Path, list[tuple[int, int, Shard]]] = {}
        for at, place in enumerate(places):
            if place is not None:
                shard, number = place
                asked.setdefault(shard.path, []).append((number, at, shard))
        found: list[Row | None] = [None] * len(keys)
        buffer = RowBuffer(
            sum(shard.nbytes_of(number) for rows in asked.values() for number, _, shard in rows)
        )
        start, began = 0, time.monotonic()
        for path, rows in asked.items():
            try:
                file = self._files.get(path)
                for number, at, shard in sorted(rows, key=lambda row: row[0]):
                    found[at] = shard.read(file.number, number, buffer, start)
                    start += shard.nbytes_of(number)
            except (OSError, Damaged) as error:
                self._lose(path, error)
        self._judge_reading(time.monotonic() - began, sum(row is not None for row in found))
        self._note_use()
        return found

    def append(self, rows: Mapping[bytes, Row]) -> bool:
        """Write rows that are not there yet as one shard. They must not change meanwhile.

        Each shard costs a file and two syncs of the disk, so collect rows of some ten megabytes.

        Returns:
            True if all of them are there now. False if the budget has no room for all, the disk is full,
            gone or slow, others write for too long, or a row cannot be stored.
        """
        with self._writing:
            if self._given_up:
                return False
            try:
                return self._append(rows)
            except ConfigError as error:
                self._warn("row", f"no rows are kept in {self.path}: {error}")
            except OSError as error:
                self._warn("disk", f"no more rows are kept in {self.path}: {error_text(error)}")
            finally:
                self._leave()
            self._given_up = True
            return False

    def want(self, keys: AbstractSet[bytes] | None) -> None:
        """Tell which rows are of use: a shard without any gives way to new ones. None for all rows."""
        with self._lock:
            self._wanted = keys

    def refresh(self) -> None:
        """Look for shards that another job has written or removed since."""
        try:
            names = [shard.path for shard in shard_files(self.path)]
        except OSError as error:
            self._warn("read", f"kept rows in {self.path} cannot be read: {error_text(error)}")
            names = []
        with self._lock:
            for path in self._shards.keys() - set(names):
                if path not in self._files:
                    self._forget(path)
            for path in names:
                if path not in self._shards and not self._unread:
                    self._add(path)

    def empty(self) -> None:
        """Remove all rows, as after one that turned out wrong."""
        with self._writing, self._lock:
            for path in {*self._shards, *self._on_disk()}:
                self._remove(path)

    def forked(self) -> None:
        """Leave a shard that is being written to the parent."""
        self._owned = None

    # ---------------------------------------------------------------------------------- reading

    def _begin(self) -> None:
        """Take what is there, if nobody else may write to it."""
        if Path(os.devnull) in self.path.parents:
            self._given_up = True  # there is no cache, see `cache_folder`
            return
        try:
            if not self._is_private():
                return
        except FileNotFoundError:
            return
        except OSError as error:
            self._give_up(f"no rows are kept in {self.path}: {error_text(error)}")
            return
        self._note_use(self._text if self.saved_s else None)
        self.refresh()

    def _is_private(self) -> bool:
        """Return whether only this user writes to the folder; else give it up."""
        status = self.path.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022:
            return True
        self._give_up(f"{self.path} is not used: it must be a folder of this user that no other may write to")
        return False

    def _add(self, path: Path) -> None:
        try:
            shard = Shard(path, self._files.get(path).number, self._digest)
        except OtherVersion as error:
            self._warn("version", f"{path} counts as missing: {error}")
        except (OSError, Damaged) as error:
            self._lose(path, error)
        else:
            self._shards[path], self._keys = shard, None
            for number, key in enumerate(shard.keys):
                self._places.setdefault(key, (shard, number))  # a row that may be in use keeps its place

    def _lose(self, path: Path, error: Exception) -> None:
        """Forget a shard; remove it if it is damaged, so that its rows are written again."""
        with self._lock:
            if isinstance(error, Damaged):
                self._remove(path)
                self._warn("damaged", f"{path} is damaged, and its rows are lost: {error}")
            else:
                self._forget(path)
                if not isinstance(error, FileNotFoundError):
                    self._warn("read", f"{path} cannot be read, and its rows are lost: {error_text(error)}")

    def _remove(self, path: Path) -> None:
        self._forget(path)
        with suppress(OSError):
            path.unlink()

    def _forget(self, path: Path) -> None:
        shard = self._shards.pop(path, None)
        self._files.close(path)
        for key in shard.keys if shard is not None else ():
            place = self._places.get(key)
            if place is not None and place[0] is shard:
                del self._places[key]
        self._keys = None

    def _on_disk(self) -> list[Path]:
        with suppress(OSError):
            return [shard.path for shard in shard_files(self.path)]
        return []

    def _note_use(self, text: bytes | None = None) -> None:
        """Renew the time of ``stretch.json``, and with a text its content; at most once in `USED_EVERY_S`."""
        now = time.monotonic()
        if text is None and now - self._used_at_s < USED_EVERY_S:
            return
        self._used_at_s = now
        path = self.path / STRETCH_FILE
        with suppress(OSError):  # an older time costs the folder its place at worst
            if text is not None and not (path.exists() and path.read_bytes() == text):
                write_stretch(self.path, text)
            os.utime(path)

    # ---------------------------------------------------------------------------------- writing

    def _append(self, rows: Mapping[bytes, Row]) -> bool:
        fresh = not self.path.exists()
        if not fresh and not self._own(within_s=self._patience_s):
            if not self.path.exists():
                return self._append(rows)  # another job has just removed the folder, as it was empty
            self._patience_s = 0.0  # no further shard waits for a job that may be stopped
            self._warn(
                "writer", f"another job has written to {self.path} for {TURN_S:g} s: rows are left out"
            )
            return False
        self._patience_s = TURN_S
        self.refresh()
        shard = pack(self._digest, {key: row for key, row in rows.items() if key not in self._places})
        if not shard.keys:
            return True
        began = time.monotonic()
        written = self._write(shard, fresh=fresh)
        if fresh and not written and self.path.exists() and self._owned is None:
            return self._append(rows)  # another job has just created the folder
        self._judge(time.monotonic() - began, written)
        self.refresh()
        return written == len(shard.keys)

    def _write(self, shard: PackedShard, *, fresh: bool) -> int:
        """Write as many rows as there is room for, and return their number.

        The file has its full length before others may count the room, and is filled afterwards. It gets its
        name while nobody counts.

        Args:
            fresh: Whether the folder is still to be created.
        """
        whole = disk_bytes(shard.nbytes)
        beside = BLOCK_NBYTES + disk_bytes(len(self._text)) if fresh else 0
        with ExitStack() as stack:
            with self._space.making_room(
                self.path,
                beside + whole,
                at_least=beside + disk_bytes(shard.first(1).nbytes),
                saved_s_per_byte=self.saved_s * len(shard.keys) / whole,
                spare=self._spare,
            ) as room:
                shard = shard.fitting(room - beside)
                if not shard.keys:
                    self._tell("full", f"the budget has no room for more rows in {self.path}")
                    return 0
                if fresh and not self._create():
                    return 0
                path = self.path / shard_name(len(shard.keys), secrets.token_hex(8))
                self._written.add(path)
                file = stack.enter_context(files.replacing(path, private=True, lock=self._space.locked()))
                os.truncate(file, shard.nbytes)
            shard.write(file)
        return len(shard.keys)

    def _create(self) -> bool:
        """Create the folder and own it; return False if another job does."""
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            return False
        return self._own(within_s=0.0)  # not longer: the root's lock is held, which the other may need

    def _own(self, *, within_s: float) -> bool:
        """Become the only writer for this shard, and remove what killed ones have left."""
        number = None
        with suppress(FileNotFoundError):  # the folder is gone
            number = files.try_lock(self.path / LOCK_FILE, within_s=within_s)
        if number is None:
            return False
        self._owned = Descriptor(number)
        if not self._is_private():
            return False
        remove_unfinished(self.path)
        if not (self.path / STRETCH_FILE).exists():
            write_stretch(self.path, self._text)
        return True

    def _leave(self) -> None:
        """Let others write."""
        if self._owned is not None:
            files.release(self._owned.number)
        self._owned = None

    def _spare(self) -> Collection[Path]:
        """Return the shards that hold no wanted row."""
        with self._lock:
            if self._wanted is None:
                return ()
            wanted = self._wanted
            return [path for path, shard in self._shards.items() if wanted.isdisjoint(shard.keys)]

    def _judge(self, seconds: float, rows: int) -> None:
        """Give up a disk on which writing a row takes longer than computing it."""
        self._wrote.add(seconds, rows)
        if rows and (slow := self._why_slow("writing", self._wrote)):
            self._give_up(f"no more rows are kept in {self.path}: {slow}")

    def _judge_reading(self, seconds: float, rows: int) -> None:
        """Forget the rows of a disk from which reading a row takes longer than computing it."""
        self._read.add(seconds, rows)
        if slow := self._why_slow("reading", self._read):
            self._give_up(f"kept rows in {self.path} are not used any more: {slow}")
            with self._lock:
                self._unread = True
                for path in list(self._shards):
                    self._forget(path)

    def _why_slow(self, what: str, pace: _Pace) -> str:
        """Return why the disk counts as slow; empty if it does not, or if what a row saves is unknown."""
        saved_s = self.saved_s * pace.rows
        if not self.saved_s or pace.seconds <= max(SLOW_S, saved_s):
            return ""
        return (
            f"the disk is slow; {what} {pace.rows} rows took {pace.seconds:.3g} s, and computing them "
            f"{saved_s:.3g} s"
        )

    @property
    def _text(self) -> bytes:
        return stretch_text(self._stretch, saved_s=self.saved_s, about=self._about)

    def _give_up(self, why: str) -> None:
        self._given_up = True
        self._warn("disk", why)

    def _warn(self, kind: str, text: str) -> None:
        """Log the first warning of a kind."""
        self._tell(kind, text, level=logging.WARNING)

    def _tell(self, kind: str, text: str, *, level: int = logging.INFO) -> None:
        """Log the first message of a kind."""
        if kind not in self._told:
            self._told.add(kind)
            log.log(level, "%s", text)
