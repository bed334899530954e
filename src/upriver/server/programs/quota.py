"""Bound the bytes that each tenant stores."""

from __future__ import annotations

from upriver.errors import StorageFull
from upriver.server.tenants import ANYONE, Tenant
from upriver.text import bytes_text


def check_stored(
    tenant: Tenant, stored: int, coming: int, more: int, *, default: int, what: str = "this program"
) -> None:
    """Check that a tenant may store more. What adds nothing is always allowed.

    Args:
        stored: Bytes that it has stored.
        coming: Bytes of its other uploads.
        more: Bytes that would be added.
        default: Most bytes of a tenant without a limit of its own.
        what: Words for what would be added, such as "these features".

    Raises:
        StorageFull: If all of that exceeds its limit.
    """
    most = default if tenant.stored_bytes is None else tenant.stored_bytes
    if more and stored + coming + more > most:
        others = f", {bytes_text(coming)} more are on their way" if coming else ""
        take = "take" if what.startswith("these ") else "takes"
        who = f"tenant {tenant.name!r}" if tenant.name != ANYONE.name else "everyone together"
        raise StorageFull(
            f"{who} may store {bytes_text(most)} (stored_bytes) and has stored "
            f"{bytes_text(stored)}{others}; {what} {take} {bytes_text(more)} more: the operator can "
            "remove what is unused (upriver gc), or raise stored_bytes"
        )
