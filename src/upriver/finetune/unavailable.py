"""Describe what does not answer or has refused; a plan shows it, and the job continues with what answers."""

from __future__ import annotations

import logging

from upriver.control.server_choice import Health
from upriver.rpc.server_pool import ServerPool
from upriver.types import Plan

log = logging.getLogger("upriver")

GONE = (Health.DOWN, Health.OUT)


class Availability:
    """Track whether a plan can be carried out now; if not, say why and what happens instead.

    Args:
        pool: The servers; None if no plan asks any.
        start: Position of the stored bytes: routes that cut there need no server.
    """

    def __init__(self, pool: ServerPool | None, *, start: int) -> None:
        self._pool, self._start = pool, start
        self._told = ""

    def lost(self, plan: Plan, store_lost: str = "") -> str:
        """Describe what the plan needs and cannot reach; empty if all is well.

        Args:
            store_lost: Why this process cannot read the store at the moment; empty if it can.
        """
        if store_lost:
            return f"the store cannot be read from here now ({store_lost}): servers make that share, too"
        if self._pool is None or all(route.cut <= self._start for route in plan.routes):
            return ""
        servers = self._pool.status()
        if not all(server.health in GONE for server in servers):
            return ""
        reasons = "; ".join(server.reason or server.health for server in servers) or "none is left"
        return f"no server answers now ({reasons}): all runs on the compute tier, straight from the store"

    @property
    def refused(self) -> str:
        """Requests that servers refused for lack of room so far, in words; empty if there were none."""
        return self._pool.refusal_log.remark if self._pool is not None else ""

    def tell(self, plan: Plan, store_lost: str = "") -> None:
        """Log once when something stops answering, and once when it is back."""
        lost = self.lost(plan, store_lost)
        if lost and not self._told:
            log.warning("the plan cannot be carried out: %s", lost)
        elif self._told and not lost:
            log.info("all answer again: the plan is carried out as it stands")
        self._told = lost
