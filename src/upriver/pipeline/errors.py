"""What a stage says of a sample that it cannot use."""

from __future__ import annotations

from upriver.errors import UpriverError


class SampleError(UpriverError):
    """One sample cannot pass a stage. The engine, which knows row and object, turns it into ``BadSample``.

    Attributes:
        reason: What is wrong, in one line.
    """

    code = "sample"

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
