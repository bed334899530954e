"""Check that modules are found under the names that they had, with a warning."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from upriver._moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_import_old_name_gives_the_module_and_warns(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = old.rpartition(".")[0]
    if package in MOVED:
        monkeypatch.setitem(sys.modules, package, importlib.import_module(MOVED[package]))
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=MOVED[old].replace(".", r"\.")):
        found = importlib.import_module(old)
    new = importlib.import_module(MOVED[old])
    assert found is new
    assert (new.__name__, new.__spec__ and new.__spec__.name) == (MOVED[old], MOVED[old])


def test_import_of_a_name_that_never_was_fails() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("upriver.client.nothing")


def test_old_names_work_in_a_new_process() -> None:
    script = "from upriver.client.embedded import EmbeddedServer as Found; print(Found.__module__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "upriver.rpc.local_server\n"
