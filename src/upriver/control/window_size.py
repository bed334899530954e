"""Derive the prefetch window from the plan: how many micro-batches and bytes may be in flight.

A small window leaves a resource idle while another one works. A large one only holds memory and delays a
change of plan, since micro-batches in flight keep their routes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from upriver.control.delivery_table import PrefetchWindow
from upriver.cost import CutTable
from upriver.text import bytes_text
from upriver.types import Plan, Tier

BATCHES = 2
"""Training batches in a window: one is being trained on while the next is assembled."""

LEAST = 8
"""Fewest micro-batches in a window: with a mix of routes a window of 8 came to 1.03 times the bound."""

AHEAD = 2
"""Micro-batches for each fetching thread and each route: one is under way while another one waits."""

SMALLEST_SHARE = 1 / 16
"""Share of the samples below which a route does not enlarge the window: it has little to keep busy."""


def window_for(
    plan: Plan,
    *,
    start: int,
    batch_size: int,
    micro_batch: int,
    connections: int,
    num_workers: int,
    crossing_bytes: Callable[[int], float],
    num_bytes: int,
    together: int = 1,
) -> PrefetchWindow:
    """Return the window of a plan.

    Args:
        plan: Its routes are dealt by their shares, so a window holds some of each.
        start: Position of the stored bytes: a route that cuts there is fetched locally, others by servers.
        batch_size: Samples of a training step.
        connections: Requests in flight at once.
        num_workers: Local threads that fetch.
        crossing_bytes: Returns the bytes in memory of a sample that arrives at a cut.
        num_bytes: The caller's limit; reduced if the plan leaves less memory on the compute tier.
        together: Most micro-batches that a server may run at once; a request must hold as many.
    """
    two_batches = math.ceil(BATCHES * batch_size / micro_batch)
    ways = {route.cut <= start for route in plan.routes}
    threads = sum(num_workers if local else connections for local in ways)
    scarcest = max(math.ceil(AHEAD / max(route.share, SMALLEST_SHARE)) for route in plan.routes)
    joined = together * (connections + 1) if False in ways else 0
    wanted = max(two_batches, LEAST, AHEAD * threads, scarcest, joined)
    allowed = max(1, int(min(num_bytes, spare_bytes(plan))))
    each = micro_batch * sum(route.share * crossing_bytes(route.cut) for route in plan.routes)
    fitting = math.floor(allowed / each) if each > 0 else wanted
    return PrefetchWindow(micro_batches=max(1, min(wanted, fitting)), num_bytes=allowed)


def spare_bytes(plan: Plan) -> float:
    """Return the memory that the plan leaves free on the compute tier; infinite if no memory is known."""
    if not isinstance(plan.table, CutTable):
        return math.inf
    model = plan.table.model
    needs = model.needs[Tier.COMPUTE]
    needed = max(float(needs[model.index(route.cut)]) for route in plan.routes)
    return model.cluster.compute.memory_bytes - needed


def told(window: PrefetchWindow) -> str:
    """Return a window in words."""
    return f"up to {window.micro_batches} micro-batches in flight, at most {bytes_text(window.num_bytes)}"
