"""Small planning problems for tests: one written out, and any number of random ones."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from upriver.types import (
    STREAMS,
    Cluster,
    ComputeTier,
    InputProfile,
    Link,
    Profile,
    StageProfile,
    StorageTier,
    TailProfile,
    Tier,
    Workload,
)

# Output bytes of AlexNet's 21 stages, one sample of 224 x 224; the input tensor has 602112.
ALEXNET_BYTES = (
    *(774400, 774400, 186624, 559872, 559872, 129792, 259584, 259584, 173056, 173056, 173056, 173056),
    *(36864, 36864, 36864, 16384, 16384, 16384, 16384, 16384, 4000),
)


def stage(
    name: str, out_bytes: float, *, storage: float = 1e-3, compute: float = 1e-3, **more: Any
) -> StageProfile:
    seconds = {"storage": (0.0, storage), "compute": (0.0, compute)}
    return StageProfile(name=name, kind="test", out_bytes=out_bytes, **{"seconds": seconds, **more})


def alexnet(*, storage_s: float = 2e-5, compute_s: float = 2e-5, stored_bytes: float = 602112) -> Profile:
    """Return AlexNet frozen through stage 17, every stage equally fast."""
    return Profile(
        model="alexnet",
        freeze=17,
        input=InputProfile(stored_bytes=stored_bytes, tensor_bytes=602112),
        stages=tuple(
            stage(
                f"stage{k}", size, storage=storage_s, compute=compute_s, param_bytes=1e6, peak_bytes=2 * size
            )
            for k, size in enumerate(ALEXNET_BYTES, start=1)
        ),
        tail=TailProfile(seconds=(1e-3, 1e-4), param_bytes=1e8, peak_bytes=65536),
    )


def cluster(bandwidth: float = 125e6, **storage: Any) -> Cluster:
    return Cluster(link=Link(bandwidth_bytes_per_s=bandwidth), storage=StorageTier(**storage))


_seconds = st.floats(0, 0.1, allow_subnormal=False)
_pairs = st.tuples(_seconds, _seconds)
_bytes = st.integers(0, 10**6).map(float)
_rates = st.floats(0, 1e-7, allow_subnormal=False)
# Few values, so that ties are common.
_sizes = st.sampled_from([0.0, 1000.0, 4096.0, 36864.0, 602112.0])
_memory = st.one_of(st.just(math.inf), st.integers(0, 5 * 10**7).map(float))


@st.composite
def stages(draw: st.DrawFn, *, resources: tuple[str, ...] = ("",)) -> StageProfile:
    """Draw a stage with its seconds on one of ``resources`` of each tier; "" is the main processor."""
    return StageProfile(
        name="s",
        kind="test",
        out_bytes=draw(_sizes),
        param_bytes=draw(_bytes),
        peak_bytes=draw(_bytes),
        seconds={
            tier + draw(st.sampled_from(resources)): draw(_pairs) for tier in (Tier.STORAGE, Tier.COMPUTE)
        },
    )


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    model = draw(st.lists(stages(), min_size=1, max_size=7))
    inputs = draw(st.lists(stages(resources=("", ".cpu")), max_size=3))
    return Profile(
        model="random",
        freeze=draw(st.integers(0, len(model))),
        input=InputProfile(stored_bytes=draw(_sizes), tensor_bytes=draw(_sizes)),
        stages=tuple(replace(s, name=f"model{i}") for i, s in enumerate(model, start=1)),
        input_stages=tuple(replace(s, name=f"input{i}") for i, s in enumerate(inputs, start=1)),
        tail=TailProfile(seconds=draw(_pairs), param_bytes=draw(_bytes), peak_bytes=draw(_bytes)),
        model_load_s={"storage": draw(_seconds)},
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    return Cluster(
        link=Link(bandwidth_bytes_per_s=draw(st.floats(1e4, 1e10)), rtt_s=draw(_seconds)),
        storage=StorageTier(
            memory_bytes=draw(_memory),
            concurrency=draw(st.integers(1, 5)),
            micro_batch=draw(st.integers(1, 20)),
            load=draw(st.floats(0.5, 3)),
            seconds_per_byte={"read": draw(_rates), "move": draw(_rates), "encode": draw(_rates)},
            reuse_model=draw(st.booleans()),
            request_samples=draw(st.integers(1, 150)),
        ),
        compute=ComputeTier(
            memory_bytes=draw(_memory),
            micro_batch=draw(st.none() | st.integers(1, 20)),
            concurrency=draw(st.integers(1, 5)),
            seconds_per_byte={"decode": draw(_rates), "move": draw(_rates)},
        ),
        stream=draw(st.sampled_from(STREAMS)),
    )


workloads = st.builds(Workload, batch_size=st.integers(1, 600), num_samples=st.integers(1, 3000))
