"""Read whole objects of a store up to a maximum size."""

from __future__ import annotations

from upriver.errors import ProgramError
from upriver.store import ObjectInfo, Store


def get_at_most(store: Store, path: str, most: int) -> bytes:
    """Return a whole object of at most `most` bytes.

    Raises:
        ProgramError: If it is larger.
        StoreError: If the store cannot be read.
    """

    def check(info: ObjectInfo) -> None:
        if info.size > most:
            raise ProgramError(f"{path} has {info.size} bytes; at most {most} are allowed")

    return store.get(path, on_answer=check)
