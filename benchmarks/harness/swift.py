"""Run a real object store on the storage side of a testbed: OpenStack Swift, with an account per tenant.

``scripts/swift install`` must have installed it. Both sides reach it at one address. Its folder is in use
until the testbed has ended, so the folder comes first::

    with TemporaryDirectory() as data, Testbed(rate=2.5e6) as bed:
        swift = run_swift(bed, Path(data), tenants=("alice", "bob"), buckets=("alice:photos",))
        store = Store.open("s3://photos", options=swift.options("alice"))
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.children import ROOT
from benchmarks.harness.hosts import Cores, Side, last_lines
from benchmarks.harness.netns import TestbedError
from benchmarks.harness.testbed import READY_TIMEOUT_S, Service, Testbed

SCRIPT = ROOT / "scripts" / "swift"
USER = "benchmark"
REGION = "us-east-1"


@dataclass(frozen=True, kw_only=True)
class SwiftService:
    """A running Swift.

    Attributes:
        service: Its process and address.
        keys: The secret of each account.
    """

    service: Service
    keys: Mapping[str, str]

    def options(self, account: str) -> dict[str, str]:
        """Return the options that open an account's bucket from either side."""
        return {
            "endpoint": self.service.url,
            "region": REGION,
            "access_key_id": f"{account}:{USER}",
            "secret_access_key": self.keys[account],
        }


def run_swift(
    bed: Testbed,
    data: Path,
    *,
    tenants: Sequence[str],
    buckets: Sequence[str],
    workers: int = 1,
    side: Side = "storage",
    core: Cores = None,
    timeout_s: float = READY_TIMEOUT_S,
) -> SwiftService:
    """Start a Swift. Wait until the other side reaches it and its buckets exist.

    Args:
        bed: The testbed. Swift ends with it.
        data: Folder of the objects, on a file system with user attributes; must outlast the testbed.
        tenants: Accounts, with a user and a fresh key each.
        buckets: ``ACCOUNT:BUCKET``.
        workers: Processes of the proxy and of the object server.
        side: Side of the testbed that Swift runs on.
        core: As for `Testbed.popen`.
        timeout_s: Most seconds of the start.

    Raises:
        TestbedError: If Swift does not start. The text holds its output.
    """
    keys = {tenant: secrets.token_hex(16) for tenant in tenants}
    where = [os.environ["UPRIVER_SWIFT"]] if os.environ.get("UPRIVER_SWIFT") else []
    command: list[object] = [
        *(sys.executable, SCRIPT, "start", *where, f"--data={data}", f"--workers={workers}", "--json"),
        *(f"--user={tenant}:{USER}={key}" for tenant, key in keys.items()),
        *(f"--bucket={bucket}" for bucket in buckets),
    ]
    service = bed._serve(side, command, "/healthcheck", core=core, env=None, timeout_s=timeout_s)
    _wait_until_announced(service, timeout_s)
    return SwiftService(service=service, keys=keys)


def _wait_until_announced(service: Service, timeout_s: float) -> dict[str, Any]:
    """Wait for the line that Swift prints after its buckets are made. It answers requests before that."""
    deadline = time.monotonic() + timeout_s
    while True:
        lines = [line for line in service.said().splitlines() if line.startswith("{")]
        if lines:
            found: dict[str, Any] = json.loads(lines[0])
            return found
        if service.process.poll() is not None or time.monotonic() > deadline:
            raise TestbedError(f"Swift made no buckets{last_lines(service.said())}")
        time.sleep(0.02)
