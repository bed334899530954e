"""Check that a second, equal job starts from the first job's measurements; the canary runs all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import upriver
from tests.finetune.training import photos as make_photos
from tests.finetune.training import run, same
from upriver.errors import NotExact
from upriver.finetune import planner
from upriver.finetune.calibration import measurement, time_budget
from upriver.finetune.calibration.local_canary import LocalCanary
from upriver.finetune.calibration.server_gate import ServerGate
from upriver.pipeline import Dataset
from upriver.profile import profile_from_json, profile_to_json
from upriver.profile.profile_cache import as_of_today, slowdown
from upriver.rpc.link_probe import measure_link
from upriver.rpc.server_verification import ServerVerifier
from upriver.types import Profile, Tier

USED = "using the profile of an earlier job"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_photos(tmp_path_factory.mktemp("store"), 60)


@pytest.fixture(scope="module")
def near() -> Iterator[upriver.Near]:
    with upriver.connect(server_threads=1) as near:
        yield near


class Seen:
    """Record how jobs got their plans."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.canaries: list[int] = []
        self.here: list[str] = []
        self.links = 0
        self.profiles: list[Profile] = []

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Seen:
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path / "cache"))
    seen = Seen()

    def watched(name: str, where: object, note: Callable[..., None]) -> None:
        real = getattr(where, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            note(result, kwargs)
            return result

        monkeypatch.setattr(where, name, call)

    watched("measure", ServerGate, lambda _, kwargs: seen.canaries.append(kwargs["stop"]))
    for name in ("run", "run_in_steps"):
        watched(name, LocalCanary, lambda *_, name=name: seen.here.append(name))
    watched("make_plan", planner, lambda _, given: seen.profiles.append(given["profile"]))

    def link(server: Any) -> Any:
        seen.links += 1
        return measure_link(server)

    monkeypatch.setattr(measurement, "measure_link", link)
    monkeypatch.setattr(time_budget, "SHARE", 0.0)  # otherwise a later job may afford the second size
    # On a busy machine a canary may take far longer than the value cached a moment ago.
    monkeypatch.setattr(measurement, "slowdown", lambda *args, **kwargs: 1.0)
    return seen


def again(near: Any, data: Dataset, seen: Seen, **options: Any) -> Any:
    seen.clear()
    options = {"policy": "hapi", "epochs": 1, "on_progress": seen.told.append, **options}
    return run(near, data, **options)


def stage_seconds(profile: Profile) -> list[Any]:
    return [stage.seconds for stage in (*profile.input_stages, *profile.stages)]


@pytest.mark.full
def test_the_second_job_does_not_measure_stages(data: Dataset, near: upriver.Near, seen: Seen) -> None:
    losses, model, job = again(near, data, seen)
    assert USED not in seen.told
    assert "measuring this side" in seen.told
    assert seen.here == ["run", "run_in_steps"]
    freeze = job.plan.table[-1].cut
    assert seen.canaries.count(freeze) >= 2
    [measured] = seen.profiles

    second_losses, second_model, second = again(near, data, seen)
    assert seen.told.count(USED) == 1
    assert not [text for text in seen.told if text.startswith("measuring") and text != "measuring the link"]
    assert seen.here == ["run"]  # the canary's other half
    assert seen.canaries.count(freeze) == 1
    assert seen.links == 1
    assert stage_seconds(seen.profiles[0]) == stage_seconds(measured)
    assert [stage.out_bytes for stage in seen.profiles[0].input_stages] == [
        stage.out_bytes for stage in measured.input_stages
    ]
    assert second.plan.feasible
    assert "earlier" not in second.plan.why
    assert same((losses, model), (second_losses, second_model))


@pytest.mark.full
def test_what_was_kept_decides(data: Dataset, near: upriver.Near, seen: Seen, tmp_path: Path) -> None:
    """One profile makes the model almost free at the server and very costly here; another is its opposite."""
    again(near, data, seen)
    [path] = (tmp_path / "cache" / "profiles").glob("*.profile.json")
    first = profile_from_json(path.read_text())
    cuts = []
    for storage, compute in ((1e-9, 10.0), (10.0, 1e-9)):
        stages = [
            replace(stage, seconds={"storage": (0.0, storage), "compute": (0.0, compute)})
            for stage in first.stages
        ]
        path.write_text(profile_to_json(replace(first, stages=tuple(stages))))
        _, _, job = again(near, data, seen, policy="exhaustive")
        assert USED in seen.told
        cuts.append(job.plan.cut)
    assert cuts[0] == first.freeze
    assert cuts[1] <= 0


@pytest.mark.full
def test_a_tier_that_is_slower_than_it_was_kept_is_planned_with_as_it_is(
    data: Dataset, near: upriver.Near, seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again(near, data, seen)
    [path] = (tmp_path / "cache" / "profiles").glob("*.profile.json")
    first = profile_from_json(path.read_text())
    fast = as_of_today(first, {Tier.STORAGE: 1e-3})
    path.write_text(profile_to_json(fast))
    monkeypatch.setattr(measurement, "slowdown", slowdown)
    _, _, job = again(near, data, seen)
    assert USED in seen.told
    assert seen.canaries[:2] == [first.freeze] * 2  # the first run may be an outlier
    [profile] = seen.profiles
    [by] = {
        round(now.seconds["storage"][1] / kept.seconds["storage"][1])
        for now, kept in zip(profile.stages, fast.stages, strict=True)
    }
    assert by > 20
    assert "the storage tier takes" in job.plan.why
    assert profile_from_json(path.read_text()) == fast  # one run is no measurement


@pytest.mark.full
def test_a_damaged_profile_is_measured_anew(
    data: Dataset, near: upriver.Near, seen: Seen, tmp_path: Path
) -> None:
    again(near, data, seen)
    [path] = (tmp_path / "cache" / "profiles").glob("*.profile.json")
    path.write_text(path.read_text().replace('"stages"', '"stagesx"'))
    again(near, data, seen)
    assert USED not in seen.told
    again(near, data, seen)
    assert USED in seen.told


@pytest.mark.full
def test_another_job_measures_for_itself(data: Dataset, near: upriver.Near, seen: Seen) -> None:
    again(near, data, seen)
    again(near, data, seen, micro_batch=4)
    assert USED not in seen.told
    again(near, data.with_stages([*data.chain.stages[:2], data.chain.stages[3]]), seen)
    assert USED not in seen.told


@pytest.mark.full
def test_the_canary_still_keeps_a_server_out(
    data: Dataset, near: upriver.Near, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    again(near, data, seen)

    def differs(self: ServerVerifier, *args: Any) -> None:
        raise NotExact("other bits")

    monkeypatch.setattr(ServerVerifier, "check_canary", differs)
    losses, _, job = again(near, data, seen)
    assert "other bits" in job.plan.why
    assert set(job.report.samples) == {"local"}
    assert all(torch.isfinite(loss) for loss in losses)


@pytest.mark.full
def test_with_no_cache_every_job_measures(
    data: Dataset, near: upriver.Near, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPRIVER_CACHE", "/dev/null")
    for _ in range(2):
        again(near, data, seen)
        assert USED not in seen.told
        assert seen.here == ["run", "run_in_steps"]
