"""Predict what keeping features saves a job, and from which epoch on."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from upriver.cost import CostModel
from upriver.features.keep import Keep
from upriver.pipeline import InputChain
from upriver.policies import kept
from upriver.policies.kept import KeepingTiers, KeepPlan, KeepRoom, KeepTier
from upriver.types import Route

ASSUMED_EPOCHS = 2
"""Horizon of a job that does not say how many epochs it trains: twice the one that it begins."""

TRIED_BYTES = 4 << 20
"""Bytes that are written to see how fast a disk is."""


def keep_plan(
    model: CostModel,
    keep: Keep,
    routes: Sequence[Route],
    *,
    chain: InputChain,
    views: int | None,
    epochs: int | None,
) -> KeepPlan | None:
    """Return the decision about rows at the freeze point that are kept on the compute tier.

    None if rows are new in each epoch, or have no room here.

    Args:
        routes: Routes of an epoch in which nothing is kept.
        views: Number of sets of random draws; None if every epoch draws anew.
        epochs: Number of epochs; None if unknown.
    """
    draws = chain.first_draw is not None
    if (draws and views is None) or not (keep.memory_bytes or keep.disk_bytes):
        return None
    tiers = {KeepTier.MEMORY: KeepRoom(budget_bytes=keep.memory_bytes)}
    if disk_bytes := keep.disk_bytes:
        speed = write_s_per_byte(keep.path)
        if speed is not None:
            tiers[KeepTier.DISK] = KeepRoom(
                budget_bytes=disk_bytes, read_s_per_byte=speed, write_s_per_byte=speed
            )
    positions = {model.profile.freeze: views if draws and views is not None else 1}
    return kept.plan(
        model,
        KeepingTiers(tiers=tiers, positions=positions),
        routes=routes,
        epochs=epochs or ASSUMED_EPOCHS,
        cuts={route.cut for route in routes},
    )


def computing_epochs(
    keep: Keep | None,
    *,
    chain: InputChain,
    views: int | None,
    epochs: int | None,
    num_bytes: float,
) -> int | None:
    """Return the number of epochs in which rows at the freeze point are computed; None if it is unknown.

    After them every row is found on the compute tier, if all have room there.

    Args:
        keep: Room for rows. Servers that keep rows in the store compute them for other jobs, too.
        views: Number of sets of random draws; None if every epoch draws anew.
        epochs: Number of epochs of the job; None if unknown.
        num_bytes: Bytes of the rows of all samples, once.
    """
    sets = 1 if chain.first_draw is None else views
    if keep is None or keep.store or sets is None:
        return epochs
    if sets * num_bytes > keep.memory_bytes + keep.disk_bytes:
        return epochs
    return sets if epochs is None else min(epochs, sets)


def stored_share(
    model: CostModel, routes: Sequence[Route], *, cut: int, stored: float, here: float = 0.0
) -> float:
    """Return the share of an epoch's samples whose rows are worth reading from the store.

    At least as many are read as the routes ask servers for at that cut: a server then reads what it would
    compute.

    Args:
        routes: Routes of the samples that are computed.
        cut: Cut after which servers keep rows.
        stored: Share of the samples whose rows the store has.
        here: Share of the samples whose rows are read on the compute tier.
    """
    asked = (1 - here) * sum(route.share for route in routes if route.cut == cut)
    there = {(cut, KeepTier.STORE): stored, (model.profile.freeze, KeepTier.MEMORY): here}
    tiers = dict.fromkeys((KeepTier.STORE, KeepTier.MEMORY), KeepRoom(budget_bytes=math.inf))
    found = kept.plan(
        model,
        KeepingTiers(tiers=tiers, positions={place: 1 for place, _ in there}, there=there),
        routes=routes,
        epochs=1,
        cuts={route.cut for route in routes},
    )
    read = sum(route.share for route in found.first if route.read == (cut, KeepTier.STORE))
    return min(stored, max(read, asked))


def write_s_per_byte(folder: Path) -> float | None:
    """Return the seconds that a disk takes to write a byte; None if nothing can be written there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            began = time.perf_counter()
            file.write(bytes(TRIED_BYTES))
            file.flush()
            os.fsync(file.fileno())
            return (time.perf_counter() - began) / TRIED_BYTES
    except OSError:
        return None
