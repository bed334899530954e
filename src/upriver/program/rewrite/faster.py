"""Choose the faster form of a frozen prefix, and say by how much its features are off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from upriver.errors import CaptureError, ConfigError, ProgramError
from upriver.program.graph.executor import Program
from upriver.program.rewrite.batch_norm import fold
from upriver.program.rewrite.bfloat16 import to_bfloat16
from upriver.program.rewrite.channels_last import to_channels_last
from upriver.program.rewrite.draft import Draft
from upriver.program.rewrite.int8 import to_int8
from upriver.program.rewrite.matrices import to_matrices

PrefixKind = Literal["compiled", "bf16", "int8"]
"""How a frozen prefix is made faster."""

PREFIXES: tuple[PrefixKind, ...] = get_args(PrefixKind)

_WORDS: dict[PrefixKind, str] = {
    "compiled": "the frozen part has BatchNorm folded into its layers",
    "bf16": "the frozen part computes in bfloat16",
    "int8": "the frozen part's linear layers multiply 8-bit integers",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FasterPrefix:
    """A frozen prefix that gives nearly the features of the model as it is written.

    Attributes:
        kind: As the job was asked for.
        captured: The prefix as it is written.
        error: Largest difference of the canary's features from those of the captured prefix, relative to the
            largest value.
        note: What more a user should know.
    """

    kind: PrefixKind
    captured: Program
    error: float
    note: str = ""

    def __str__(self) -> str:
        return (
            f"within {self.error:.2g} of the largest value of the model as it is written, by the canary, as "
            f"{_WORDS[self.kind]}{self.note and ', ' + self.note}"
        )


def rewritten(program: Program, kind: PrefixKind) -> Program:
    """Return a faster program with the same stages, which any server runs.

    Raises:
        ConfigError: If it cannot be rewritten so.
    """
    draft = Draft(program)
    try:
        to_matrices(draft)
        fold(draft)
        to_channels_last(draft)
        if kind == "bf16":
            to_bfloat16(draft)
        elif kind == "int8" and not to_int8(draft):
            raise ConfigError(
                "prefix='int8' would change nothing, as the frozen part has no float32 linear layer; "
                "give 'bf16' or 'compiled', or leave it out"
            )
        return draft.finish()
    except (CaptureError, ProgramError) as error:
        raise ConfigError(f"the frozen part does not run with prefix={kind!r}: {error}") from error
