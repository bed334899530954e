"""Name what rows depend on: the stretch of the chain that gives them, and the sample."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from upriver.errors import ConfigError

if TYPE_CHECKING:
    from upriver.pipeline import InputChain, SampleRef

SCHEMA: Final = "upriver.features/1"
"""Version of digests, keys and files. Rows of another version count as missing."""

KEY_NBYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """The stretch [start of the chain, cut), with all that decides the bits of its rows but the sample.

    Attributes:
        program: Digest of the program; None if the cut lies before the model.
        cut: Position up to which rows are computed.
        chain: Input stages before the cut as JSON, in order.
        view: Seed and number of the view; None if no stage before the cut draws random numbers.
        micro_batch: Samples that a model stage sees at once; 1 if the cut lies before the model.
        fingerprint: Facts of the machine that decide low bits, the number of threads among them.
    """

    program: str | None
    cut: int
    chain: tuple[Mapping[str, Any], ...]
    view: tuple[int, int] | None
    micro_batch: int
    fingerprint: Mapping[str, str]

    @property
    def digest(self) -> str:
        """SHA-256 of the description in canonical JSON, in hexadecimal."""
        described = {"schema": SCHEMA, **self.to_json()}
        if self.program is None:  # the stages say where the cut lies; it counts those behind it, too
            del described["cut"]
        text = json.dumps(described, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return the stretch as plain data."""
        return {
            "program": self.program,
            "cut": self.cut,
            "chain": [dict(stage) for stage in self.chain],
            "view": None if self.view is None else list(self.view),
            "micro_batch": self.micro_batch,
            "fingerprint": dict(self.fingerprint),
        }


def stretch_of(
    chain: InputChain,
    *,
    cut: int,
    program: str | None,
    view: tuple[int, int] | None,
    micro_batch: int,
    fingerprint: Mapping[str, str],
) -> Stretch:
    """Return the stretch of a chain up to a cut, without what its rows do not depend on.

    Args:
        chain: All input stages of the job.
        cut: Position from ``chain.start`` on.
        program: Digest of the program; rows before the model do not depend on it.
        view: Seed and number of the view; a stretch without random stages does not depend on it.
        micro_batch: Samples that a model stage sees at once.

    Raises:
        ConfigError: If the cut lies before the chain; behind the model's input without a program; or behind a
            random stage without a view.
    """
    if cut < chain.start:
        raise ConfigError(f"a cut of this chain is at least {chain.start}, got {cut}")
    inside = cut > 0
    if inside and program is None:
        raise ConfigError(f"a stretch up to cut {cut} needs the digest of its program, got None")
    draws = chain.first_draw is not None and chain.first_draw < cut
    if draws and view is None:
        name = chain.stage_at(chain.first_draw + 1).name if chain.first_draw is not None else ""
        raise ConfigError(f"a stretch up to cut {cut} needs a view, since {name} draws random numbers")
    return Stretch(
        program=program if inside else None,
        cut=cut,
        chain=tuple(chain.to_json()[: min(cut, 0) - chain.start]),
        view=view if draws else None,
        micro_batch=micro_batch if inside else 1,
        fingerprint=dict(fingerprint),
    )


def row_key(ref: SampleRef, sample: int | None) -> bytes:
    """Return the key of a sample's row within a stretch: 16 bytes.

    Stores in memory count their ETags from 0. Rows of such a store must not outlast the process.

    Args:
        ref: Location of the stored sample, with the ETag that its bytes have.
        sample: Row of the dataset's index if the stretch has a view, since draws depend on it; else None.
    """
    name, etag = ref.object.encode(), ref.etag.encode()
    drawn = b"" if sample is None else struct.pack("<q", sample)
    numbers = struct.pack("<4q", len(name), len(etag), ref.start, ref.stop)
    key = hashlib.blake2b(digest_size=KEY_NBYTES, person=b"upriver.row/1")
    key.update(b"".join((numbers, name, etag, drawn)))
    return key.digest()


def row_keys(refs: Sequence[SampleRef], samples: Sequence[int], *, drawn: bool) -> list[bytes]:
    """Return the keys of several samples' rows.

    Args:
        drawn: Whether the stretch has a view.
    """
    return [row_key(ref, sample if drawn else None) for ref, sample in zip(refs, samples, strict=True)]
