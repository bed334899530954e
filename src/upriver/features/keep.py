"""Define how much a job keeps of what it computes, and where."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from upriver.cache import cache_folder
from upriver.errors import ConfigError
from upriver.features.budget import AUTO, budget_bytes
from upriver.features.disk import disk_room
from upriver.resources import host_bytes
from upriver.text import printable

SHARD_BYTES, LEAST_SHARD_BYTES = 32 << 20, 4 << 20
"""Bytes of rows that are written together; fewer where memory is scarce, down to the second number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """Room for the features that a job keeps. It takes no more than that, and says what it took.

    Attributes:
        memory: Bytes, or a size such as ``"2 GB"``; ``auto`` takes a tenth of what is free. With 0, rows are
            kept on disk alone, and up to 8 MiB of them wait to be written.
        disk: The same for files that later jobs find, too.
        folder: Folder of these files; by default one in upriver's cache folder.
        store: Whether servers keep what they compute in the store, too, near the data: for later epochs, and
            for other jobs of the same tenant on any machine. It counts in the tenant's storage.

    Raises:
        ConfigError: If a field is outside its allowed range; names it.
    """

    memory: int | str = AUTO
    disk: int | str = AUTO
    folder: str | Path | None = None
    store: bool = False

    def __post_init__(self) -> None:
        for name in ("memory", "disk"):
            budget_bytes(name, getattr(self, name), free=lambda: 0)
        if not isinstance(self.folder, str | Path | None) or self.folder == "":
            raise ConfigError(f"folder must be a path, got {printable(repr(self.folder), 60)}")
        if not isinstance(self.store, bool):
            raise ConfigError(f"store must be True or False, got {printable(repr(self.store), 60)}")

    @property
    def path(self) -> Path:
        """Folder of the files."""
        return Path(self.folder).absolute() if self.folder is not None else cache_folder() / "features"

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory, as given or by what is free now."""
        return budget_bytes("memory", self.memory, free=host_bytes)

    @property
    def disk_bytes(self) -> int:
        """Bytes of disk, as given or by what is free now and what is kept already."""
        return budget_bytes("disk", self.disk, free=lambda: disk_room(self.path))

    @property
    def buffer_bytes(self) -> int:
        """Bytes of rows that are collected before they are written."""
        return max(LEAST_SHARD_BYTES, min(SHARD_BYTES, self.memory_bytes // 8))


def room_of(keep: Keep | Literal["auto"] | None, *, ranks: int = 1) -> Keep | None:
    """Return the room that the option ``keep`` names; None for none.

    Args:
        ranks: Processes that take the same option, and share what ``auto`` takes.

    Raises:
        ConfigError: If the option is something else.
    """
    if keep is None or isinstance(keep, Keep):
        return keep
    if isinstance(keep, str) and keep == AUTO:
        whole = Keep()
        return whole if ranks == 1 else Keep(memory=whole.memory_bytes // ranks, disk=whole.disk_bytes)
    raise ConfigError(
        f"keep must be None, 'auto' or an upriver.Keep(memory=…, disk=…), got {printable(repr(keep), 60)}"
    )
