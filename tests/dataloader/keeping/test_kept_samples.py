"""Check that kept samples change no bit of any batch, whatever happens to them."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset

from tests.dataloader.keeping.world import (
    CHAINS,
    COUNT,
    LATE,
    RANDOM,
    SEED,
    STEADY,
    counted,
    epochs,
    loader_of,
    stored,
)
from tests.dataloader.leaving import shared
from tests.dataloader.toy_datasets import Plain, same
from tests.examples import examples, often, some
from tests.pipeline.making import encoded, pixels, write
from tests.pipeline.test_any_chain import STORED, chains
from tests.server.running import wait_for
from upriver.dataloader import DataLoader, dataset
from upriver.dataloader.keeping.kept_samples import SampleSeconds, own_memory
from upriver.dataloader.local import shared_memory
from upriver.errors import BadSample, ConfigError, ObjectChanged, ObjectNotFound
from upriver.features import StretchFolder
from upriver.features.keep import Keep
from upriver.features.kept import CHECKED_ROWS, KeptFeatures
from upriver.pipeline import Dataset, Decode, Normalize, Resize, index
from upriver.store import Store

MEMORY: dict[str, Any] = {"memory": "64 MB", "disk": 0}


@pytest.fixture(scope="module", params=often(CHAINS, "random", "late"))
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return stored(tmp_path_factory.mktemp(request.param), CHAINS[request.param])


@pytest.fixture
def disk(tmp_path: Path) -> Keep:
    return Keep(memory=0, disk="256 MB", folder=tmp_path / "kept")


def raised_in(loader: DataLoader) -> tuple[list[Any], list[tuple[type[Exception], str]]]:
    """Return an epoch's batches, and the errors in place of the others."""
    batches, errors, iterator = list[Any](), list[tuple[type[Exception], str]](), iter(loader)
    while True:
        try:
            batches.append(next(iterator))
        except StopIteration:
            return batches, errors
        except Exception as error:
            errors.append((type(error), str(error)))


@pytest.mark.parametrize(("tier", "num_workers"), [("memory", 0), ("disk", 0), ("both", 2)])
def test_epochs_with_kept_samples_are_those_without(
    data: Dataset, disk: Keep, num_workers: int, tier: str
) -> None:
    keep = {"memory": Keep(**MEMORY), "disk": disk, "both": Keep(disk="256 MB", folder=disk.folder)}[tier]
    watched, reads = counted(data)
    loader = loader_of(watched, keep=keep, num_workers=num_workers)
    found = [list(loader)]
    loader._samples._features.flush(wait=True)  # a disk may be slower than the next epoch
    first = len(reads.paths)
    found += [list(loader) for _ in range(2)]
    assert same(found, epochs(data))
    assert first == COUNT and len(reads.paths) == first
    assert loader.report.kept == 2 * COUNT and loader.report.made == {"here": 3 * COUNT}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "arguments",
    [pytest.param({"batch_size": None, "shuffle": False}, marks=pytest.mark.full), {"collate_fn": list}],
)
@pytest.mark.full
def test_batches_that_are_written_to_leave_kept_samples_alone(
    data: Dataset, num_workers: int, arguments: dict[str, Any]
) -> None:
    persistent = bool(num_workers) and "collate_fn" in arguments
    options = {"num_workers": num_workers, "persistent_workers": persistent, **arguments}
    loader = loader_of(data, keep=Keep(**MEMORY), **options)
    for wanted in epochs(data, **options):
        for batch, other in zip(loader, wanted, strict=True):
            assert same(batch, other)
            for value, _ in [batch] if arguments.get("batch_size", 0) is None else batch:
                value.fill_(7)


@settings(max_examples=examples(8), deadline=None, suppress_health_check=list(HealthCheck))
@given(chain=chains(), views=st.none() | st.integers(1, 2), batch_size=st.integers(1, 5))
def test_any_chain_gives_the_same_with_kept_samples(
    tmp_path_factory: pytest.TempPathFactory, chain: Any, views: int | None, batch_size: int
) -> None:
    decoder = chain.stages[0].name
    suffix = {"decode": "jpg", "decode_wav": "wav", "load_tensor": "npy"}[decoder]
    named = {f"a/{at:02}.{suffix}": blob for at, blob in enumerate(3 * STORED[decoder])}
    made_of = index(write(tmp_path_factory.mktemp("any"), named), stages=chain.stages)
    arguments: dict[str, Any] = {"batch_size": batch_size, "views": views}
    try:
        reference = epochs(made_of, **arguments)
    except (BadSample, RuntimeError):  # too small for a stage, or of sizes that form no batch
        assume(False)
    keep = Keep(memory="64 MB", disk="64 MB", folder=tmp_path_factory.mktemp("kept"))
    assert same(epochs(made_of, keep=keep, **arguments), reference)
    assert same(epochs(made_of, keep=keep, **arguments), reference)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_large_samples_without_memory_are_on_disk_after_one_epoch(
    tmp_path: Path, disk: Keep, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few of them fill a shard, and a batch has more."""
    monkeypatch.setattr(SampleSeconds, "mean", lambda _: 5.0)
    data = stored(tmp_path / "data", (Decode(), Resize((224, 224)), Normalize()))
    loader = loader_of(data, keep=disk, num_workers=num_workers)
    found = [list(loader)]
    loader._samples._features.flush(wait=True)
    assert same([*found, list(loader)], epochs(data, 2)) and loader.report.kept == COUNT


def test_a_later_loader_computes_few_samples_and_finds_the_others(data: Dataset, disk: Keep) -> None:
    first = loader_of(data, keep=disk)
    list(first)
    first._samples._features.close()
    watched, reads = counted(data)
    second = loader_of(watched, keep=disk)
    assert same([list(second) for _ in range(3)], epochs(data))
    assert len(reads.paths) == min(CHECKED_ROWS, COUNT) and second.report.kept == 3 * COUNT


def test_a_product_with_another_device_and_micro_batch_finds_the_same_samples(
    tmp_path: Path, disk: Keep
) -> None:
    data = stored(tmp_path / "data", RANDOM)
    loader = loader_of(data, keep=disk)
    list(loader)
    loader._samples._features.close()
    other = KeptFeatures(
        disk, micro_batch=16, seed=99, device=torch.device("meta"), saved_s=lambda: 1.0, num_threads=7
    )
    stretch = other.stretch(data, position=data.chain.first_draw, view=None)
    assert stretch.find(data, range(COUNT)) == frozenset(range(COUNT))
    other.close()


def test_part_of_a_dataset_keeps_its_own_rows(tmp_path: Path, disk: Keep) -> None:
    data = stored(tmp_path / "data")
    part = Subset(data, [3, 1, 19, 7])
    assert same(epochs(part, keep=disk), epochs(part))


def test_views_repeat_and_are_kept_as_finished_samples(tmp_path: Path, disk: Keep) -> None:
    data = stored(tmp_path / "data", RANDOM)
    plain = epochs(data, 4, views=2, shuffle=False)
    assert same(plain[0], plain[2]) and same(plain[1], plain[3]) and not same(plain[0], plain[1])
    assert same(plain[:2], epochs(data, 2, shuffle=False))
    watched, reads = counted(data)
    for num_workers in (0, 1):
        loader = loader_of(watched, keep=disk, views=2, shuffle=False, num_workers=num_workers)
        found = [list(loader) for _ in range(2)]
        loader._samples._features.flush(wait=True)
        before = len(reads.paths)
        assert same(found + [list(loader) for _ in range(2)], plain) and len(reads.paths) == before
        loader._samples._features.close()


def test_views_without_random_stages_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = stored(tmp_path / "data", STEADY)
    with caplog.at_level(logging.INFO, "upriver"):
        assert same(epochs(data, views=3), epochs(data))
    assert "views=3 changes nothing" in caplog.text


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("fault", ["changed", "gone"])
def test_an_object_that_changed_raises_as_without_kept_samples(
    tmp_path: Path, num_workers: int, fault: str
) -> None:
    data = stored(tmp_path / "data", STEADY)
    kept, plain = loader_of(data, keep=Keep(**MEMORY), num_workers=num_workers), loader_of(data)
    assert same(list(kept), list(plain))
    file = tmp_path / "data" / data.locate([5])[0].object
    if fault == "changed":
        file.write_bytes(encoded(pixels(50, 50, 99)))
    else:
        file.unlink()
    found, wanted = raised_in(kept), raised_in(plain)
    assert same(found[0], wanted[0]) and found[1] == wanted[1]
    assert [kind for kind, _ in found[1]] == [ObjectChanged if fault == "changed" else ObjectNotFound]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_objects_of_a_store_that_is_listed_are_looked_up_in_each_epoch(num_workers: int) -> None:
    store = Store.open(f"memory://kept-{num_workers}")
    for at in range(12):
        store.put(f"a/{at:02}.jpg", encoded(pixels(40, 40, at)))
    data = index(store, stages=LATE)
    kept, plain = loader_of(data, keep="auto", num_workers=num_workers), loader_of(data)
    assert same([list(kept), list(kept)], [list(plain), list(plain)]) and kept.report.kept == 12
    store.put("a/05.jpg", encoded(pixels(40, 40, 99)))
    found, wanted = raised_in(kept), raised_in(plain)
    assert same(found[0], wanted[0]) and found[1] == wanted[1] and len(wanted[1]) == 1
    assert kept.report.kept == 23


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_that_cannot_be_read_are_never_kept(tmp_path: Path, disk: Keep, num_workers: int) -> None:
    data = stored(tmp_path / "data")
    file = tmp_path / "data" / data.locate([5])[0].object
    file.write_bytes(file.read_bytes()[:200])
    data = index((tmp_path / "data").as_uri(), stages=RANDOM)
    bad = next(at for at in range(COUNT) if data.locate([at])[0].object.endswith(file.name))
    kept, plain = loader_of(data, keep=disk, num_workers=num_workers), loader_of(data)
    for _ in range(3):
        found, wanted = raised_in(kept), raised_in(plain)
        assert same(found[0], wanted[0])
        assert [kind for kind, _ in found[1]] == [kind for kind, _ in wanted[1]] == [BadSample]
        kept._samples._features.flush(wait=True)
    assert kept._samples.holds(list(range(COUNT)), 3)[bad] is False


def test_a_row_that_differs_empties_the_folder_and_is_never_used(
    data: Dataset, disk: Keep, caplog: pytest.LogCaptureFixture
) -> None:
    first = loader_of(data, keep=disk)
    samples = first._samples
    samples.begin(0)
    wrong = {at: row + 1 for at, row in enumerate(_rows(data, samples.position))}
    samples.keep(wrong, 0, seconds=1.0)
    samples._features.close()
    loader = loader_of(data, keep=disk)
    assert same([list(loader) for _ in range(2)], epochs(data, 2))
    assert "differ from those that are computed now" in caplog.text


def _rows(data: Dataset, position: int) -> list[torch.Tensor]:
    rows = []
    for at, ref in enumerate(data.locate(range(COUNT))):
        blob = torch.frombuffer(bytearray(data.store.get(ref.object)), dtype=torch.uint8)
        rows.append(data.run(blob, sample=at, epoch=0, seed=SEED, start=data.chain.start, stop=position))
    return rows


@pytest.mark.parametrize("num_workers", some(1, [1, 0]))
def test_damaged_and_truncated_files_cost_time_and_no_bit(
    data: Dataset, disk: Keep, num_workers: int
) -> None:
    first = loader_of(data, keep=disk)
    list(first)
    first._samples._features.close()
    shards = [each for each in Path(disk.path).rglob("*") if each.is_file() and each.stat().st_size > 5000]
    assert shards
    for number, each in enumerate(shards):
        content = bytearray(each.read_bytes())
        for at in range(0, len(content), 97):
            content[at] ^= 0x55
        each.write_bytes(content[: len(content) // (1 + number % 2)])
    loader = loader_of(data, keep=disk, num_workers=num_workers)
    assert same([list(loader) for _ in range(3)], epochs(data))


def test_files_that_are_damaged_under_way_cost_time_and_no_bit(data: Dataset, disk: Keep) -> None:
    first = loader_of(data, keep=disk)
    list(first)
    first._samples._features.close()
    loader = loader_of(data, keep=disk)
    wanted = epochs(data, 2)
    iterator = iter(loader)
    found = [next(iterator)]
    for each in Path(disk.path).rglob("*"):
        if each.is_file() and each.stat().st_size > 5000:
            with each.open("r+b") as opened:
                opened.seek(2000)
                opened.write(bytes(each.stat().st_size - 4000))
    assert same([found + list(iterator), list(loader)], wanted)


@pytest.mark.parametrize("num_workers", some(1, [1, 0]))
def test_a_disk_that_is_full_costs_time_and_no_batch(
    data: Dataset, disk: Keep, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StretchFolder, "append", full)
    loader = loader_of(data, keep=disk, num_workers=num_workers)
    assert same([list(loader) for _ in range(2)], epochs(data, 2))


def test_a_fault_in_keeping_is_told_once_and_costs_no_batch(
    data: Dataset, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no memory")

    loader = loader_of(data, keep=Keep(**MEMORY))
    monkeypatch.setattr("upriver.features.kept.KeptStretch.keep", fail)
    assert same([list(loader) for _ in range(2)], epochs(data, 2))
    assert caplog.text.count("samples are not kept") == 1 and "no memory" in loader.kept


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_loader_resumed_at_any_batch_gives_the_rest(data: Dataset, num_workers: int) -> None:
    wanted = epochs(data, 2)
    count = len(wanted[0])
    for at in range(2 * count) if not num_workers else (1, count + 1):
        loader = loader_of(data, keep=Keep(**MEMORY), num_workers=num_workers)
        for _ in range(at // count):
            list(loader)
        iterator = iter(loader)
        for _ in range(at % count):
            next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
        other = loader_of(data, keep=Keep(**MEMORY))
        other.load_state_dict(state)
        assert same(list(other), wanted[at // count][at % count :])


def test_a_state_of_other_views_is_refused(tmp_path: Path) -> None:
    data = stored(tmp_path / "data")
    state = loader_of(data, views=2).state_dict()
    loader_of(data, views=2).load_state_dict(state)
    for views in (None, 3):
        with pytest.raises(ConfigError, match="its views is 2"):
            loader_of(data, views=views).load_state_dict(state)
    older = {name: value for name, value in state.items() if name != "views"}
    loader_of(data).load_state_dict(older)


def test_kept_samples_take_no_shared_memory(data: Dataset) -> None:
    before = shared()
    loader = loader_of(data, keep=Keep(**MEMORY), num_workers=1)
    list(loader)
    list(loader)
    wait_for(lambda: not shared() - before)


def test_kept_samples_go_through_a_pipe_where_shared_memory_is_nearly_full(
    data: Dataset, disk: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = loader_of(data, keep=disk)
    list(first)
    first._samples._features.close()
    monkeypatch.setattr(shared_memory, "ROOM_BYTES", 2**62)
    loader = loader_of(data, keep=disk, num_workers=1, collate_fn=list)
    assert same([list(loader) for _ in range(2)], epochs(data, 2, collate_fn=list))
    assert loader.report.kept == 2 * COUNT


def test_own_memory_of_a_part_is_a_copy_with_the_same_order() -> None:
    block = torch.arange(60.0).reshape(3, 4, 5)
    part = block[1].t()
    own = own_memory(part)
    assert own.untyped_storage().nbytes() == own.nbytes and own.stride() == part.stride()
    assert torch.equal(own, part) and own_memory(own) is own


SCRIPT = """
import os, signal, sys
from tests.dataloader.keeping.world import loader_of, CHAINS
from upriver.features.keep import Keep
from upriver.pipeline import index
data = index(sys.argv[1], stages=CHAINS["random"])
loader = loader_of(data, keep=Keep(memory=0, disk="64 MB", folder=sys.argv[2]))
list(loader)
loader._samples._features.flush(wait=True)
iterator = iter(loader)
next(iterator)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_job_finds_the_samples_of_a_killed_one(tmp_path: Path, disk: Keep) -> None:
    data = stored(tmp_path / "data", RANDOM)
    command = [sys.executable, "-c", SCRIPT, data.store.uri, str(disk.folder)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=False)
    assert done.returncode == -signal.SIGKILL
    watched, reads = counted(data)
    loader = loader_of(watched, keep=disk)
    assert same([list(loader)], epochs(data, 1))
    assert len(reads.paths) == CHECKED_ROWS and loader.report.kept == COUNT


@pytest.mark.parametrize("keep", ["memory", 3, True, {"memory": 0}])
def test_keep_that_names_no_room_is_refused(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(ConfigError, match=r"keep must be None, 'auto' or an upriver\.Keep"):
        DataLoader(stored(tmp_path / "data"), keep=keep)


@pytest.mark.parametrize("views", [0, -1, True, 1.5, "2"])
def test_views_that_are_no_number_are_refused(tmp_path: Path, views: Any) -> None:
    with pytest.raises(ConfigError, match="views must be a whole number"):
        DataLoader(stored(tmp_path / "data"), views=views)


@pytest.mark.parametrize("option", [{"keep": "auto"}, {"views": 2}])
def test_a_dataset_without_etags_keeps_nothing(option: dict[str, Any]) -> None:
    named = dataset("tests.dataloader.toy_datasets:Plain", count=4)
    for each in (Plain(4), named):
        with pytest.raises(ConfigError, match=r"is for a dataset of upriver\.index"):
            DataLoader(each, **option)
