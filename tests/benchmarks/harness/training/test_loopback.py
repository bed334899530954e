"""Test both hosts on the loopback device, which needs no rights."""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path

import pytest

from benchmarks.harness import testbed
from benchmarks.harness.training.loopback import Loopback


def test_processes_of_both_sides_reach_each_other_without_namespaces(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1")
    with Loopback() as bed:
        objects = bed.run_objects(tmp_path)
        with urllib.request.urlopen(f"{objects.url}/store/one", timeout=10) as answer:
            assert answer.read() == b"1"
        done = bed.run("compute", [sys.executable, "-c", "print('there')"], timeout_s=60)
        assert done.stdout == "there\n"
        assert bed.namespaces == []
        assert bed.check() == bed.bytes_carried() == testbed.Rates(from_storage=0.0, from_compute=0.0)
    assert objects.process.returncode is not None


def test_a_rate_is_refused() -> None:
    with pytest.raises(testbed.TestbedError, match="no rate to set"):
        Loopback(1e6)
    with Loopback() as bed:
        bed.set_rate(None)
        with pytest.raises(testbed.TestbedError, match="no rate to set"):
            bed.set_rate(1e6)
