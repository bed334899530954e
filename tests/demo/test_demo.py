"""Test a small demo: its comparisons, its output, and its parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from tests.examples import some
from upriver.cli import main
from upriver.demo.bench import same_state
from upriver.demo.data import VERSION
from upriver.demo.model import FREEZE_TO, build_model, calibrate, freeze
from upriver.demo.result import CutShare, DemoResult, TrainingRun
from upriver.demo.run import datasets, images_of
from upriver.demo.settings import DemoSettings
from upriver.demo.usage import UsageRecorder, Used
from upriver.errors import ConfigError
from upriver.rpc.link_meter import LinkMeter


@pytest.mark.slow
@pytest.mark.full
def test_demo_both_ways_give_the_same(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / f"demo-v{VERSION}-10-10-0").symlink_to("nowhere")  # damaged images are made again
    command = [sys.executable, "-m", "upriver", "demo", "--json", "--epochs", "1", "--images", "10"]
    command += [
        "--heldout",
        "10",
        "--batch-size",
        "5",
        "--link-mbit",
        "3",  # so slow that an image is always faster than a layer's output, however busy the cores are
        "--plot",
        str(tmp_path / "demo.png"),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "UPRIVER_CACHE": str(cache), "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("upriver-demo-*"))
    document = json.loads(done.stdout)
    plain, near = document["plain"], document["near_data"]
    assert document["identical"] is True
    assert plain["losses"] == near["losses"]
    assert len(plain["losses"]) == 2
    assert plain["accuracy"] == near["accuracy"]
    for way in (plain, near):
        assert len(way["epoch_s"]) == 1
        assert way["bytes"] == sum(way["epoch_bytes"])
        assert 0 < way["bound_fraction"] <= 1.05  # clocks of two processes
    assert near["cut"] >= 1
    assert near["bytes"] < plain["bytes"] / 2
    # Ten images of 320 to 390 KB each, and the padding between them in a shard.
    assert 10 * 320_000 < plain["bytes"] < 10 * 390_000 + 100_000
    assert set(plain["samples"]) == {"local"}
    assert sum(near["samples"].values()) == sum(plain["samples"].values()) == 20
    assert set(near["samples"]) - {"local"}
    assert document["plot"] == str(tmp_path / "demo.png")
    for said in ("emulated, 3 Mbit/s", "random ones", "cores:"):
        assert said in done.stderr
    assert not (cache / f"demo-v{VERSION}-10-10-0").is_symlink()
    with Image.open(tmp_path / "demo.png") as picture:
        assert picture.format == "PNG"


@pytest.mark.parametrize(
    "bad",
    [
        {"epochs": 0},
        {"batch_size": 0},
        {"images": 9},
        {"heldout": 9},
        {"link_mbit": 0.0},
        {"link_mbit": float("nan")},
    ],
)
def test_bad_settings_are_named(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        DemoSettings(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("plot", ["demo.gif", "/no/x.png", "folder.png", "/dev/full"])
def test_a_picture_that_cannot_be_written_is_found_out_first(
    plot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.png").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("upriver.demo.run.run_demo", lambda *_: pytest.fail("it began"))
    assert main(["demo", "--plot", plot]) == 2
    assert plot in capsys.readouterr().err


class Told:
    """Record the reported values."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def advance(self, what: str, done: int, total: int) -> None:
        pass


@pytest.mark.parametrize("nowhere", some(1, [os.devnull, os.devnull + "/nowhere"]))
def test_where_nothing_can_be_kept_images_go_with_the_run(
    nowhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPRIVER_CACHE", nowhere)
    told = Told()
    with images_of(DemoSettings(images=10, heldout=10), told) as data:
        assert sorted(path.name for path in data.root.iterdir()) == ["content.sha256", "heldout", "train"]
        assert data.root.is_absolute()
    assert not data.root.parent.exists()
    [line] = told.lines
    assert nowhere in line and "for this run alone" in line


@pytest.mark.full
def test_few_images_set_the_batch_statistics_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UPRIVER_CACHE", "relative")
    told = Told()
    with images_of(DemoSettings(images=10, heldout=10), told) as data:
        train, _ = datasets(data.root)
    assert data.root.parent == tmp_path / "relative" and not told.lines
    norm, passed = nn.BatchNorm2d(3), []
    norm.register_forward_hook(lambda module, inputs, output: passed.append(inputs[0]))
    calibrate(norm, train, seed=0)
    [images] = passed
    assert images.shape == (10, 3, 224, 224)
    assert torch.allclose(norm.running_mean, images.mean((0, 2, 3)), atol=1e-5)
    assert norm.momentum == 0.1


def test_model_is_the_same_for_a_seed_and_says_where_its_weights_are_from(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    (one, origin), (two, _), (other, _) = (build_model(7, seed=seed, cache=tmp_path) for seed in (0, 0, 1))
    assert origin == "random"
    assert same_state(one, two)
    assert not same_state(one, other)
    assert torch.equal(torch.get_rng_state(), state)
    freeze(one)
    trainable = {name.rpartition(".")[0] for name, p in one.named_parameters() if p.requires_grad}
    assert all(name.startswith(("layer4.1", "fc")) for name in trainable)
    assert not any(p.requires_grad for p in one.get_submodule(FREEZE_TO).parameters())
    assert one.get_submodule("fc").weight.shape == (7, 512)


def test_a_file_that_only_has_the_name_of_the_published_weights_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "resnet18-f37072fd.pth").write_bytes(b"anything")
    _, origin = build_model(7, seed=0, cache=tmp_path)
    assert origin == "random"


def test_weights_from_a_safetensors_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from upriver.program.models.registry import load_model

    source, _ = load_model("torchvision:resnet18", seed=5)
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    model, origin = build_model(7, seed=0, weights=tmp_path / "weights.safetensors")
    assert origin.endswith("weights.safetensors")
    assert torch.equal(model.get_submodule("conv1").weight, source.get_submodule("conv1").weight)


def test_same_state_sees_one_bit_and_buffers() -> None:
    one, two = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    assert same_state(one, two)
    two.running_mean[1] = 1e-45
    assert not same_state(one, two)


def test_bound_is_the_busiest_resource() -> None:
    before = Used(link_bytes=10, trainer_s=1.0, server_s=2.0)
    for used, bound in (((1010, 2.0, 3.0), 10.0), ((10, 41.0, 3.0), 40.0), ((10, 2.0, 32.0), 30.0)):
        now = Used(link_bytes=used[0], trainer_s=used[1], server_s=used[2])
        assert now.since(before).bound_s(100.0) == bound


def _way(parts: dict[int, float], seconds: float, num_bytes: int) -> TrainingRun:
    names = {-4: "as stored", 11: "layer4.0"}
    return TrainingRun(
        epoch_s=(seconds, seconds),
        epoch_bytes=(num_bytes, num_bytes),
        losses=(2.0, 1.0),
        accuracy=0.75,
        parts=tuple(CutShare(cut=cut, after=names[cut], share=share) for cut, share in parts.items()),
        why="it is the least",
        plan="the table",
        bound_s=(seconds / 2, seconds / 2),
        samples={"local": 4},
        num_workers=2,
        busy=((), ()),
    )


def test_usage_recorder_says_when_each_was_busy() -> None:
    meter = LinkMeter(1e6)
    with (
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) as server,
        UsageRecorder(server.pid, meter) as recorder,
    ):
        meter.account(300_000, "answers")
        server.kill()
    busy = recorder.busy(1e6)
    assert busy[0].start_s == 0 and all(a.stop_s == b.start_s for a, b in pairwise(busy))
    crossed = sum(span.link * (span.stop_s - span.start_s) for span in busy)
    assert 0.2 < crossed <= 0.3 + 1e-6  # a first piece may pass at once
    assert all(0 <= share <= 1 for span in busy for share in span[2:])
    assert any(span.storage > 0 for span in busy)


def test_result_as_json_and_as_a_table() -> None:
    result = DemoResult(
        plain=_way({-4: 1.0}, 30.0, 3_000_000),
        near_data=_way({-4: 0.25, 11: 0.75}, 10.0, 1_000_000),
        identical=True,
        num_classes=10,
        conditions={"link_mbit": 20.0},
        worker_trials={1: 2.0, 2: 1.0},
    )
    document = json.loads(json.dumps(result.to_json()))
    assert document["speedup"] == 3.0
    assert document["near_data"]["cut"] == 11
    assert document["near_data"]["after"] == "layer4.0"
    assert [part["share"] for part in document["near_data"]["parts"]] == [0.25, 0.75]
    assert document["plain"]["bytes"] == 6_000_000
    assert document["plain"]["bound_fraction"] == 0.5
    assert "25% at -4 (as stored), 75% at 11 (layer4.0)" in result.table()
    assert result.plain.cuts == "-4 (as stored)"
    assert "3.00 times" in result.verdict()
    assert "identical" in result.verdict()
    assert (
        "DIFFER"
        in DemoResult(
            plain=result.plain,
            near_data=result.near_data,
            identical=False,
            num_classes=10,
            conditions={},
            worker_trials={},
        ).verdict()
    )
