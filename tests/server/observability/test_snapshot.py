"""Test the snapshot of a server's state as plain data."""

from __future__ import annotations

import msgspec
import pytest

from upriver.server.observability.snapshot import (
    SHORT_DIGEST,
    ErrorRow,
    ProgramRow,
    Snapshot,
    TenantRow,
    WorkerRow,
    short,
)

FULL = Snapshot(
    tenants=(
        TenantRow(
            name="anna",
            weight=2.0,
            admitted=3,
            waiting=4,
            reserved_bytes=5,
            micro_batches=6,
            max_requests=7,
            max_waiting_bytes=8,
            memory_share=0.5,
            program_bytes=9,
            stored_bytes=10,
        ),
        TenantRow(name="ben"),
    ),
    workers=(
        WorkerRow(pid=17, state="busy", program="0123456789ab", seconds=1.5, restarts=2),
        WorkerRow(pid=0, state="starting"),
    ),
    programs=(ProgramRow(tenant="anna", digest="0123456789ab", nbytes=1 << 20, users=1),),
    errors=(ErrorRow(code="overloaded", recent=1, total=9),),
    budget_bytes=1000,
    reserved_bytes=700,
    used_bytes=300,
    queue_requests=4,
    queue_bytes=12345,
    utilisation=0.75,
    k=1.25,
    machine=0.9,
    expected_wait_s=0.4,
    uptime_s=90061.0,
    draining=True,
)


def test_it_travels_as_json_and_comes_back_the_same() -> None:
    assert msgspec.json.decode(msgspec.json.encode(FULL), type=Snapshot) == FULL


def test_what_scales_replicas_is_in_the_json() -> None:
    said = msgspec.json.decode(msgspec.json.encode(FULL))
    assert (said["queue_bytes"], said["queue_requests"], said["draining"]) == (12345, 4, True)
    assert said["tenants"][0] == {
        "name": "anna",
        "weight": 2.0,
        "admitted": 3,
        "waiting": 4,
        "reserved_bytes": 5,
        "micro_batches": 6,
        "max_requests": 7,
        "max_waiting_bytes": 8,
        "memory_share": 0.5,
        "program_bytes": 9,
        "stored_bytes": 10,
    }


def test_it_does_not_change_while_somebody_reads_it() -> None:
    with pytest.raises(AttributeError):
        FULL.queue_bytes = 0  # type: ignore[misc]


def test_a_state_that_there_is_not_is_no_state() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"pid": 1, "state": "<b>"}', type=WorkerRow)


def test_a_program_is_told_by_its_first_digits() -> None:
    assert short("0123456789abcdef" * 4) == "0123456789ab"
    assert len(short("f" * 64)) == SHORT_DIGEST
