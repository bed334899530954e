"""Check sizes of budgets: every form that counts, and that nothing else does."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from upriver.errors import ConfigError
from upriver.features.budget import budget_bytes, free_on_disk


def unasked() -> int:
    raise AssertionError("nobody asked for the free bytes")


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (0, 0),
        ("0", 0),
        (123, 123),
        ("2 GB", 2 * 10**9),
        ("2GB", 2 * 10**9),
        (" 512 MiB ", 512 << 20),
        ("1.5 kB", 1500),
        ("100 B", 100),
        ("3 TiB", 3 << 40),
    ],
)
def test_budget_size_is_read(value: int | str, wanted: int) -> None:
    assert budget_bytes("keep.disk", value, free=unasked) == wanted


@pytest.mark.parametrize("free", [0, 1005, -3])
def test_budget_auto_is_a_tenth_of_what_is_free(free: int) -> None:
    assert budget_bytes("keep.disk", "auto", free=lambda: free) == max(0, free) // 10


@pytest.mark.parametrize(
    "value",
    [-1, 1.5, True, None, "", "2", "2 gb", "GB", "-2 GB", "2 GB GB", "2 Gbit", "much", math.inf, [1], 10**19],
    ids=repr,
)
def test_budget_that_is_no_size_is_refused(value: object) -> None:
    with pytest.raises(
        ConfigError, match=r"^keep.disk must be a whole number of bytes in 0..1\d+, text such"
    ):
        budget_bytes("keep.disk", value, free=unasked)


def test_free_on_disk_of_a_folder_to_come_is_that_of_its_disk(tmp_path: Path) -> None:
    free = free_on_disk(tmp_path / "a" / "b")
    assert abs(free - shutil.disk_usage(tmp_path).free) < 1 << 30
    assert free_on_disk(Path("/dev/null/features")) == 0
