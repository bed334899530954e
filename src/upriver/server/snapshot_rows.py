"""Make the rows of a server's `Snapshot`: one a tenant, one a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from upriver.server.device_group import DeviceGroup
from upriver.server.observability.snapshot import ProgramRow, TenantRow, short
from upriver.server.programs.cache import ProgramCache
from upriver.server.tenants import Tenant


def tenant_rows(
    tenants: Iterable[Tenant], *, units: Sequence[DeviceGroup], done: Mapping[str, int]
) -> tuple[TenantRow, ...]:
    """Return the state of each tenant at this moment.

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
        )
        for tenant in tenants
    )


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
