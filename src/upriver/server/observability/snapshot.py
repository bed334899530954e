"""What a server does at one moment, as plain data: for the page at ``/ui``, and for whoever scales replicas.

Nothing here names a sample, an object or a token; a program is told by the first digits of its digest.
"""

from __future__ import annotations

from typing import Literal

import msgspec

SHORT_DIGEST = 12
"""Digits of a digest that are shown: enough to tell a few hundred programs apart by eye."""


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    pass


class TenantRow(_Row, frozen=True, kw_only=True):
    """One tenant.

    Attributes:
        weight: Its share of the workers relative to others.
        admitted: Its requests that may compute now.
        waiting: Its requests that wait to be admitted.
        reserved_bytes: Memory set aside for those admitted.
        micro_batches: Answered since the server started.
    """

    name: str
    weight: float = 1.0
    admitted: int = 0
    waiting: int = 0
    reserved_bytes: int = 0
    micro_batches: int = 0


class WorkerRow(_Row, frozen=True, kw_only=True):
    """One compute process.

    Attributes:
        pid: 0 while there is none yet.
        program: First digits of the program it works with; empty where it works with none.
        seconds: How long it has been at that.
        restarts: How many were started in its place before.
    """

    pid: int
    state: Literal["idle", "busy", "starting"]
    program: str = ""
    seconds: float = 0.0
    restarts: int = 0


class ProgramRow(_Row, frozen=True, kw_only=True):
    """One program that is kept loaded.

    Attributes:
        tenant: Whose it is.
        digest: Its first digits.
        nbytes: Memory it takes, once for all who use it.
        users: Requests that use it now.
    """

    tenant: str
    digest: str
    nbytes: int
    users: int = 0


class ErrorRow(_Row, frozen=True, kw_only=True):
    """One kind of error told to clients.

    Attributes:
        code: As in the answer.
        recent: In the last minute.
        total: Since the server started.
    """

    code: str
    recent: int
    total: int


class Snapshot(_Row, frozen=True, kw_only=True):
    """A server at one moment.

    Attributes:
        budget_bytes: Memory that requests may hold together.
        reserved_bytes: What is set aside of it.
        used_bytes: What workers take of the machine's memory, each page once.
        queue_requests: Requests that wait to be admitted.
        queue_bytes: What those ask for together.
        utilisation: Share of the load window, the last seconds, that the workers were busy.
        k: How many times longer stages take now than at best.
        machine: Share of the last seconds for which everybody kept its cores or accelerators busy.
        expected_wait_s: How long a new micro-batch would wait for a worker.
        draining: Whether the server lets its last requests finish, and takes no new ones.
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
    """The digits of a digest that are shown."""
    return digest[:SHORT_DIGEST]
