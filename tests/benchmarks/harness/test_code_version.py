"""Test that a version of code outlasts a change of its prose, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.harness import code_version
from benchmarks.harness.code_version import POLICIES, code, essence, policies, version_of

CODE = '''
"""Add."""

LIMIT = 3
"""Most of it."""


def add(one, other):
    """Add two."""
    return one + other
'''


@pytest.mark.parametrize(
    "other",
    [
        CODE.replace("Add two.", "Return a sum."),
        CODE.replace('    """Add two."""\n', ""),
        CODE.replace("Most of it.", "The most."),
        CODE.replace("return", "# plainly\n    return"),
        CODE.replace("one + other", "(one\n        + other)"),
    ],
)
def test_prose_and_layout_do_not_count(other: str) -> None:
    assert other != CODE and essence(other) == essence(CODE)


@pytest.mark.parametrize("other", [CODE.replace("LIMIT = 3", "LIMIT = 4"), CODE.replace("+", "-"), ""])
def test_code_counts(other: str) -> None:
    assert essence(other) != essence(CODE)


def test_what_is_left_out_does_not_count() -> None:
    other = CODE.replace("+", "-")
    assert essence(other, without=["add"]) == essence(CODE, without=["add"]) != essence(CODE)


def test_a_version_follows_the_files_and_their_order(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("a = 1\n")
    other.write_text("b = 1\n")
    first = version_of([one, other])
    assert first != version_of([other, one]) != version_of([other])
    one.write_text("a = 1  # as ever\n")
    assert version_of([one, other]) == first
    one.write_text("a = 2\n")
    os.utime(one, ns=(1, 1))
    assert version_of([one, other]) != first


def test_the_package_has_a_version_without_its_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_version, "PACKAGE", tmp_path)
    monkeypatch.setattr(code_version, "POLICIES", tmp_path / "policies")
    policy, other = tmp_path / "policies" / "greedy.py", tmp_path / "store" / "local.py"
    for path in (policy, other):
        path.parent.mkdir()
        path.write_text("a = 1\n")
    package, choices = code(), policies()
    policy.write_text("a = 22\n")
    os.utime(policy, ns=(1, 1))
    assert code() == package and policies() != choices
    choices = policies()
    other.write_text("a = 22\n")
    os.utime(other, ns=(1, 1))
    assert code() != package and policies() == choices
    assert POLICIES.is_dir()
