"""Serialize tests that start Ray: any process on this machine that looks for a cluster finds one."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

WITH_RAY = ("test_ray", "test_ray_workers", "test_serve_ray")

LOCK = Path(tempfile.gettempdir()) / "upriver-tests-with-ray.lock"


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Allow time to wait for the tests of another run."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.stem in WITH_RAY:
            item.add_marker(pytest.mark.timeout(1500))


@pytest.fixture(scope="module", autouse=True)
def nobody_else_has_ray(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lock Ray against other runs of the tests; within one run, a single process has this folder."""
    if request.path.stem not in WITH_RAY:
        yield
        return
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
