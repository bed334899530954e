"""Make the rows of a server's `Snapshot`: one a tenant, one a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from upriver.server.config import ServerConfig
from upriver.server.device_group import DeviceGroup
from upriver.server.observability.snapshot import ProgramRow, TenantRow, short
from upriver.server.programs.cache import ProgramCache
from upriver.server.tenants import ANYONE


def tenant_rows(
    config: ServerConfig, *, units: Sequence[DeviceGroup], done: Mapping[str, int]
) -> tuple[TenantRow, ...]:
    """Return the state of each tenant at this moment. The server's limit applies where a tenant has none.

    Args:
        done: Micro-batches answered so far, by tenant.
    """
    return tuple(
        TenantRow(
            name=tenant.name,
            weight=tenant.weight,
            admitted=sum(unit.line.queue.admitted_of(tenant.name) for unit in units),
            waiting=sum(unit.line.queue.waiting_of(tenant.name) for unit in units),
            reserved_bytes=sum(unit.budget.held_by(tenant.name) for unit in units),
            micro_batches=done.get(tenant.name, 0),
            max_requests=_lower(tenant.max_requests, config.max_requests),
            max_waiting_bytes=_lower(tenant.max_waiting_bytes, config.max_waiting_bytes),
            memory_share=tenant.memory_share,
            program_bytes=_lower(tenant.program_bytes, config.program_budget_bytes),
            stored_bytes=config.stored_bytes if tenant.stored_bytes is None else tenant.stored_bytes,
        )
        for tenant in list(config.everyone()) or [ANYONE]
    )


def _lower(own: int | None, everyone: int) -> int:
    """Return the limit that binds a tenant: its own, or the server's for all tenants together."""
    return everyone if own is None else min(own, everyone)


def program_rows(program_cache: ProgramCache) -> tuple[ProgramRow, ...]:
    """Return the state of each cached program at this moment."""
    return tuple(
        ProgramRow(
            tenant=kept.owner,
            digest=short(kept.key.rpartition("/")[2]),
            nbytes=kept.nbytes,
            users=kept.users,
        )
        for kept in program_cache
    )
