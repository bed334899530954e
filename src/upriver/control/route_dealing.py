"""Assign each micro-batch of an epoch to a route, by counters, so that shares hold at every prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from upriver.control.delivery_table import DealtRoute, Way
from upriver.types import Route


def deal(routes: Sequence[Route], num_micro_batches: int, *, start: int) -> tuple[DealtRoute, ...]:
    """Return the route of each micro-batch of an epoch.

    Each micro-batch goes to the route that is furthest behind its share, or the earlier one of equals. With
    two routes a prefix of any length is within one micro-batch of the shares. With more it is within as many
    as there are other routes.

    Args:
        routes: Routes whose shares sum to 1.
        start: Position of the stored bytes; a route that cuts there or below is read locally.
    """
    kinds = [_dealt(route.cut, start) for route in routes]
    given = [0] * len(routes)
    hands: list[DealtRoute] = []
    for count in range(1, num_micro_batches + 1):
        behind = [route.share * count - done for route, done in zip(routes, given, strict=True)]
        at = max(range(len(routes)), key=behind.__getitem__)
        given[at] += 1
        hands.append(kinds[at])
    return tuple(hands)


def besides(routes: Sequence[Route], *, cut: int, share: float) -> tuple[Route, ...]:
    """Return the routes of the other samples if a share of all goes over a cut apart from them.

    Together the shares are those of ``routes``, as far as that share allows.
    """
    left = [
        replace(route, share=max(0.0, route.share - share) if route.cut == cut else route.share)
        for route in routes
    ]
    total = sum(route.share for route in left)
    if total <= 0:
        return tuple(routes)
    return tuple(replace(route, share=route.share / total) for route in left if route.share > 0)


def _dealt(cut: int, start: int) -> DealtRoute:
    return DealtRoute(way=Way.LOCAL, cut=start) if cut <= start else DealtRoute(way=Way.REMOTE, cut=cut)
