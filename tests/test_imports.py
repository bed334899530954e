"""Check that imports leave the garbage collector as they found it, and event loops alone."""

from __future__ import annotations

import asyncio
import gc
import importlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.examples import some
from upriver.imports import imported, uncollected


@pytest.fixture
def as_it_was() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", some(1, [True, False]))
def test_nothing_is_collected_within_and_what_came_in_is_left_alone(
    enabled: bool, fails: bool, as_it_was: None
) -> None:
    frozen = gc.get_freeze_count()
    if not enabled:
        gc.disable()
    with suppress(ImportError), uncollected():
        assert not gc.isenabled()
        if fails:
            raise ImportError("no such module")
    assert gc.isenabled() == enabled
    assert gc.get_freeze_count() > frozen


def test_a_module_is_imported_once_and_outside_the_event_loops_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_late.py").write_text("import threading\nTHREAD = threading.get_ident()\n")
    monkeypatch.syspath_prepend(tmp_path)

    async def twice() -> list[Any]:
        return await asyncio.gather(*(imported("imported_late") for _ in range(2)))

    one, other = asyncio.run(twice())
    assert one is other and threading.get_ident() != one.THREAD


def test_callers_of_one_import_leave_the_default_threads_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate = threading.Event(), threading.Event()
    monkeypatch.setattr(sys, "imported_slowly", (begun, gate), raising=False)
    (tmp_path / "imported_slowly.py").write_text(
        "import sys\nbegun, gate = sys.imported_slowly\nbegun.set()\nassert gate.wait(60)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    async def many() -> list[Any]:
        waiting = [asyncio.create_task(imported("imported_slowly")) for _ in range(200)]
        try:
            assert await asyncio.to_thread(begun.wait, 60)  # every default thread is free for this
            assert await asyncio.gather(*(asyncio.to_thread(int, "7") for _ in range(50))) == [7] * 50
            assert not any(task.done() for task in waiting)
            waiting.pop().cancel()  # the import goes on for the others
            await asyncio.sleep(0)
        finally:
            gate.set()
        return await asyncio.gather(*waiting)

    modules = asyncio.run(many())
    assert set(modules) == {sys.modules["imported_slowly"]}


def test_an_import_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="written_late"):
        asyncio.run(imported("written_late"))
    (tmp_path / "written_late.py").write_text("")
    importlib.invalidate_caches()
    assert asyncio.run(imported("written_late")).__name__ == "written_late"


LAZY = ("upriver", "upriver.coldstart", "upriver.pipeline", "upriver.profile", "upriver.server")
"""Packages whose names are resolved late."""


@pytest.mark.parametrize("package", LAZY)
def test_a_star_import_gives_all_names_that_dir_shows(package: str) -> None:
    names: dict[str, Any] = {}
    exec(f"from {package} import *", names)
    module = importlib.import_module(package)
    assert dir(module) == sorted(module.__all__)
    assert set(module.__all__) == names.keys() - {"__builtins__"}
    assert all(getattr(module, name) is names[name] for name in module.__all__)


@pytest.mark.parametrize("package", LAZY)
def test_a_name_that_a_package_lacks_is_an_attribute_error(package: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = importlib.import_module(package).nothing
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec(f"from {package} import nothing", {})


def test_packages_whose_names_are_resolved_late_import_none_of_them() -> None:
    code = (
        "import importlib, sys\n"
        f"packages = [importlib.import_module(name) for name in {LAZY}]\n"
        "modules = set(sys.modules)\n"
        "shown = [*map(dir, packages)]\n"
        "print(sorted(modules & {'torch', 'numpy', 'asyncio'}), set(sys.modules) == modules)\n"
        "assert callable(packages[0].coldstart.grouping.best)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[] True\n", done.stderr
