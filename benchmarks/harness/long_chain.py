"""Make random chains of a thousand stages, and clusters, for what is timed without a real model."""

from __future__ import annotations

import random

from upriver.types import (
    Cluster,
    ComputeTier,
    InputProfile,
    Link,
    Profile,
    StageProfile,
    StorageTier,
    TailProfile,
    Workload,
)

STAGES = 1000

WORKLOAD = Workload(batch_size=512, num_samples=50_000)


def question(seed: int) -> tuple[Profile, Cluster, Workload]:
    """Return a chain whose outputs shrink, not monotonically, and machines that fit a part of it."""
    draw = random.Random(seed)
    sizes = [6e5 * (1 - k / STAGES) ** 2 * draw.uniform(0.3, 2.0) + 1000 for k in range(STAGES)]
    stages = tuple(
        StageProfile(
            name=f"stage{k}",
            kind="random",
            out_bytes=size,
            param_bytes=draw.uniform(0, 1e5),
            peak_bytes=3 * size,
            seconds={
                "storage": (draw.uniform(0, 1e-4), draw.uniform(1e-6, 1e-4)),
                "compute": (draw.uniform(0, 1e-4), draw.uniform(1e-6, 1e-4)),
            },
        )
        for k, size in enumerate(sizes)
    )
    profile = Profile(
        model="random",
        freeze=STAGES,
        input=InputProfile(stored_bytes=110_000, tensor_bytes=602_112),
        stages=stages,
        tail=TailProfile(seconds=(1e-3, 1e-4), param_bytes=1e7, peak_bytes=1e5),
    )
    cluster = Cluster(
        link=Link(bandwidth_bytes_per_s=10 ** draw.uniform(5.5, 8)),
        storage=StorageTier(memory_bytes=6e7, seconds_per_byte={"read": 1e-9, "encode": 1e-9}),
        compute=ComputeTier(memory_bytes=1e12, micro_batch=16, seconds_per_byte={"decode": 1e-9}),
    )
    return profile, cluster, WORKLOAD
