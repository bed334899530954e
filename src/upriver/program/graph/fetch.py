"""Whole objects of a store, none larger than whoever reads it can take."""

from __future__ import annotations

from upriver.errors import ProgramError
from upriver.store import ObjectInfo, Store


def get_at_most(store: Store, path: str, most: int) -> bytes:
    """A whole object, if it is no larger than that.

    Raises:
        ProgramError: If it is.
        StoreError: If the store cannot be read.
    """

    def check(info: ObjectInfo) -> None:
        if info.size > most:
            raise ProgramError(f"{path} has {info.size} bytes; at most {most} are allowed")

    return store.get(path, on_answer=check)
