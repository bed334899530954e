"""Test published runs: the file, the bytes that cross, and a prediction from two runs of a pair."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.published_runs.model import (
    LABEL_BYTES,
    Network,
    Profiled,
    capture,
    cluster_of,
    fit_machines,
    predict,
)
from benchmarks.published_runs.report import Held, bytes_off, hold
from benchmarks.published_runs.runs import RUNS, Pair, Run, pairs, read_runs
from upriver.cost import CostModel
from upriver.errors import ConfigError
from upriver.policies import POLICIES
from upriver.types import (
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

NETWORKS = 5
PUBLISHED = 184
ROW = "alexnet,1.0,13,17,1000,36906612,1.7096,0.0493,0.0027,0.5322,22.86"


@pytest.fixture(scope="module")
def alexnet() -> Network:
    return capture("alexnet")


def invented(runs: list[Pair]) -> dict[str, Network]:
    """Make networks of the published stages and bytes, with even work: no capture needed."""
    found = {}
    for pair in runs:
        sizes = {run.split: run.received_bytes_per_batch / run.train_batch for run in pair.runs}
        late = pair.runs[-1].freeze
        found[pair.model] = Network(
            names=tuple(f"stage{cut}" for cut in range(late + 1)),
            out_bytes=tuple(sizes.get(cut, 602_112.0 + LABEL_BYTES) for cut in range(late + 1)),
            flops=tuple(1e8 * cut for cut in range(late + 1)),
            param_bytes=1e8,
        )
    return found


# -------------------------------------------------------------------------------------------- bytes


def test_every_split_of_alexnet_ships_the_published_bytes(alexnet: Network) -> None:
    published = [pair for pair in pairs(read_runs()) if pair.model == "alexnet"]
    assert sum(len(pair.runs) for pair in published) == 2 * 17
    for pair in published:
        assert max(abs(off) for off in bytes_off(alexnet, pair)) <= 0.003


def test_splits_are_counted_as_hapi_counts_them(alexnet: Network) -> None:
    assert len(alexnet.names) == 1 + 21
    assert alexnet.out_bytes[0] == 602_112 + LABEL_BYTES
    assert alexnet.out_bytes[13] == 36_864 + LABEL_BYTES


# -------------------------------------------------------------------------------------- the file


def test_the_file_holds_ten_pairs() -> None:
    runs = read_runs()
    found = pairs(runs)
    assert len(runs) == PUBLISHED
    assert {(pair.model, pair.link_gbps) for pair in found} == {
        (pair.model, link) for pair in found for link in (1.0, 12.0)
    }
    assert len(found) == 2 * NETWORKS
    for pair in found:
        early, late = pair.profiling
        assert early.split == min(run.split for run in pair.runs)
        assert late.split == late.freeze


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (ROW.replace("1.7096", "soon"), "line 2: fetch_s must be a number, got 'soon'"),
        (ROW.replace(",13,", ",13.5,"), "line 2: split must be a whole number, got '13.5'"),
        (ROW.replace("22.86", "nan"), "line 2: epoch_s must be a finite number > 0, got nan"),
        (ROW.replace("0.0493", "-1"), "line 2: forward_s must be a finite number > 0, got -1.0"),
        (ROW.replace(",13,", ",0,"), "line 2: split must be a finite number > 0, got 0"),
        (ROW.replace(",13,", ",18,"), "line 2: split must lie in 1..17"),
        (ROW.rpartition(",")[0], "line 2: a row has 11 columns"),
        (ROW + ",1", "line 2: a row has 11 columns"),
        (ROW.replace("alexnet", '"alex'), "cannot be read"),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, broken: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_runs(written(tmp_path, broken))
    assert says in str(raised.value)


def test_other_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    for text in ("", "model,split\nalexnet,1\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="the columns must be model,link_gbps,split"):
            read_runs(path)


def test_a_file_that_is_no_text_or_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_runs(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_runs(path)


def test_a_pair_needs_each_split_once_and_its_freeze_point(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="split 13 was run twice"):
        pairs(read_runs(written(tmp_path, ROW, ROW)))
    with pytest.raises(ConfigError, match=r"freeze point \(17\), has 12, 13"):
        pairs(read_runs(written(tmp_path, ROW, ROW.replace(",13,", ",12,"))))


def written(folder: Path, *rows: str) -> Path:
    path = folder / "runs.csv"
    header = RUNS.read_text(encoding="utf-8").splitlines()[0]
    path.write_text("\n".join((header, *rows)) + "\n", encoding="utf-8")
    return path


# --------------------------------------------------------------------------------- the prediction


def predictions(
    networks: Mapping[str, Network], runs: list[Run]
) -> dict[tuple[str, float], dict[int, float]]:
    held: list[Held] = hold(networks, pairs(runs))
    return {(each.pair.model, each.pair.link_gbps): dict(each.predicted) for each in held}


def disturbed(run: Run, by: random.Random) -> Run:
    names = ("fetch_s", "forward_s", "backward_s", "iteration_s", "epoch_s")
    return replace(run, **{name: getattr(run, name) * by.uniform(0.1, 10) for name in names})


def test_only_profiling_runs_are_used() -> None:
    runs = read_runs()
    found, by = pairs(runs), random.Random(0)
    networks = invented(found)
    profiling = {run for pair in found for run in pair.profiling}
    changed = [run if run in profiling else disturbed(run, by) for run in runs]
    assert changed != runs
    assert predictions(networks, changed) == predictions(networks, runs)


def test_of_its_own_network_a_pair_uses_its_own_two_runs() -> None:
    runs = read_runs()
    by = random.Random(1)
    networks = invented(pairs(runs))
    over_the_other_link = [
        disturbed(run, by) if (run.model, run.link_gbps) == ("vgg11", 12.0) else run for run in runs
    ]
    before, after = predictions(networks, runs), predictions(networks, over_the_other_link)
    assert after["vgg11", 1.0] == before["vgg11", 1.0]
    assert after["alexnet", 1.0] != before["alexnet", 1.0]  # which learns from other networks


def test_a_prediction_is_the_same_twice_whatever_the_order() -> None:
    runs = read_runs()
    networks = invented(pairs(runs))
    first = predictions(networks, runs)
    assert predictions(networks, runs) == first
    shuffled = random.Random(2).sample(runs, len(runs))
    for key, epochs in predictions(networks, shuffled).items():
        assert epochs == pytest.approx(first[key], rel=1e-6)


def test_what_the_model_says_is_what_it_finds() -> None:
    """Predict runs made by the model's own rules exactly, seen or not."""
    published = pairs(read_runs())
    networks = invented(published)
    made = [made_pair(networks[pair.model], pair) for pair in published]
    for each in hold(networks, made):
        assert each.machines.batches == 10
        assert each.machines.storage_load == pytest.approx(2.0, rel=1e-6)
        assert each.ours == pytest.approx(each.published, rel=1e-6)
        assert each.off == pytest.approx(0.0, abs=1e-6)


def made_pair(network: Network, pair: Pair) -> Pair:
    return Pair(runs=tuple(made_run(network, run) for run in pair.runs))


def made_run(network: Network, run: Run) -> Run:
    """Make ten batches, mostly fetched; 0.1 ps an operation, twice that at the store."""
    samples = run.train_batch
    sent, weights = network.out_bytes[run.split] * samples, network.param_bytes
    pushed_s = 1e-13 * network.flops[run.split] * samples
    forward_s = 1e-13 * network.flops[-1] * samples - pushed_s + 0.05
    fetch_s = sent / run.bandwidth_bytes_per_s + 3e-9 * sent + 2 * pushed_s + 2e-9 * weights
    iteration_s = forward_s + 3e-10 * sent + 0.1
    return replace(
        run,
        fetch_s=fetch_s,
        forward_s=forward_s,
        iteration_s=iteration_s,
        epoch_s=10 * (fetch_s + iteration_s),
    )


def test_the_cluster_is_that_of_the_runs() -> None:
    """Nothing overlaps, a batch is one request, and the link is the file's."""
    published = pairs(read_runs())
    networks = invented(published)
    known = [Profiled.of(networks[pair.model], pair) for pair in published]
    machines = fit_machines(known[2:])
    cluster = cluster_of(known[0], machines)
    assert cluster.stream == "synchronous"
    assert cluster.storage.request_samples == 1000
    assert cluster.link.bandwidth_bytes_per_s == 125e6


def test_runs_that_contradict_the_model_are_refused() -> None:
    published = pairs(read_runs())
    networks = invented(published)
    known = [Profiled.of(networks[pair.model], pair) for pair in published]
    machines = fit_machines(known[2:])
    slower = replace(known[0], late=replace(known[0].late, forward_s=10.0))
    with pytest.raises(ConfigError, match="forward_s must fall from split 1 to 17"):
        predict(slower, machines)


# ------------------------------------------------------------- decisions, with and without model reuse


REQUEST = 128
TABLE_4 = {"alexnet": (0.387, 0.500), "vgg11": (0.838, 1.511)}
"""HAPI (2025), section 5.6: seconds of loading a request's model, and all seconds of the server."""

Question = tuple[Profile, Cluster, Workload]


@pytest.fixture(scope="module")
def vgg11() -> Network:
    return capture("vgg11")


def asked(
    model: str,
    network: Network,
    *,
    batch: int,
    reuse: bool,
    split: int,
    slower_there: float,
    slower_here: float = 1.0,
) -> Question:
    """Return the paper's two machines (section 5.1), from Table 4 and the authors' runs over the same link.

    Args:
        model: A network of Table 4.
        network: Its capture.
        batch: The training batch.
        reuse: Whether the server keeps the model.
        split: Where Table 4's request left the server; its time besides loading, forward pass and sending is
            reading.
        slower_there: Factor on the server's published forward pass.
        slower_here: The same factor on all work of the training side.
    """
    [pair] = [pair for pair in pairs(read_runs()) if (pair.model, pair.link_gbps) == (model, 12.0)]
    known, per_sample = Profiled.of(network, pair), slower_here / pair.runs[0].train_batch
    load_s, total_s = TABLE_4[model]
    per_flop, encode = known.seconds_per_flop, encode_s_per_byte(pair)
    forward_s = slower_there * per_flop * network.flops[split]
    read_s = (total_s - load_s) / REQUEST - forward_s - encode * network.out_bytes[split]
    assert read_s > 0
    profile = Profile(
        model=model,
        freeze=known.late.split,
        input=InputProfile(stored_bytes=network.out_bytes[0], tensor_bytes=network.out_bytes[0]),
        stages=tuple(
            StageProfile(
                name=name,
                kind="model",
                out_bytes=out_bytes,
                seconds={
                    Tier.STORAGE: (0.0, per_flop * flops),
                    Tier.COMPUTE: (0.0, slower_here * per_flop * flops),
                },
            )
            for name, out_bytes, flops in zip(
                network.names[1:],
                network.out_bytes[1:],
                (b - a for a, b in pairwise(network.flops)),
                strict=True,
            )
        ),
        tail=TailProfile(seconds=(0.0, per_sample * known.batch_s)),
        model_load_s={Tier.STORAGE: load_s},
    )
    cluster = Cluster(
        link=Link(bandwidth_bytes_per_s=1.5e9),
        storage=StorageTier(
            concurrency=4,
            load=slower_there,
            seconds_per_byte={"read": read_s / network.out_bytes[0], "encode": encode},
            reuse_model=reuse,
            request_samples=REQUEST,
        ),
        compute=ComputeTier(seconds_per_byte={"decode": slower_here * known.receive_s_per_byte}),
        stream="request",
    )
    return profile, cluster, Workload(batch_size=batch, num_samples=30720)


def encode_s_per_byte(pair: Pair) -> float:
    """Return the seconds per byte beyond the link's rate, from two successive splits of different bytes."""
    for run, other in pairwise(pair.runs):
        more = other.received_bytes_per_batch - run.received_bytes_per_batch
        if more:
            return (other.fetch_s - run.fetch_s) / more - 1 / run.bandwidth_bytes_per_s
    raise ValueError(f"all splits of {pair.model} ship the same bytes")


@pytest.mark.parametrize("slower", [1.0, 2.0, 4.0])
def test_hapi_splits_alexnet_where_the_server_keeps_the_model_only(alexnet: Network, slower: float) -> None:
    """Section 5.6: batches of 128 are split at 16, and not at all where each request loads the model.

    This holds for any part of Table 4's rest that the forward pass may have.
    """
    cuts = {}
    for reuse in (True, False):
        question = asked("alexnet", alexnet, batch=REQUEST, reuse=reuse, split=16, slower_there=slower)
        phases = CostModel(*question).phases(16)
        spent = REQUEST * (phases.storage_forward + phases.storage_parallel) + phases.model_load
        assert spent == pytest.approx(0.113 if reuse else 0.500)
        cuts[reuse] = POLICIES["hapi"](*question).cut
    assert cuts == {True: 16, False: 0}


@pytest.mark.parametrize("slower", [1.0, 2.0, 4.0])
@pytest.mark.full
def test_hapi_does_not_split_vgg11_where_each_request_loads_the_model(vgg11: Network, slower: float) -> None:
    """Section 5.6, batches of 512: four requests at once, and each loads 0.5 GB of weights."""
    question = asked("vgg11", vgg11, batch=512, reuse=False, split=11, slower_there=slower)
    assert POLICIES["hapi"](*question).cut == 0


@pytest.mark.full
def test_hapi_splits_vgg11_at_11_where_the_server_keeps_the_model(vgg11: Network) -> None:
    """Section 5.6, batches of 512, on machines that are slower than when the runs were published.

    The paper gives no times of forward passes: with the published ones the training side alone would finish
    first. With factors of 4 and 2 both of the paper's decisions follow.
    """
    cuts = {
        reuse: POLICIES["hapi"](
            *asked("vgg11", vgg11, batch=512, reuse=reuse, split=11, slower_there=4.0, slower_here=2.0)
        ).cut
        for reuse in (True, False)
    }
    assert cuts == {True: 11, False: 0}
