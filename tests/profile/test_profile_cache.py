"""Check that a cached profile is found for exactly equal questions, and for no others."""

import os
import threading
import time
from dataclasses import replace

import pytest

from upriver.profile import profile_cache
from upriver.profile.profile_cache import (
    MAX_AGE_S,
    ProfileKey,
    TierIdentity,
    as_of_today,
    load_profile,
    save_profile,
    slowdown,
)
from upriver.profile.serialization import cluster_from_json, profile_from_json
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
    Timings,
)

HERE = TierIdentity(host="here", device="cpu", threads=2, versions={"torch": "2", "pillow": "11"})
THERE = replace(HERE, host="there", workers=3)
KEY = ProfileKey(program="ab" * 32, dataset="cd" * 32, micro_batch=8, storage=THERE, compute=HERE)
CLUSTER = Cluster(
    link=Link(bandwidth_bytes_per_s=1e6, rtt_s=0.01),
    storage=StorageTier(
        memory_bytes=float("inf"), micro_batch=8, seconds_per_byte={"read": 1e-9, "encode": 2e-9}
    ),
    compute=ComputeTier(memory_bytes=1e9, micro_batch=8, seconds_per_byte={"decode": 3e-9}),
)


def stage(name, seconds=0.25):
    both = {"storage": (0.0, seconds), "compute": (0.0, 2 * seconds)}
    return StageProfile(name=name, kind="conv", out_bytes=100, seconds=both, peak_bytes=7)


def profile(seconds=0.25):
    return Profile(
        model="small",
        freeze=2,
        input=InputProfile(stored_bytes=10, tensor_bytes=20),
        stages=(stage("a", seconds), stage("b")),
        input_stages=(stage("decode"),),
        tail=TailProfile(seconds=(0.0, 0.1)),
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path))
    return tmp_path / "profiles"


def load(key=KEY, *, stages=("a", "b"), input_stages=("decode",)):
    return load_profile(key, stages=stages, input_stages=input_stages)


def test_what_was_kept_comes_back_equal(folder):
    assert load() is None
    save_profile(KEY, profile(), CLUSTER)
    assert (load().profile, load().cluster) == (profile(), CLUSTER)
    save_profile(KEY, profile(0.5), CLUSTER)
    assert load().profile == profile(0.5)
    assert len(list(folder.iterdir())) == 2


def test_the_files_are_those_that_plan_reads(folder):
    save_profile(KEY, profile(), CLUSTER)
    [cluster, kept] = sorted(folder.iterdir())
    assert profile_from_json(kept.read_text()) == profile()
    assert cluster_from_json(cluster.read_text()) == CLUSTER


@pytest.mark.parametrize(
    "other",
    [
        replace(KEY, program="ef" * 32),
        replace(KEY, dataset="ef" * 32),
        replace(KEY, micro_batch=16),
        replace(KEY, storage=HERE, compute=THERE),
        *(
            replace(KEY, **{tier: replace(place, **change)})
            for tier, place in (("storage", THERE), ("compute", HERE))
            for change in (
                {"host": "elsewhere"},
                {"device": "cuda"},
                {"threads": 4},
                {"workers": 7},
                {"versions": {"torch": "2", "pillow": "12"}},
                {"versions": {"torch": "2"}},
            )
        ),
    ],
)
def test_anything_else_is_not_found(folder, other):
    save_profile(KEY, profile(), CLUSTER)
    assert load(other) is None


def test_the_order_of_versions_is_no_difference(folder):
    save_profile(KEY, profile(), CLUSTER)
    turned = replace(HERE, versions=dict(reversed(HERE.versions.items())))
    assert load(replace(KEY, compute=turned)) is not None


def test_other_versions_of_the_package_measure_anew(folder, monkeypatch):
    save_profile(KEY, profile(), CLUSTER)
    monkeypatch.setattr("upriver.__version__", "99")
    assert load() is None


@pytest.mark.parametrize("part", ["profile", "cluster"])
@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"\xff\xfe", b"null", b"[" * 100_000, b'{"schema": "upriver.profile/2"}', None],
)
def test_damaged_files_are_ignored_and_replaced(folder, part, damage):
    save_profile(KEY, profile(), CLUSTER)
    [path] = folder.glob(f"*.{part}.json")
    if damage is None:
        path.unlink()
        path.mkdir()
        assert load() is None
        path.rmdir()
    else:
        path.write_bytes(damage)
        assert load() is None
    save_profile(KEY, profile(), CLUSTER)
    assert load() is not None


def test_a_profile_of_other_stages_is_ignored(folder):
    save_profile(KEY, profile(), CLUSTER)
    assert load(stages=("a", "c")) is None
    assert load(stages=("a",)) is None
    assert load(input_stages=()) is None


@pytest.mark.parametrize("missing", ["storage", "compute"])
def test_a_profile_without_seconds_of_a_main_processor_is_ignored(folder, missing):
    """``upriver plan`` reads it; a lookup in the cache asks each stage for both."""
    seconds = {**stage("b").seconds, f"{missing}.cpu": (0.0, 0.1)}
    del seconds[missing]
    save_profile(KEY, replace(profile(), stages=(stage("a"), replace(stage("b"), seconds=seconds))), CLUSTER)
    assert load() is None


def test_an_old_profile_is_measured_anew(folder):
    save_profile(KEY, profile(), CLUSTER)
    for path in folder.iterdir():
        os.utime(path, (0, time.time() - MAX_AGE_S - 60))
    assert load() is None


def test_an_endless_file_is_not_read(folder, monkeypatch):
    save_profile(KEY, profile(), CLUSTER)
    monkeypatch.setattr("upriver.cache.MAX_FILE_BYTES", 10)
    assert load() is None


@pytest.mark.parametrize("off", [os.devnull, "/dev/null/nowhere"])
def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch, off):
    monkeypatch.setenv("UPRIVER_CACHE", off)
    save_profile(KEY, profile(), CLUSTER)
    assert load() is None


def test_the_oldest_go_when_there_are_too_many(folder, monkeypatch):
    monkeypatch.setattr(profile_cache._PROFILES, "_max_files", 6)
    keys = [replace(KEY, micro_batch=size) for size in range(1, 6)]
    for age, key in enumerate(reversed(keys)):
        tier = replace(CLUSTER.storage, micro_batch=key.micro_batch)
        save_profile(key, profile(), replace(CLUSTER, storage=tier))
        for path in folder.glob(f"{key.digest}*"):
            os.utime(path, (0, time.time() - 1000 + age))
    assert [load(key) is not None for key in keys] == [True, True, True, False, False]
    assert len(list(folder.iterdir())) == 6


def test_many_jobs_may_write_and_read_at_once(folder):
    save_profile(KEY, profile(), CLUSTER)
    missed = []

    def work():
        for _ in range(20):
            save_profile(KEY, profile(), CLUSTER)
            if load() is None:
                missed.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not missed
    assert len(list(folder.iterdir())) == 2


def run(*seconds):
    return Timings(stages=dict(enumerate(seconds)))  # positions 0 (decode), 1 and 2


def test_the_fastest_run_says_how_much_slower_a_tier_is_today():
    kept = replace(profile(), stages=(replace(stage("a"), seconds={"storage": (1.0, 0.25)}), stage("b")))
    # decode, a and b at 8 samples: 2 + 3 + 2 seconds
    assert slowdown(kept, Tier.STORAGE, [run(2, 3, 2)], samples=8) == 1
    assert slowdown(kept, Tier.STORAGE, [run(40, 90, 70), run(7, 10, 4)], samples=8) == 3
    assert slowdown(kept, Tier.STORAGE, [run(1, 1, 1.5)], samples=8) == 0.5
    assert slowdown(profile(), Tier.COMPUTE, [run(8, 8, 8)], samples=8) == 2
    free = replace(profile(0.0), stages=(stage("a", 0.0), stage("b", 0.0)), input_stages=())
    assert slowdown(free, Tier.STORAGE, [run(1, 1, 1)], samples=8) == 1


def test_a_slower_tier_is_slower_in_every_stage_and_the_other_is_not():
    today = as_of_today(profile(), {Tier.STORAGE: 3.0})
    for stages in (today.stages, today.input_stages):
        assert all(stage.seconds == {"storage": (0.0, 0.75), "compute": (0.0, 0.5)} for stage in stages)
    assert replace(today, stages=profile().stages, input_stages=profile().input_stages) == profile()
