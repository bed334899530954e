"""Describe a server's state at one moment as plain data, for the page at ``/ui`` and for autoscaling.

No field names a sample, an object or a token. A program appears by the first digits of its digest.
"""

from __future__ import annotations

from typing import Literal

import msgspec

SHORT_DIGEST = 12
"""Digits of a digest that are shown: enough to tell a few hundred programs apart by eye."""


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    pass


class TenantRow(_Row, frozen=True, kw_only=True):
    """State of one tenant.

    Attributes:
        weight: Share of the workers relative to other tenants.
        admitted: Admitted requests, which may compute now.
        waiting: Requests that wait for admission.
        reserved_bytes: Memory reserved for the admitted requests.
        micro_batches: Micro-batches answered since the server started.
        max_requests: Most requests of the tenant, admitted or waiting.
        max_waiting_bytes: Most bytes that its waiting requests may ask for together.
        memory_share: Most of the budget that its admitted requests may hold.
        program_bytes: Most bytes of its programs that are kept loaded.
        stored_bytes: Most bytes of programs, weights and kept features that it may have in a store.
    """

    name: str
    weight: float = 1.0
    admitted: int = 0
    waiting: int = 0
    reserved_bytes: int = 0
    micro_batches: int = 0
    max_requests: int = 0
    max_waiting_bytes: int = 0
    memory_share: float = 1.0
    program_bytes: int = 0
    stored_bytes: int = 0


class WorkerRow(_Row, frozen=True, kw_only=True):
    """State of one worker process.

    Attributes:
        pid: Process id; 0 while the process does not exist yet.
        program: First digits of the program that the worker runs; empty if it runs none.
        seconds: Seconds since the worker entered this state.
        restarts: Number of earlier processes of this worker.
    """

    pid: int
    state: Literal["idle", "busy", "starting"]
    program: str = ""
    seconds: float = 0.0
    restarts: int = 0


class ProgramRow(_Row, frozen=True, kw_only=True):
    """State of one program that is kept loaded.

    Attributes:
        digest: First digits of the program's digest.
        nbytes: Memory of the program, counted once for all its users.
        users: Requests that use the program now.
    """

    tenant: str
    digest: str
    nbytes: int
    users: int = 0


class ErrorRow(_Row, frozen=True, kw_only=True):
    """Count of one kind of error sent to clients.

    Attributes:
        recent: Errors in the last minute.
        total: Errors since the server started.
    """

    code: str
    recent: int
    total: int


class Snapshot(_Row, frozen=True, kw_only=True):
    """State of a server at one moment.

    Attributes:
        budget_bytes: Memory that requests may hold together.
        reserved_bytes: Reserved part of the budget.
        used_bytes: Memory of the machine that workers use, each page counted once.
        queue_requests: Requests that wait for admission.
        queue_bytes: Memory that these requests ask for together.
        utilisation: Share of the load window (the last seconds) in which the workers were busy.
        k: Load factor: the present time of a stage relative to its best time.
        machine: Share of the last seconds in which any process kept the server's cores or accelerators busy.
        expected_wait_s: Seconds that a new micro-batch would wait for a worker.
        draining: Whether the server finishes its last requests and accepts no new ones.
    """

    tenants: tuple[TenantRow, ...] = ()
    workers: tuple[WorkerRow, ...] = ()
    programs: tuple[ProgramRow, ...] = ()
    errors: tuple[ErrorRow, ...] = ()
    budget_bytes: int = 0
    reserved_bytes: int = 0
    used_bytes: int = 0
    queue_requests: int = 0
    queue_bytes: int = 0
    utilisation: float = 0.0
    k: float = 1.0
    machine: float = 0.0
    expected_wait_s: float = 0.0
    uptime_s: float = 0.0
    draining: bool = False


def short(digest: str) -> str:
    """Return the digits of a digest that are shown."""
    return digest[:SHORT_DIGEST]
