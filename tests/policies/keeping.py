"""Random questions about kept rows, and an independent way to cost an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.planning import cluster, clusters, profiles, stage
from upriver.cost import Array, CostModel, route_at
from upriver.policies import POLICIES
from upriver.policies._kept.costs import SourceCosts, source_costs
from upriver.policies.kept import KeepingTiers, KeepPlan, KeepRoom, KeepTier, plan
from upriver.types import Cluster, InputProfile, Profile, Route, TailProfile, Workload

MEMORY, DISK, STORE = KeepTier


@dataclass(frozen=True, kw_only=True)
class Question:
    profile: Profile
    cluster: Cluster
    workload: Workload
    keeping: KeepingTiers
    epochs: int

    @property
    def model(self) -> CostModel:
        return CostModel(self.profile, self.cluster, self.workload)

    @property
    def routes(self) -> tuple[Route, ...]:
        return POLICIES["upriver"](self.profile, self.cluster, self.workload).routes

    @property
    def costs(self) -> SourceCosts:
        return source_costs(self.model, self.keeping)

    def plan(self, **more: Any) -> KeepPlan:
        return plan(self.model, self.keeping, routes=self.routes, epochs=self.epochs, **more)


_rates = st.sampled_from([0.0, 1e-9, 1e-7, 1e-5])


@st.composite
def questions(draw: st.DrawFn, *, most_places: int = 12) -> Question:
    """Draw a question whose memories hold all cuts, so that every one has a plan."""
    profile, machines = draw(profiles()), draw(clusters())
    machines = replace(
        machines,
        storage=replace(machines.storage, memory_bytes=math.inf),
        compute=replace(machines.compute, memory_bytes=draw(st.sampled_from([math.inf, 1e12]))),
    )
    workload = Workload(batch_size=draw(st.integers(1, 100)), num_samples=draw(st.integers(1, 3000)))
    tiers = draw(st.lists(st.sampled_from(KeepTier), unique=True, max_size=3))
    every = range(profile.unsplit, profile.freeze + 1)
    chosen = draw(st.lists(st.sampled_from(every), unique=True, max_size=max(1, most_places // 3)))
    views = draw(st.integers(1, 3))
    sizes = {position: draw(st.sampled_from([0.0, 500.0, 40_000.0])) for position in chosen[:1]}
    largest = max([1.0, *(profile.cut_bytes(position) for position in chosen)]) * workload.num_samples
    rooms = {
        tier: KeepRoom(
            budget_bytes=draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, 10.0, math.inf])) * largest,
            read_s_per_byte=draw(_rates),
            write_s_per_byte=draw(_rates),
        )
        for tier in tiers
    }
    places = [(position, tier) for position in chosen for tier in tiers]
    known = draw(st.lists(st.sampled_from(places), unique=True, max_size=2)) if places else []
    keeping = KeepingTiers(
        tiers=rooms,
        positions={position: draw(st.sampled_from([1, views])) for position in chosen},
        there={place: draw(st.sampled_from([0.1, 0.5])) for place in known},
        row_bytes=sizes,
    )
    epochs = draw(st.integers(1, 12))
    return Question(profile=profile, cluster=machines, workload=workload, keeping=keeping, epochs=epochs)


@dataclass(frozen=True, kw_only=True)
class FullLife:
    """Both sources of a sample, and whether the first epochs write its rows where the later ones read."""

    first: int
    later: int
    written: bool


def full_lives(question: Question, views: int) -> list[FullLife]:
    """Return every life that the rules allow, by the rules alone."""
    costs, at = question.costs, len(question.costs.cuts)
    known = [at + place for place, share in enumerate(costs.there) if share > 0]
    sources = [*range(at), *known]
    lives = [
        FullLife(first=first, later=later, written=False)
        for first in sources
        for later in sources
        if first < at or later < at or first == later
    ]
    if question.epochs <= views:
        return lives
    for place, (position, tier) in enumerate(costs.places):
        if question.keeping.positions[position] != views:
            continue
        for source in sources:
            arrives = costs.positions[source]
            reaches = source < at and arrives >= position if tier is STORE else arrives <= position
            if reaches:
                lives.append(FullLife(first=source, later=at + place, written=True))
    return lives


@dataclass(frozen=True, kw_only=True)
class FullProgram:
    """Cost and limits of shares of full lives, as matrices with a column for each."""

    first: Array
    later: Array
    limited: Array
    limits: Array


def full_program(question: Question, lives: Sequence[FullLife]) -> FullProgram:
    costs, at = question.costs, len(question.costs.cuts)
    first = costs.busy[:, [life.first for life in lives]].copy()
    later = costs.busy[:, [life.later for life in lives]].copy()
    rows, limits = [], []
    for column, life in enumerate(lives):
        if life.written:
            first[:, column] += costs.write_busy[:, life.later - at]
    for place, share in enumerate(costs.there):
        rows.append([_reads_known(life, at + place) for life in lives])
        limits.append(share)
    for tier in {tier for _, tier in costs.places}:
        held = [_bytes_in(life, tier, costs) * costs.num_samples for life in lives]
        rows.append(held)
        limits.append(question.keeping.tiers[tier].budget_bytes)
    return FullProgram(
        first=first,
        later=later,
        limited=np.array(rows, dtype=float).reshape(len(rows), len(lives)),
        limits=np.array(limits),
    )


def _reads_known(life: FullLife, source: int) -> float:
    return float(life.first == source or (life.later == source and not life.written))


def _bytes_in(life: FullLife, tier: KeepTier, costs: SourceCosts) -> float:
    """Return the bytes of a tier that one sample's life takes."""
    read = {source - len(costs.cuts) for source in (life.first, life.later) if source >= len(costs.cuts)}
    return sum(float(costs.sample_bytes[place]) for place in read if costs.places[place][1] is tier)


# ------------------------------------------------------------------------------- written out


def one_stage(
    *, storage_s: float = 1e-3, compute_s: float = 1e-3, tail_s: float = 1e-4, row_bytes: float = 1000.0
) -> Profile:
    """Return a chain of one model stage: 10 kB are stored, and rows of ``row_bytes`` cross the cut."""
    return Profile(
        model="one stage",
        freeze=1,
        input=InputProfile(stored_bytes=10_000, tensor_bytes=10_000),
        stages=(stage("all", row_bytes, storage=storage_s, compute=compute_s),),
        tail=TailProfile(seconds=(0.0, tail_s)),
    )


def asked(
    profile: Profile,
    tiers: dict[KeepTier, KeepRoom],
    *,
    bandwidth: float = 1e6,
    epochs: int = 5,
    num_samples: int = 10_000,
    positions: dict[int, int] | None = None,
    **more: Any,
) -> Question:
    """Return a question with many samples, so that fill and drain are next to nothing."""
    return Question(
        profile=profile,
        cluster=cluster(bandwidth=bandwidth, micro_batch=10),
        workload=Workload(batch_size=10, num_samples=num_samples),
        keeping=KeepingTiers(tiers=tiers, positions=positions or {profile.freeze: 1}, **more),
        epochs=epochs,
    )


def single(profile: Profile, cut: int) -> tuple[Route, ...]:
    return (route_at(profile, cut),)
