"""Tell versions of the package by its bytes in ``make test``: its syntax trees take 4 s in each process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness import code_version
from benchmarks.harness.code_version import PACKAGE


@pytest.fixture(scope="module", autouse=True)
def versions_by_bytes(pytestconfig: pytest.Config) -> Iterator[None]:
    essence_of = code_version._essence_of

    def quickly(path: Path, changed_ns: int) -> str:
        return path.read_text() if path.is_relative_to(PACKAGE) else essence_of(path, changed_ns)

    with pytest.MonkeyPatch.context() as patch:
        if pytestconfig.getoption("fork"):
            patch.setattr(code_version, "_essence_of", quickly)
        yield
