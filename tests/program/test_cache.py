"""Where small files that outlast a process lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from upriver.program import cache


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user id without an entry in the password file, and no variable that names a folder."""

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "UPRIVER_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)


@pytest.mark.usefixtures("no_home")
def test_cache_folder_without_a_home_is_one_where_nothing_can_lie() -> None:
    kept = cache.cache_folder() / "proofs" / "a.json"
    with pytest.raises(OSError, match=os.devnull):
        cache.write_whole(kept, "{}")
    with pytest.raises(OSError, match=os.devnull):
        kept.read_text()


@pytest.mark.usefixtures("no_home")
@pytest.mark.parametrize(
    ("name", "folder"), [("UPRIVER_CACHE", ""), ("XDG_CACHE_HOME", "upriver"), ("HOME", ".cache/upriver")]
)
def test_cache_folder_with_a_variable_is_the_folder_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, folder: str
) -> None:
    monkeypatch.setenv(name, str(tmp_path))
    assert cache.cache_folder() == tmp_path / folder
