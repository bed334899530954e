"""Which route each micro-batch of an epoch takes: dealt by counters, so shares hold at every prefix."""

from __future__ import annotations

from collections.abc import Sequence

from upriver.finetune.prefetch.delivery_table import Dealt, Way
from upriver.types import Route


def deal(routes: Sequence[Route], num_micro_batches: int, *, start: int) -> tuple[Dealt, ...]:
    """The route of each micro-batch of an epoch.

    Each goes to the route that is furthest behind its share, the earlier route of equals. With two routes a
    prefix of any length is within one micro-batch of the shares; with more it is within as many as there are
    other routes.

    Args:
        routes: With shares that sum to 1.
        num_micro_batches: Of the epoch.
        start: Position of the stored bytes: a route that cuts there, or below it, reads them here.
    """
    kinds = [_dealt(route.cut, start) for route in routes]
    given = [0] * len(routes)
    hands: list[Dealt] = []
    for count in range(1, num_micro_batches + 1):
        behind = [route.share * count - done for route, done in zip(routes, given, strict=True)]
        at = max(range(len(routes)), key=behind.__getitem__)
        given[at] += 1
        hands.append(kinds[at])
    return tuple(hands)


def _dealt(cut: int, start: int) -> Dealt:
    return Dealt(way=Way.LOCAL, cut=start) if cut <= start else Dealt(way=Way.REMOTE, cut=cut)
