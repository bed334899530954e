"""Per-sample randomness that does not depend on where, when or in which order it is drawn."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np

from upriver.errors import ConfigError

_PERSON = b"upriver.draw/1"  # another way to draw would take another name: old runs stay replayable


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """The random numbers of one stage for one sample in one epoch.

    A counter-based generator (Philox-4x64-10; Salmon et al., SC 2011) keyed by a hash of the four numbers.
    Only its raw words are used: NumPy promises those never change, and makes no such promise for its
    distributions.

    Attributes:
        seed: The job's seed.
        epoch: Counted by the job.
        sample: The row in the dataset's index.
        stage: The stage's place in the chain, counted from 0 at the stored bytes, so that cuts do not matter.
    """

    seed: int
    epoch: int
    sample: int
    stage: int

    def uniforms(self, count: int) -> tuple[float, ...]:
        """The first ``count`` numbers, uniform in [0, 1) with 53 bits; the same ones at every call.

        Raises:
            ConfigError: If seed, epoch, sample or stage does not fit 64 signed bits.
        """
        generator = np.random.Philox(key=np.frombuffer(self._key(), dtype="<u8").astype(np.uint64))
        return tuple((int(word) >> 11) * 2.0**-53 for word in generator.random_raw(count))

    def _key(self) -> bytes:
        try:
            numbers = struct.pack("<4q", self.seed, self.epoch, self.sample, self.stage)
        except struct.error:
            raise ConfigError(f"seed, epoch, sample and stage must fit 64 signed bits, got {self}") from None
        return hashlib.blake2b(numbers, digest_size=16, person=_PERSON).digest()
