"""Draws: pinned for ever, the same everywhere, different wherever anything differs."""

from __future__ import annotations

import hashlib
import struct
from itertools import product

import pytest

from upriver.errors import ConfigError
from upriver.pipeline import Draw

WORD = 2**64


def philox(key: tuple[int, int], counter: int) -> list[int]:
    """One block of Philox-4x64-10 as its paper defines it (Salmon et al., SC 2011, section 3.3)."""
    x = [counter % WORD, counter // WORD, 0, 0]
    low, high = key
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
        x = [b // WORD ^ x[1] ^ low, b % WORD, a // WORD ^ x[3] ^ high, a % WORD]
        low, high = (low + 0x9E3779B97F4A7C15) % WORD, (high + 0xBB67AE8584CAA73B) % WORD
    return x


@pytest.mark.parametrize("numbers", [(0, 0, 0, 0), (7, 1, 123456, 2), (-1, 2**62, 5, 3)])
def test_draws_are_philox_keyed_by_a_hash(numbers: tuple[int, int, int, int]) -> None:
    digest = hashlib.blake2b(struct.pack("<4q", *numbers), digest_size=16, person=b"upriver.draw/1").digest()
    key = struct.unpack("<2Q", digest)
    words = [word for counter in (1, 2, 3) for word in philox(key, counter)]
    seed, epoch, sample, stage = numbers
    got = Draw(seed=seed, epoch=epoch, sample=sample, stage=stage).uniforms(12)
    assert got == tuple((word >> 11) / 2**53 for word in words)


def test_draws_are_pinned() -> None:
    """A run of today can be replayed by any later version."""
    pinned = (0.028837933718114717, 0.0774247615035969, 0.6322281822539707)
    assert Draw(seed=1, epoch=2, sample=3, stage=4).uniforms(3) == pinned


def test_fewer_draws_are_the_first_of_more() -> None:
    draw = Draw(seed=1, epoch=2, sample=3, stage=4)
    assert draw.uniforms(40)[:5] == draw.uniforms(5)
    assert draw.uniforms(0) == ()


def test_any_difference_gives_other_draws() -> None:
    seen = {
        Draw(seed=a, epoch=b, sample=c, stage=d).uniforms(2) for a, b, c, d in product(range(5), repeat=4)
    }
    assert len(seen) == 5**4


def test_draws_are_uniform() -> None:
    values = [Draw(seed=0, epoch=0, sample=sample, stage=0).uniforms(1)[0] for sample in range(4000)]
    assert all(0 <= value < 1 for value in values)
    counts = [sum(low / 10 <= value < (low + 1) / 10 for value in values) for low in range(10)]
    assert sum((count - 400) ** 2 / 400 for count in counts) < 27.9  # chi-square, 9 degrees, p = 0.001


def test_numbers_past_64_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"64 signed bits.*seed=9223372036854775808"):
        Draw(seed=2**63, epoch=0, sample=0, stage=0).uniforms(1)
