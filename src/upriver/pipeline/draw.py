"""Draw random numbers per sample that do not depend on place, time or order."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from upriver.errors import ConfigError

Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]

_PERSON = b"upriver.draw/1"  # a changed way to draw would need a new name: old runs stay replayable

_BLOCK = 2**14  # even count of numbers at once, whose intermediate values fit in a cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Random numbers of one stage for one sample in one epoch.

    The generator is counter-based (Philox-4x64-10; Salmon et al., SC 2011), keyed by a hash of the four
    numbers. Only its raw words are used: NumPy promises that they never change, and makes no such promise for
    its distributions. The numbers are computed from the words by arithmetic alone, which rounds the same way
    on every machine; logarithms and cosines of libraries do not.

    Attributes:
        sample: Row in the dataset's index.
        stage: The stage's index in the chain, counted from 0 at the stored bytes, so that cuts do not matter.
    """

    seed: int
    epoch: int
    sample: int
    stage: int

    def uniforms(self, count: int) -> tuple[float, ...]:
        """Return the first ``count`` numbers, uniform in [0, 1) with 53 bits; every call returns the same.

        Raises:
            ConfigError: If seed, epoch, sample or stage does not fit 64 signed bits.
        """
        return tuple(_uniforms(self._generator(), count).tolist())

    def normals(self, count: int, *, after: int = 0) -> Numbers:
        """Return normally distributed numbers of mean 0 and deviation 1; every call returns the same.

        The method is that of Box and Muller (1958): each two words give two numbers. The first ``count``
        numbers are returned.

        Args:
            after: Number of words to skip, as many as uniform numbers were drawn.

        Returns:
            float64 of shape (count,).
        """
        generator = self._generator()
        generator.random_raw(after, output=False)
        out = np.empty(count)
        for start in range(0, count, _BLOCK):
            part = out[start : start + _BLOCK]
            uniforms = _uniforms(generator, len(part) + len(part) % 2)
            radius = np.sqrt(-2.0 * _log(1.0 - uniforms[0::2]))
            cosine, sine = _circle(uniforms[1::2])
            part[0::2] = radius * cosine
            part[1::2] = (radius * sine)[: len(part) // 2]
        return out

    def _generator(self) -> np.random.Philox:
        return np.random.Philox(key=np.frombuffer(self._key(), dtype="<u8").astype(np.uint64))

    def key(self) -> int:
        """Return a number of 128 bits that stands for all four."""
        return int.from_bytes(self._key(), "little")

    def _key(self) -> bytes:
        try:
            numbers = struct.pack("<4q", self.seed, self.epoch, self.sample, self.stage)
        except struct.error:
            raise ConfigError(f"seed, epoch, sample and stage must fit 64 signed bits, got {self}") from None
        return hashlib.blake2b(numbers, digest_size=16, person=_PERSON).digest()


def _uniforms(generator: np.random.Philox, count: int) -> Numbers:
    words = np.asarray(generator.random_raw(count), dtype=np.uint64)
    found: Numbers = (words >> np.uint64(11)).astype(np.float64)
    found *= 2.0**-53
    return found


def _log(values: Numbers) -> Numbers:
    """Return natural logarithms of numbers in (0, 1], to about 1e-16.

    The logarithm of ``m 2^e`` is ``e log 2 + 2 artanh((m - 1) / (m + 1))``, with m within a factor of sqrt(2)
    around 1. Each term of the series is then at most 0.03 times the previous one.
    """
    mantissa, exponent = np.frexp(values)
    small = mantissa < math.sqrt(0.5)
    mantissa, exponent = np.where(small, 2.0 * mantissa, mantissa), exponent - small
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    return exponent * math.log(2.0) + 2.0 * ratio * _polynomial(ratio * ratio, _ARTANH)


def _circle(turns: Numbers) -> tuple[Numbers, Numbers]:
    """Return cosines and sines of shares of a full turn in [0, 1), to about 1e-16.

    The nearest quarter turn is subtracted, which is exact, and restored by swapping the two and their signs.
    """
    quarters = np.floor(4.0 * turns + 0.5)
    angle = 2.0 * math.pi * (turns - 0.25 * quarters)
    square = angle * angle
    cosine, sine = _polynomial(square, _COSINE), angle * _polynomial(square, _SINE)
    quarter = quarters.astype(np.int64) % 4
    swapped = quarter % 2 == 1
    cosine, sine = np.where(swapped, sine, cosine), np.where(swapped, cosine, sine)
    return (
        np.where((quarter == 1) | (quarter == 2), -cosine, cosine),
        np.where(quarter >= 2, -sine, sine),
    )


def _polynomial(values: Numbers, coefficients: Sequence[float]) -> Numbers:
    """Evaluate a polynomial by Horner's rule, from the highest power down."""
    out = np.full_like(values, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        out *= values
        out += coefficient
    return out


_ARTANH = [1.0 / (2 * k + 1) for k in range(12)]
_COSINE = [(-1) ** k / math.factorial(2 * k) for k in range(10)]
_SINE = [(-1) ** k / math.factorial(2 * k + 1) for k in range(10)]
