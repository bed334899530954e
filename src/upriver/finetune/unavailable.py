"""What does not answer or has refused, in words: a plan says so, and a job goes on from what answers."""

from __future__ import annotations

import logging

from upriver.rpc.server_pool import Health, ServerPool
from upriver.types import Plan

log = logging.getLogger("upriver")

GONE = (Health.DOWN, Health.OUT)


class Standing:
    """Whether a plan can be carried out now, and if not, why and what is done instead.

    Args:
        pool: The servers; None where no plan asks any.
        start: Position of the stored bytes: routes that cut there need no server.
    """

    def __init__(self, pool: ServerPool | None, *, start: int) -> None:
        self._pool, self._start = pool, start
        self._told = ""

    def lost(self, plan: Plan, store_lost: str = "") -> str:
        """What a plan needs that does not answer; empty when all is well.

        Args:
            store_lost: Why the store is not read from here at the moment, where that is so.
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
        """What servers have had no room for so far; empty when they had for all."""
        return self._pool.refusal_log.remark if self._pool is not None else ""

    def tell(self, plan: Plan, store_lost: str = "") -> None:
        """Log it once when something stops answering, and once when it is back."""
        lost = self.lost(plan, store_lost)
        if lost and not self._told:
            log.warning("the plan cannot be carried out: %s", lost)
        elif self._told and not lost:
            log.info("all answer again: the plan is carried out as it stands")
        self._told = lost
