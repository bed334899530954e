"""Define the error of a sample that a stage cannot use."""

from __future__ import annotations

from upriver.errors import UpriverError


class SampleError(UpriverError):
    """Raised when one sample cannot pass a stage.

    The engine, which knows row and object, turns it into ``BadSample``.
    """

    code = "sample"

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
