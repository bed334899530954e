"""Check kept features: the same losses and weights to the bit, and only what is missing is computed."""

from __future__ import annotations

import logging
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Subset

import upriver
from tests.finetune.moving import AtStep
from tests.finetune.training import BATCH, MICRO, optimizer_of, photos, png, run, same, train
from tests.program.nets import Small, frozen_small
from upriver.errors import ConfigError, FrozenChanged, ObjectChanged
from upriver.features import DiskFeatures
from upriver.finetune import feature_source, session
from upriver.finetune.prefetch.local_source import LocalSource
from upriver.finetune.prefetch.sampler import epoch_order
from upriver.pipeline import Dataset
from upriver.program.split.frozen_name import FrozenName

COUNT = 50
STILL = (upriver.Decode(), upriver.Resize(16), upriver.CenterCrop(16), upriver.Normalize())
"""Input stages that draw no random numbers."""

Losses = tuple[list[torch.Tensor], Small]


def still_photos(root: Path, count: int = COUNT, **given: Any) -> Dataset:
    return photos(root, count, **given).with_stages(STILL)


def near() -> upriver.Near:
    return upriver.connect()


def kept_run(
    data: Dataset, folder: Path, *, epochs: int = 3, keep: upriver.Keep | None = None, **options: Any
) -> tuple[Losses, Any]:
    room = keep or upriver.Keep(memory="64 MB", disk="64 MB", folder=folder)
    losses, model, job = run(near(), data, policy="nosplit", epochs=epochs, keep=room, **options)
    return (losses, model), job


KNOWN: dict[tuple[object, ...], Losses] = {}
"""Losses and models of plain jobs, by what decides them."""


def reference(data: Dataset, *, epochs: int = 3, **options: Any) -> Losses:
    content = tuple(zlib.crc32(data.store.get(ref.object)) for ref in data.locate(range(len(data))))
    known = (content, str(data.chain), epochs, repr(sorted(options.items())))
    if known not in KNOWN:
        losses, model, _ = run(near(), data, policy="nosplit", epochs=epochs, **options)
        KNOWN[known] = losses, model
    return KNOWN[known]


@pytest.fixture(scope="module", autouse=True)
def proofs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Prove each program once."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("UPRIVER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def shards(folder: Path) -> Sequence[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 4096)


def test_job_with_kept_features_computes_each_sample_once(tmp_path: Path) -> None:
    data = still_photos(tmp_path / "store")
    got, job = kept_run(data, tmp_path / "kept")
    assert same(got, reference(data))
    assert job.report.samples == {"local": COUNT, "kept": 2 * COUNT}


def test_jobs_keep_features_in_memory_and_in_the_cache_folder_by_default_and_say_how_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delivered_keep: Any
) -> None:
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path / "cache"))
    data = still_photos(tmp_path / "store")
    losses, model, job = run(near(), data, policy="nosplit", epochs=2, keep=delivered_keep)
    assert same((losses, model), reference(data, epochs=2))
    assert job.report.samples == {"local": COUNT, "kept": COUNT}
    assert shards(tmp_path / "cache" / "features")
    assert re.search(r"[kM]B of at most \S+ [MGT]B in memory, .* of at most \S+ [MGT]B on disk", job.plan.why)


@pytest.mark.parametrize(
    "where",
    [
        pytest.param({"memory": 0}, marks=pytest.mark.full),
        pytest.param({"disk": 0}, marks=pytest.mark.full),
        {"memory": 0, "disk": 0},
    ],
)
def test_job_with_kept_features_in_one_place_only_gives_equal_losses(
    tmp_path: Path, where: dict[str, Any]
) -> None:
    data = still_photos(tmp_path / "store")
    room = upriver.Keep(**{"memory": "64 MB", "disk": "64 MB", "folder": tmp_path / "kept", **where})
    got, job = kept_run(data, tmp_path, keep=room)
    assert same(got, reference(data))
    if len(where) == 2:
        assert job.report.samples == {"local": 3 * COUNT}
    elif "memory" in where:  # what the first epoch wrote is there in the last one at least
        assert job.report.samples["kept"] >= COUNT
    else:
        assert job.report.samples == {"local": COUNT, "kept": 2 * COUNT}
        assert not (tmp_path / "kept").exists()


def test_own_rows_are_proven_once_by_a_micro_batch_that_was_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, read = still_photos(tmp_path / "store"), list[tuple[int, ...]]()
    begun, rows = LocalSource.begun, tmp_path / "kept"

    def noted(self: LocalSource, ids: tuple[int, ...], stop: int, clock: Any) -> Any:
        read.append(ids)
        return begun(self, ids, stop, clock)

    monkeypatch.setattr(LocalSource, "begun", noted)
    wanted = reference(data, epochs=4)
    read.clear()
    got, job = kept_run(data, rows, epochs=4)
    assert same(got, wanted)
    assert sorted(sample for ids in read for sample in ids) == list(range(COUNT))
    assert job.report.samples == {"local": COUNT, "kept": 3 * COUNT}
    read.clear()
    kept_run(data, rows, epochs=2)
    assert len(read) == 2  # rows of another job are read and computed anew


def test_second_job_with_kept_features_computes_nothing_but_its_check(tmp_path: Path) -> None:
    data = still_photos(tmp_path / "store")
    kept_run(data, tmp_path / "kept", epochs=1)
    got, job = kept_run(data, tmp_path / "kept", epochs=2, seed=8)
    assert same(got, reference(data, epochs=2, seed=8))
    assert job.report.samples == {"kept": 2 * COUNT}


def ranks_run(data: Dataset, keep: upriver.Keep | None) -> list[Any]:
    """Train two ranks in turns for two epochs, with one model each; return losses, model and job of each."""
    ranks = []
    for rank in range(2):
        model, sampling = frozen_small(), upriver.Sampling(rank=rank, num_ranks=2)
        given = {"policy": "nosplit", "batch_size": BATCH, "micro_batch": MICRO, "seed": 7, "keep": keep}
        ranks.append((model, near().finetune(model, data, sampling=sampling, **given), optimizer_of(model)))
    losses: list[list[torch.Tensor]] = [[], []]
    for _ in range(2):
        for (model, job, optimizer), found in zip(ranks, losses, strict=True):
            train(job, model, optimizer, first=len(found), losses=found)
        for _, job, _ in ranks:
            if job.feed.kept is not None:
                job.feed.kept.flush(wait=True)
    return [((found, model), job) for (model, job, _), found in zip(ranks, losses, strict=True)]


def test_ranks_read_the_rows_that_the_others_wrote(tmp_path: Path) -> None:
    data = still_photos(tmp_path / "store")
    room = upriver.Keep(memory="64 MB", disk="64 MB", folder=tmp_path / "kept")
    for (got, job), (wanted, _) in zip(ranks_run(data, room), ranks_run(data, None), strict=True):
        assert same(got, wanted)
        assert job.report.samples == {"local": COUNT // 2, "kept": COUNT // 2}
        job.close()
    assert sum(int(path.name.split("-")[1]) for path in shards(tmp_path / "kept")) == COUNT


def test_grown_dataset_computes_only_what_was_added(tmp_path: Path) -> None:
    kept_run(still_photos(tmp_path / "store"), tmp_path / "kept", epochs=1)
    grown = still_photos(tmp_path / "store", COUNT + 5)
    got, job = kept_run(grown, tmp_path / "kept", epochs=1)
    assert same(got, reference(grown, epochs=1))
    assert job.report.samples == {"local": 5, "kept": COUNT}


def test_replaced_object_with_kept_features_is_an_error_as_in_the_plain_job(tmp_path: Path) -> None:
    data = still_photos(tmp_path / "store")
    kept_run(data, tmp_path / "kept", epochs=1)
    (tmp_path / "store" / "photos" / "class0" / "000.png").write_bytes(png(77))
    with pytest.raises(ObjectChanged, match=r"000\.png"):
        kept_run(data, tmp_path / "kept", epochs=1)
    fresh = upriver.index(upriver.Store.open((tmp_path / "store").as_uri()), "photos", stages=STILL)
    got, job = kept_run(fresh, tmp_path / "kept", epochs=1)
    assert same(got, reference(fresh, epochs=1))
    assert job.report.samples == {"local": 1, "kept": COUNT - 1}


def test_views_draw_as_the_plain_job_with_views_and_compute_each_view_once(tmp_path: Path) -> None:
    data = photos(tmp_path / "store", COUNT)
    sampling = upriver.Sampling(views=2)
    plain = reference(data, epochs=5, sampling=sampling)
    got, job = kept_run(data, tmp_path / "kept", epochs=5, sampling=sampling)
    assert same(got, plain)
    assert not same(got, reference(data, epochs=5))
    assert job.report.samples == {"local": 2 * COUNT, "kept": 3 * COUNT}


@pytest.mark.full
def test_random_stages_without_views_keep_what_lies_before_them(tmp_path: Path) -> None:
    data = photos(tmp_path / "store", COUNT).with_stages(
        (upriver.Decode(), upriver.Resize(20), upriver.RandomCrop(16), upriver.Normalize())
    )
    got, job = kept_run(data, tmp_path / "kept")
    assert same(got, reference(data))
    assert job.report.samples == {"local": 3 * COUNT}
    assert job.report.epoch_bytes[0] > 0
    assert job.report.epoch_bytes[2] == 0
    [listed] = DiskFeatures(tmp_path / "kept", budget_bytes=0).entries()
    assert listed.about == "samples after resize"
    again, later = kept_run(data, tmp_path / "kept")
    assert same(again, got)
    assert later.report.epoch_bytes[2] == 0


@pytest.mark.full
def test_views_with_deterministic_stages_are_said_and_no_error(tmp_path: Path) -> None:
    data = still_photos(tmp_path / "store")
    got, job = kept_run(data, tmp_path / "kept", epochs=1, sampling=upriver.Sampling(views=3))
    assert same(got, reference(data, epochs=1))
    assert "views=3 changes nothing" in job.plan.why


def test_what_keeps_features_out_of_the_store_is_said(tmp_path: Path) -> None:
    data = photos(tmp_path / "store", COUNT)
    room = upriver.Keep(memory=0, disk=0, store=True)
    for views, why in ((None, "random_resized_crop draws anew in each epoch"), (2, "no server is asked")):
        sampling = upriver.Sampling(views=views)
        with near().finetune(
            frozen_small(), data, batch_size=BATCH, keep=room, sampling=sampling, policy="nosplit"
        ) as job:
            assert f"no features are kept in the store, as {why}" in job.plan.why
            assert "0 B of at most" not in job.plan.why


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full)])
def test_damaged_shards_change_no_bit(tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    data = still_photos(tmp_path / "store")
    kept_run(data, tmp_path / "kept", epochs=1)
    [shard] = shards(tmp_path / "kept")
    content = bytearray(shard.read_bytes())
    for at in torch.randint(len(content), (20,), generator=torch.Generator().manual_seed(seed)).tolist():
        content[at] ^= 0xFF
    shard.write_bytes(content)
    with caplog.at_level(logging.WARNING, logger="upriver"):
        got, job = kept_run(data, tmp_path / "kept", epochs=2)
    assert same(got, reference(data, epochs=2))
    assert sum(job.report.samples.values()) == 2 * COUNT
    assert caplog.records


def test_wrong_rows_of_an_earlier_job_are_found_and_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from upriver.features.kept import KeptStretch

    data, keep = still_photos(tmp_path / "store"), KeptStretch.keep

    def wrong(self: KeptStretch, dataset: Dataset, rows: dict[int, tuple[torch.Tensor, ...]]) -> None:
        keep(self, dataset, {sample: tuple(value + 1 for value in row) for sample, row in rows.items()})

    with monkeypatch.context() as patched:
        patched.setattr(KeptStretch, "keep", wrong)
        kept_run(data, tmp_path / "kept", epochs=1)
    with caplog.at_level(logging.WARNING, logger="upriver"):
        got, job = kept_run(data, tmp_path / "kept", epochs=2)
    assert same(got, reference(data, epochs=2))
    assert job.report.samples == {"local": COUNT, "kept": COUNT}
    assert "all of them are dropped" in caplog.text


def test_skipped_samples_are_never_kept(tmp_path: Path) -> None:
    data = still_photos(tmp_path / "store", bad={7: b"no image"})
    sampling = upriver.Sampling(on_bad_sample="skip")
    got, job = kept_run(data, tmp_path / "kept", sampling=sampling)
    assert same(got, reference(data, sampling=sampling))
    assert list(Counter(job.report.skipped).values()) == [3]
    assert job.report.samples == {"local": COUNT + 2, "kept": 2 * (COUNT - 1)}


@pytest.mark.parametrize(
    "step", [3, *(pytest.param(step, marks=pytest.mark.full) for step in (0, 1, 2, 4, 5))]
)
def test_resuming_with_kept_features_gives_equal_losses_at_every_step(tmp_path: Path, step: int) -> None:
    data = still_photos(tmp_path / "store")
    plain, _ = reference(data, epochs=3)
    options: dict[str, Any] = {"batch_size": BATCH, "micro_batch": MICRO, "seed": 7, "policy": "nosplit"}
    options["keep"] = upriver.Keep(memory="64 MB", disk="64 MB", folder=tmp_path / "kept")
    model = frozen_small()
    optimizer = optimizer_of(model)

    class Interrupted(Exception):
        pass

    def interrupt(taken: int) -> None:
        if taken == step:
            raise Interrupted

    with near().finetune(model, data, **options) as job:
        losses = train(job, model, optimizer, epochs=1)
        if step:
            more: list[torch.Tensor] = []
            with pytest.raises(Interrupted):
                train(job, model, optimizer, first=len(losses), losses=more, after_step=interrupt)
            losses += more
        state = job.state_dict()
    with near().finetune(model, data, **options) as job:
        job.load_state_dict(state)
        losses += train(job, model, optimizer, epochs=1, first=len(losses))
        assert "local" not in job.report.samples
    assert len(losses) >= 10
    assert all(map(torch.equal, losses, plain))


def test_every_row_is_delivered_in_the_order_of_the_epoch(tmp_path: Path) -> None:
    data = still_photos(tmp_path / "store")
    room = upriver.Keep(memory="100 kB", disk=0)
    with near().finetune(
        frozen_small(), data, batch_size=BATCH, micro_batch=MICRO, seed=7, policy="nosplit", keep=room
    ) as job:
        for epoch in range(3):
            targets = torch.cat([targets for _, targets in job])
            order = epoch_order(COUNT, seed=7, epoch=epoch, batch_size=BATCH, micro_batch=MICRO, shuffle=True)
            assert torch.equal(targets, data.targets[list(order.ids)])


def test_evaluation_finds_what_an_earlier_one_kept(tmp_path: Path) -> None:
    data = still_photos(tmp_path / "store")
    held = still_photos(tmp_path / "held", 20)

    def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.argmax(1) == targets).float().mean()

    room = upriver.Keep(memory="64 MB", disk=0)
    options: dict[str, Any] = {"batch_size": BATCH, "micro_batch": MICRO, "policy": "nosplit"}
    with near().finetune(frozen_small(), data, **options) as plain:
        wanted = plain.evaluate(held, accuracy)
    with near().finetune(frozen_small(), data, **options, keep=room) as job:
        assert [job.evaluate(held, accuracy) for _ in range(3)] == [wanted] * 3
        assert job.report.samples == {"local": 20, "kept": 40}


def test_plan_says_what_is_kept(tmp_path: Path) -> None:
    data = still_photos(tmp_path / "store")
    _, job = kept_run(data, tmp_path / "kept", epochs=1)
    assert "features kept: " in job.plan.why


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"memory": "much"}, "memory"),
        ({"memory": -1}, "memory"),
        ({"disk": "5 parsecs"}, "disk"),
        ({"disk": 2.5}, "disk"),
        ({"folder": 5}, "folder"),
    ],
)
def test_keep_with_a_budget_that_is_no_size_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        upriver.Keep(**given)


def test_state_of_another_number_of_views_is_refused(tmp_path: Path) -> None:
    data = photos(tmp_path)
    options: dict[str, Any] = {"batch_size": BATCH, "micro_batch": MICRO, "policy": "nosplit"}
    with near().finetune(frozen_small(), data, sampling=upriver.Sampling(views=2), **options) as job:
        state = job.state_dict()
    with near().finetune(frozen_small(), data, **options) as job, pytest.raises(ConfigError, match="views"):
        job.load_state_dict(state)


def test_kept_features_of_servers_give_equal_losses(tmp_path: Path) -> None:
    data = still_photos(tmp_path / "store")
    room = upriver.Keep(memory="64 MB", disk="64 MB", folder=tmp_path / "kept")
    with upriver.connect(server_threads=1) as servers:
        losses, model, job = run(servers, data, epochs=3, cut={3: 0.5, -4: 0.5}, keep=room)
        url = next(source for source in job.report.samples if source.startswith("http"))
        assert job.report.samples["kept"] == 2 * COUNT
        assert job.report.samples[url] + job.report.samples["local"] == COUNT
        again, other, later = run(servers, data, epochs=1, keep=room)
        assert later.report.samples == {"kept": COUNT}
    plain = reference(data)
    assert same((losses, model), plain)
    assert same((again, other), reference(data, epochs=1))


def test_numeric_job_keeps_nothing_and_says_so(tmp_path: Path) -> None:
    data = still_photos(tmp_path / "store")
    room = upriver.Keep(memory="64 MB", disk=0)
    _, _, job = run(near(), data, epochs=2, keep=room, prefix="bf16", policy="nosplit")
    assert "features are not kept" in job.plan.why
    assert "kept" not in job.report.samples


@pytest.mark.full
@pytest.mark.parametrize("at", [7, pytest.param(2, marks=pytest.mark.full)])
def test_job_that_moves_over_keeps_the_rows_from_before_for_later_jobs(
    tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = still_photos(tmp_path / "store")
    room = upriver.Keep(memory="64 MB", disk="64 MB", folder=tmp_path / "kept")
    monkeypatch.setattr(session, "Preparation", AtStep)
    AtStep.asked_before = at
    begun = upriver.Splitting(in_background=True)
    with upriver.connect(server_threads=1) as servers:
        losses, model, job = run(servers, data, epochs=3, policy="freeze", splitting=begun, keep=room)
    assert same((losses, model), reference(data))
    assert job.report.samples["kept"] == 2 * COUNT
    got, later = kept_run(data, tmp_path / "kept", epochs=1)
    assert same(got, reference(data, epochs=1))
    assert later.report.samples == {"kept": COUNT}


@pytest.mark.full
def test_job_that_begins_at_once_finds_the_rows_of_an_earlier_one_before_it_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = still_photos(tmp_path / "store")
    room = upriver.Keep(memory=0, disk="64 MB", folder=tmp_path / "kept")
    monkeypatch.setattr(session, "Preparation", AtStep)
    options: dict[str, Any] = {"splitting": upriver.Splitting(in_background=True), "keep": room}
    with upriver.connect(server_threads=1) as servers:
        AtStep.asked_before = 2
        run(servers, data, epochs=2, policy="freeze", **options)
        AtStep.asked_before = 1000
        losses, model, job = run(servers, data, epochs=2, policy="freeze", seed=8, **options)
    assert same((losses, model), reference(data, epochs=2, seed=8))
    assert job.report.samples == {"kept": 2 * COUNT}


@pytest.mark.full
def test_job_that_is_never_captured_leaves_rows_for_later_jobs_with_other_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = still_photos(tmp_path / "store")
    room = upriver.Keep(memory="64 MB", disk="64 MB", folder=tmp_path / "kept")
    monkeypatch.setattr(session, "Preparation", AtStep)
    AtStep.asked_before = 1000
    options: dict[str, Any] = {"splitting": upriver.Splitting(in_background=True), "keep": room}
    with upriver.connect(server_threads=1) as servers:
        run(servers, data, epochs=1, **options)
        wider = frozen_small()
        wider.head = torch.nn.Linear(wider.head.in_features, 7)
        _, _, job = run(servers, data, epochs=1, model=wider, **options)
    assert job.report.samples == {"kept": COUNT}


class Scaled(torch.nn.Module):
    """Multiply by an attribute that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) * self.scale


def scaled() -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Scaled(), torch.nn.Flatten(), torch.nn.Linear(8 * 14 * 14, 5))
    model[0].requires_grad_(False)
    return model


def test_job_that_computed_no_micro_batch_notices_a_changed_attribute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "WORTH_A_PROCESS_S", 0.0)
    data, keep = still_photos(tmp_path / "store"), upriver.Keep(folder=tmp_path / "kept")
    options: dict[str, Any] = {"batch_size": BATCH, "micro_batch": MICRO, "seed": 7, "keep": keep}
    for change in (False, True):
        model = scaled()
        with upriver.connect() as servers, servers.finetune(model, data, **options) as job:
            scaling: Any = model[0]

            def after_step(step: int, scaling: Any = scaling, change: bool = change) -> None:
                scaling.scale = 3.0 if change else 1.0

            raised = pytest.raises(FrozenChanged, match="'scale'") if change else nullcontext()
            with raised:
                train(job, model, optimizer_of(model), after_step=after_step)
            assert ("kept" in job.report.samples) == change


def test_name_of_another_frozen_part_costs_rows_and_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = still_photos(tmp_path / "store")
    name = FrozenName(digest="0" * 64, num_stages=3)
    monkeypatch.setattr(feature_source, "frozen_name", lambda *_, about: name)
    other = frozen_small(seed=1)
    run(near(), data, epochs=1, policy="nosplit", model=other, keep=upriver.Keep(folder=tmp_path / "kept"))
    got, job = kept_run(data, tmp_path / "kept")
    assert same(got, reference(data))
    assert "all of them are dropped" in caplog.text
    assert job.report.samples == {"local": COUNT, "kept": 2 * COUNT}


def test_few_rows_of_other_code_under_the_same_name_are_found_by_their_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No name can hold all that a forward may read, so jobs with other code may share one."""
    data, room = still_photos(tmp_path / "store"), upriver.Keep(folder=tmp_path / "kept")
    name = FrozenName(digest="0" * 64, num_stages=3)
    monkeypatch.setattr(feature_source, "frozen_name", lambda *_, about: name)
    few, most = [1, 2], [0, *range(3, COUNT)]
    for ids, seed in ((few, 1), (most, 0)):
        part: Any = Subset(data, ids)
        run(near(), part, epochs=1, policy="nosplit", model=frozen_small(seed=seed), keep=room)
    assert "dropped" not in caplog.text  # neither has found a sample of the other
    got, job = kept_run(data, tmp_path / "kept")
    assert same(got, reference(data))
    assert "all of them are dropped" in caplog.text
    again, job = kept_run(data, tmp_path / "kept")
    assert same(again, got)
    assert job.report.samples == {"kept": 3 * COUNT}


@pytest.mark.full
def test_rows_of_others_are_checked_though_the_job_has_rows_of_its_own_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data, folder = still_photos(tmp_path / "store"), tmp_path / "kept"
    begun, captured = (FrozenName(digest=digit * 64, num_stages=3) for digit in "01")
    monkeypatch.setattr(
        feature_source, "frozen_name", lambda _, program, about: captured if program else begun
    )
    other = frozen_small(seed=1)
    run(near(), data, epochs=1, policy="nosplit", model=other, keep=upriver.Keep(folder=folder))
    monkeypatch.setattr(session, "Preparation", AtStep)
    monkeypatch.setattr(AtStep, "asked_before", 5)
    half = (8 << 20) + COUNT * 3000 // 2  # two shards wait in 8 MiB
    room = upriver.Keep(memory=half, disk="64 MB", folder=folder)
    with upriver.connect(server_threads=1) as servers:
        at_once = upriver.Splitting(in_background=True)
        losses, model, job = run(servers, data, epochs=3, policy="freeze", splitting=at_once, keep=room)
    assert same((losses, model), reference(data))
    assert "all of them are dropped" in caplog.text
    assert job.report.samples["kept"] > 0


def in_memory(name: str, first: int) -> Dataset:
    """Return photos in a store of this process, whose ETags count from 0."""
    store = upriver.Store.open(f"memory://{name}")
    for number in range(20):
        store.put(f"photos/class{number % 5}/{number:03}.png", png(first + number))
    return upriver.index(store, "photos", stages=STILL)


def test_rows_of_stores_in_memory_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    data, held = in_memory("kept-a", 0), in_memory("kept-b", 500)
    assert [ref.etag for ref in data.locate([0, 1])] == [ref.etag for ref in held.locate([0, 1])]

    def mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.mean()

    room = upriver.Keep(memory="64 MB", disk="64 MB", folder=tmp_path / "kept")
    options: dict[str, Any] = {"batch_size": BATCH, "micro_batch": MICRO, "policy": "nosplit"}
    with near().finetune(frozen_small(), data, **options) as plain:
        wanted = [plain.evaluate(data, mean), plain.evaluate(held, mean)]
    with near().finetune(frozen_small(), data, **options, keep=room) as job:
        assert [job.evaluate(data, mean), job.evaluate(held, mean)] == wanted
        assert [job.evaluate(data, mean), job.evaluate(held, mean)] == wanted
    assert wanted[0] != wanted[1]
    assert not shards(tmp_path)
