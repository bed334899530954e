"""Check that draws never change between versions, are the same everywhere, and differ by every argument."""

from __future__ import annotations

import hashlib
import importlib
import math
import struct
from itertools import product
from typing import Any

import numpy as np
import pytest

from upriver.errors import ConfigError
from upriver.pipeline import Draw
from upriver.pipeline.draw import _circle, _log

WORD = 2**64
PINNED_NORMALS = [0.2138514221980868, 0.1130990951122493, -1.23804772713404, -0.6839758859376097]
PINNED_DIGEST = "0ede0172374b1fc6492e3aac8211c654ad433459e66fc295855ea44f218c2979"  # of 100 001 of them


def philox(key: tuple[int, int], counter: int) -> list[int]:
    """Return one block of Philox-4x64-10 as its paper defines it (Salmon et al., SC 2011, section 3.3)."""
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
    """Any later version can replay a run of today."""
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


def test_normals_are_those_of_box_and_muller() -> None:
    draw = Draw(seed=1, epoch=2, sample=3, stage=4)
    uniforms = np.array(draw.uniforms(200_001))[:200_000]
    radius = np.sqrt(-2 * np.log(1 - uniforms[0::2]))
    angle = 2 * np.pi * uniforms[1::2]
    wanted = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)
    got = draw.normals(200_000)
    assert got.dtype == np.float64
    assert np.allclose(got, wanted, rtol=1e-13, atol=1e-14)


def test_normals_are_pinned() -> None:
    """No library affects their last bit: sums, products and roots are rounded alike everywhere."""
    draw = Draw(seed=1, epoch=2, sample=3, stage=4)
    assert draw.normals(4).tolist() == PINNED_NORMALS
    assert hashlib.sha256(draw.normals(100_001).astype("<f8").tobytes()).hexdigest() == PINNED_DIGEST


@pytest.mark.parametrize("count", [0, 1, 2, 3, 16383, 16384, 16385, 40_001])
def test_fewer_normals_are_the_first_of_more(count: int) -> None:
    draw = Draw(seed=1, epoch=2, sample=3, stage=4)
    got = draw.normals(count)
    assert got.shape == (count,)
    assert np.array_equal(got, draw.normals(50_000)[:count])


def test_words_that_are_used_already_are_left_out() -> None:
    draw = Draw(seed=1, epoch=2, sample=3, stage=4)
    assert np.array_equal(draw.normals(1000, after=2), draw.normals(1002)[2:])
    assert draw.normals(1, after=1)[0] == pytest.approx(
        math.sqrt(-2 * math.log(1 - draw.uniforms(3)[1])) * math.cos(2 * math.pi * draw.uniforms(3)[2])
    )


def test_normals_are_normal() -> None:
    values = Draw(seed=0, epoch=0, sample=0, stage=0).normals(1_000_000)
    assert abs(values.mean()) < 0.004
    assert abs(values.std() - 1) < 0.003
    stats: Any = importlib.import_module("scipy.stats")  # which takes 2 s
    assert stats.kstest(values, "norm").pvalue > 0.001
    pairs = values.reshape(-1, 2)
    assert abs((pairs[:, 0] * pairs[:, 1]).mean()) < 0.006


@pytest.mark.parametrize("value", [2.0**-53, 1e-9, 0.3, 0.5, 0.7, 0.71, 0.99, 1 - 2.0**-53, 1.0])
def test_logarithms_and_circles_are_right_to_the_last_bits(value: float) -> None:
    assert _log(np.array([value]))[0] == pytest.approx(math.log(value), rel=4e-16, abs=0)
    cosine, sine = _circle(np.array([value if value < 1 else 0.0]))
    turn = 2 * math.pi * (value if value < 1 else 0.0)
    assert cosine[0] == pytest.approx(math.cos(turn), abs=6e-16)  # the turn is rounded, too
    assert sine[0] == pytest.approx(math.sin(turn), abs=6e-16)


@pytest.mark.parametrize("eighth", range(8))
def test_corners_of_the_circle(eighth: int) -> None:
    cosine, sine = _circle(np.array([eighth / 8]))
    assert (cosine[0], sine[0]) == pytest.approx(
        (math.cos(eighth * math.pi / 4), math.sin(eighth * math.pi / 4)), abs=3e-16
    )
