"""Make the rings of a Swift with one device; run by Swift's own interpreter.

Usage: rings.py FOLDER account=PORT container=PORT object=PORT
"""

from __future__ import annotations

import sys
from pathlib import Path

from swift.cli.ringbuilder import main as ring_builder
from swift.common import utils

PART_POWER, REPLICAS, MIN_PART_HOURS = "6", "1", "0"
"""64 partitions, for one device that is never rebalanced."""


def main() -> None:
    """Make one ring for each argument."""
    folder = Path(sys.argv[1])
    utils.set_swift_dir(str(folder))  # otherwise swift.conf is expected in /etc/swift
    for argument in sys.argv[2:]:
        name, _, port = argument.partition("=")
        make(folder, name, port)


def make(folder: Path, name: str, port: str) -> None:
    """Make a ring in which every partition is on the one device."""
    builder, ring = folder / f"{name}.builder", folder / f"{name}.ring.gz"
    for old in (builder, ring):
        old.unlink(missing_ok=True)
    _build(builder, "create", PART_POWER, REPLICAS, MIN_PART_HOURS)
    _build(builder, "add", f"r1z1-127.0.0.1:{port}/d1", "1")
    _build(builder, "rebalance")
    if not ring.is_file():
        sys.exit(f"{ring} was not written")


def _build(builder: Path, *command: str) -> None:
    """Run a command of ``swift-ring-builder``, which ends by exiting: 0, or 1 with a warning."""
    try:
        ring_builder(["swift-ring-builder", str(builder), *command])
    except SystemExit as end:
        if end.code not in (None, 0, 1):
            raise


if __name__ == "__main__":
    main()
