"""Run a real object store to test with: the project's own Swift, where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from upriver.store import Store

SCRIPT = Path(__file__).parents[2] / "scripts" / "swift"
VARIABLE = "UPRIVER_SWIFT"
CANNOT_RUN = 3
"""Exit code of the script where this machine lacks something; its message names it."""

KEYS = {"alice": "alices+secret/key", "bob": "bobs-secret-key"}
"""Keys of two tenants, one user each. The key of one has characters that look different in a URL."""

USER = "reader"


@dataclass(frozen=True, kw_only=True)
class Swift:
    """Running Swift.

    Attributes:
        endpoint: Address for S3 clients.
        process: Process of ``scripts/swift``; it ends with its stdin.
        pids: Swift's own processes, by name.
    """

    endpoint: str
    process: subprocess.Popen[str]
    pids: dict[str, int]

    def options(self, account: str, **more: str) -> dict[str, str]:
        """Return the options that open a store of this account."""
        return {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": f"{account}:{USER}",
            "secret_access_key": KEYS[account],
            **more,
        }

    def store(self, account: str, uri: str, **more: str) -> Store:
        """Open a store of this account."""
        return Store.open(uri, name=account, options=self.options(account, **more))


@contextmanager
def running_swift(data: Path, *buckets: str) -> Iterator[Swift]:
    """Run a Swift for both tenants, and remove it afterwards. Skip where none can run.

    Args:
        data: Folder of its objects and logs.
        buckets: ``ACCOUNT:BUCKET``, made at the start.
    """
    errors = data / "errors"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            _command(data, buckets), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            said = errors.read_text().strip()
            if process.wait() == CANNOT_RUN:
                pytest.skip(said)
            pytest.fail(f"scripts/swift ended with {process.returncode}: {said}")
        found = json.loads(line)
        yield Swift(endpoint=found["endpoint"], process=process, pids=found["pids"])
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def _command(data: Path, buckets: Sequence[str]) -> list[str]:
    users = [f"--user={account}:{USER}={key}" for account, key in KEYS.items()]
    where = [os.environ[VARIABLE]] if os.environ.get(VARIABLE) else []
    made = [f"--bucket={bucket}" for bucket in buckets]
    return [sys.executable, str(SCRIPT), "start", *where, f"--data={data / 'swift'}", *users, *made, "--json"]
