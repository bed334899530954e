"""Test ``upriver train``: its files, its output, and resuming after an interruption."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from tests.conftest import fill
from tests.examples import some
from upriver import files
from upriver.cli import main
from upriver.cli.train import checkpoint
from upriver.cli.train import command as train
from upriver.cli.train.loop import fit_classifier, make_optimizer
from upriver.errors import ConfigError, StoreError

pytestmark = pytest.mark.slow

MODELS = """
from torch import nn

def small():
    features = nn.Sequential(nn.Conv2d(3, 4, 5, stride=2), nn.BatchNorm2d(4), nn.ReLU())
    return nn.Sequential(features, nn.Flatten(), nn.Dropout(0.1), nn.Linear(4 * 6 * 6, 1000))
"""

OWN_HEAD = """
import torch
from torch import nn

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(4, 1000))

    def forward(self, x):
        return x @ self.matrix

class Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Conv2d(3, 4, 5, stride=2), nn.ReLU()), Head()

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))

def headed():
    return Headed()
"""

HELD = """
import sys, time
from upriver.cli import main
from upriver.cli.train import command, loop

asked, told = [], []
request, tell, logits = loop.StopSignal._request, command._tell, loop.logits

def noted_request(self, signum, frame):
    request(self, signum, frame)
    asked.append(signum)

def noted_tell(record):
    told.append(record)
    tell(record)

def held_logits(outputs):
    while len(told) == 2 and not asked:
        time.sleep(0.01)
    return logits(outputs)

loop.StopSignal._request, command._tell, loop.logits = noted_request, noted_tell, held_logits
sys.exit(main())
"""
"""Command that waits within its third epoch until it is interrupted."""

CONFIG = """
model = "trained_models:small"
freeze_to = "0"
store = "{uri}"
path = "train"
heldout = "heldout"
stages = "{folder}/stages.toml"
heldout_stages = "{folder}/stages.toml"
batch_size = 6
micro_batch = 4
lr = 0.01
policy = "nosplit"
output = "{folder}/{output}"
{more}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make two classes of tiny images, input stages, and a model to import."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 20), ("heldout", 6)):
        for number in range(count):
            path = tmp_path / part / ("bright" if number % 2 else "dark")
            path.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 128, (16, 16, 3), dtype=np.uint8) + np.uint8(127 * (number % 2))
            Image.fromarray(pixels).save(path / f"{number}.png")
    stages = ("decode", "random_horizontal_flip", "normalize")
    (tmp_path / "stages.toml").write_text("".join(f'[[stage]]\nstage = "{name}"\n' for name in stages))
    (tmp_path / "trained_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def config(folder: Path, *, output: str = "trained.safetensors", more: str = "epochs = 3") -> str:
    """Write a configuration; return its path. Unless it says otherwise, nothing is kept."""
    path = folder / f"{output}.toml"
    more = more if "keep" in more else f'keep = "nothing"\n{more}'
    path.write_text(CONFIG.format(uri=folder.as_uri(), folder=folder, output=output, more=more))
    return str(path)


def trained(capsys: pytest.CaptureFixture[str], path: str, *options: str) -> dict[str, object]:
    """Run the command; return its parsed output."""
    assert main(["train", path, "--json", *options]) == 0
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


def test_the_model_takes_the_place_of_no_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(config(tmp_path, output="here"))
    path.write_text(path.read_text().replace(f"{tmp_path}/here", os.devnull))
    assert main(["train", str(path)]) == 2
    assert "output must be a file" in capsys.readouterr().err and Path(os.devnull).is_char_device()


def losses(document: dict[str, object]) -> list[float]:
    epochs = document["epochs"]
    assert isinstance(epochs, list)
    return [loss for record in epochs for loss in record["losses"]]


def test_it_trains_and_says_what_it_did(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = trained(capsys, config(folder))
    epochs = document["epochs"]
    assert isinstance(epochs, list)
    assert [record["epoch"] for record in epochs] == [1, 2, 3]
    assert [len(record["losses"]) for record in epochs] == [4, 4, 4]
    assert epochs[2]["loss"] < epochs[0]["loss"]
    assert epochs[2]["accuracy"] == 1.0
    assert epochs[0]["bytes"] > 0
    assert document["samples"] == {"local": 3 * (20 + 6)}
    assert document["skipped"] == []
    state = load_file(folder / "trained.safetensors")
    assert state["3.weight"].shape == (2, 144)  # the classifier was made anew for two classes
    assert {path.name for path in folder.glob("trained.safetensors*")} == {
        "trained.safetensors",
        "trained.safetensors.toml",
    }


@pytest.mark.full
def test_kept_features_change_no_loss(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    views = "epochs = 3\nviews = 1\n"
    plain = trained(capsys, config(folder, more=views))
    kept = f'keep = {{memory = "10 MB", disk = "10 MB", folder = "{folder}/kept"}}'
    document = trained(capsys, config(folder, output="kept.safetensors", more=views + kept))
    assert losses(document) == losses(plain)
    assert document["samples"] == {"local": 20 + 6, "kept": 2 * (20 + 6)}
    assert list((folder / "kept").rglob("rows-*"))


@pytest.mark.parametrize(
    "more",
    [
        'epochs = 2\nautocast = "bfloat16"\ngranularity = "op"',
        pytest.param('epochs = 2\nprefix = "bf16"', marks=pytest.mark.full),
    ],
)
@pytest.mark.full
def test_near_the_data_gives_the_same_file(
    more: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = trained(capsys, config(folder, output="plain.st", more=more))
    path = config(folder, output="near.st", more=more)
    Path(path).write_text(Path(path).read_text().replace('"nosplit"', '"freeze"'))
    near = trained(capsys, path)
    assert isinstance(near["plan"], dict)
    assert near["plan"]["cut"] >= 1
    assert isinstance(near["samples"], dict)
    assert all(source.startswith("http://") for source in near["samples"])
    assert losses(near) == losses(plain)
    assert near["output_sha256"] == plain["output_sha256"]
    uncast = trained(capsys, config(folder, output="uncast.st", more="epochs = 1"))
    assert losses(uncast) != losses(plain)[:4]


def test_it_goes_on_where_it_was_interrupted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = trained(capsys, config(folder, output="whole.st", more="epochs = 5"))
    path = config(folder, output="parts.st", more="epochs = 5")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", HELD, "train", path, "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        said = iter(process.stderr.readline, "")
        assert any(line.startswith("epoch 2:") for line in said)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    assert (folder / "parts.st.checkpoint").exists()
    last = err.splitlines()[-1]
    assert last.startswith("interrupted; the same command goes on from")
    assert last.endswith("parts.st.checkpoint")
    assert not (folder / "parts.st").exists()

    parts = trained(capsys, path)
    assert parts["resumed"] is True
    assert losses(parts) == losses(whole)
    assert parts["output_sha256"] == whole["output_sha256"]
    assert not (folder / "parts.st.checkpoint").exists()


@pytest.mark.full
def test_interrupted_at_every_step(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupt after each single step: the bits equal those of an uninterrupted run."""
    from upriver.cli.train.loop import StopSignal

    whole = trained(capsys, config(folder, output="whole.st", more="epochs = 2"))
    path = config(folder, output="steps.st", more="epochs = 2")
    with monkeypatch.context() as patch:
        patch.setattr(StopSignal, "requested", True, raising=False)
        patch.setattr(StopSignal, "__init__", lambda self: setattr(self, "_before", {}))
        codes = []
        while not codes or codes[-1] == 130:
            codes.append(main(["train", path]))
            assert len(codes) <= 9
    assert codes == [130] * 7 + [0]
    capsys.readouterr()
    assert (folder / "steps.st").read_bytes() == (folder / "whole.st").read_bytes()
    assert whole["resumed"] is False


@pytest.mark.full
def test_a_run_that_goes_on_keeps_the_micro_batch_it_chose(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from upriver.cli.train.loop import StopSignal
    from upriver.finetune.planner import Planner

    def auto(output: str) -> str:
        path = config(folder, output=output, more="epochs = 2")
        Path(path).write_text(Path(path).read_text().replace("micro_batch = 4", 'micro_batch = "auto"'))
        return path

    whole = trained(capsys, config(folder, output="four.st", more="epochs = 2"))
    assert whole["micro_batch"] == 4
    assert trained(capsys, auto("plain.st"))["micro_batch"] == 16  # no server is asked, nothing is measured
    path = auto("parts.st")
    with monkeypatch.context() as patch:
        patch.setattr(Planner, "best_size", lambda self: 4)
        patch.setattr(StopSignal, "requested", True, raising=False)
        patch.setattr(StopSignal, "__init__", lambda self: setattr(self, "_before", {}))
        assert main(["train", path]) == 130
    capsys.readouterr()
    monkeypatch.setattr(Planner, "best_size", lambda self, cut: 2)
    parts = trained(capsys, path)
    assert (parts["resumed"], parts["micro_batch"]) == (True, 4)
    assert losses(parts) == losses(whole)
    assert parts["output_sha256"] == whole["output_sha256"]


def broken_off(capsys: pytest.CaptureFixture[str], path: str, *, code: int = 2) -> str:
    """Run the command, which must end in a checkpoint; return its last line."""
    assert main(["train", path]) == code
    assert Path(f"{path.removesuffix('.toml')}.checkpoint").exists()
    return capsys.readouterr().err


def accuracies(document: dict[str, object]) -> list[float]:
    epochs = document["epochs"]
    assert isinstance(epochs, list)
    return [record["accuracy"] for record in epochs]


def assert_undisturbed(parts: dict[str, object], whole: dict[str, object]) -> None:
    """Assert that a resumed run has every bit of one that never stopped."""
    assert (parts["resumed"], whole["resumed"]) == (True, False)
    assert losses(parts) == losses(whole)
    assert accuracies(parts) == accuracies(whole)
    assert parts["output_sha256"] == whole["output_sha256"]


@pytest.mark.full
def test_an_evaluation_that_fails_costs_no_epoch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = trained(capsys, config(folder, output="whole.st", more="epochs = 2"))
    path = config(folder, output="parts.st", more="epochs = 2")
    photo = folder / "heldout" / "dark" / "0.png"
    content = photo.read_bytes()
    photo.write_bytes(b"not an image")
    for _ in range(2):
        said = broken_off(capsys, path)
        assert "what was trained is in the checkpoint" in said
        assert "heldout/dark/0.png" in said.splitlines()[-1]
    photo.write_bytes(content)
    parts = trained(capsys, path)
    assert_undisturbed(parts, whole)
    assert parts["samples"] == {"local": 6 + 20 + 6}  # the first epoch is evaluated, not trained again
    epochs = parts["epochs"]
    assert isinstance(epochs, list)
    assert epochs[0]["bytes"] > 0


@pytest.mark.full
@pytest.mark.parametrize("ended", [1, pytest.param(2, marks=pytest.mark.full)])
def test_an_interrupted_evaluation_costs_no_epoch(
    ended: int, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from upriver.finetune.job import FinetuneJob

    whole = trained(capsys, config(folder, output="whole.st", more="epochs = 2"))
    path = config(folder, output="parts.st", more="epochs = 2")
    real, calls = FinetuneJob.evaluate, []

    def evaluate(self: FinetuneJob, *arguments: Any) -> float:
        calls.append(1)
        if len(calls) == ended:
            raise KeyboardInterrupt
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(FinetuneJob, "evaluate", evaluate)
        assert "goes on from the checkpoint" in broken_off(capsys, path, code=130)
    parts = trained(capsys, path)
    assert_undisturbed(parts, whole)
    assert parts["samples"] == {"local": 6 + (2 - ended) * (20 + 6)}


def last_of_first_epoch(folder: Path) -> tuple[int, Path]:
    """Return row and file of the last sample of the first epoch."""
    from upriver.finetune.prefetch.sampler import epoch_order
    from upriver.pipeline import imagenet_eval, index
    from upriver.store import Store

    dataset = index(Store.open(folder.as_uri()), "train", stages=imagenet_eval())
    order = epoch_order(len(dataset), seed=0, epoch=0, batch_size=6, micro_batch=4, shuffle=True)
    return order.ids[-1], folder / dataset.locate(order.ids[-1:])[0].object


@pytest.mark.full
def test_a_store_that_fails_costs_no_step(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from upriver.finetune.prefetch import local_source

    whole = trained(capsys, config(folder, output="whole.st", more="epochs = 2"))
    path = config(folder, output="parts.st", more="epochs = 2")
    last, photo = last_of_first_epoch(folder)
    real = local_source.read_samples

    def read(dataset: Any, ids: Any, **options: Any) -> Any:
        if last in ids:
            raise StoreError(f"object {photo.name!r} cannot be read")
        return real(dataset, ids, **options)

    with monkeypatch.context() as patch:
        patch.setattr(local_source, "read_samples", read)
        assert photo.name in broken_off(capsys, path).splitlines()[-1]
    state = checkpoint.job_state(folder / "parts.st.checkpoint")
    assert (state["epoch"], state["step"]) == (0, 2)  # its micro-batch begins in the third step
    parts = trained(capsys, path)
    assert_undisturbed(parts, whole)
    assert parts["samples"] == {"local": 8 + 6 + 20 + 6}


@pytest.mark.full
def test_a_failure_after_the_last_step_trains_no_epoch_twice(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from upriver.errors import ServerUnavailable
    from upriver.finetune.job import FinetuneJob

    whole = trained(capsys, config(folder, output="whole.st", more="epochs = 2"))
    path = config(folder, output="parts.st", more="epochs = 2")

    def failing(self: FinetuneJob, *_arguments: object) -> None:
        if self.state_dict()["step"] == 4:
            raise ServerUnavailable("gone")

    with monkeypatch.context() as patch:
        patch.setattr(FinetuneJob, "_replan", failing)
        broken_off(capsys, path)
    assert checkpoint.job_state(folder / "parts.st.checkpoint")["step"] == 4
    parts = trained(capsys, path)
    assert_undisturbed(parts, whole)
    assert parts["samples"] == {"local": 6 + 20 + 6}


@pytest.mark.full
def test_a_run_that_failed_at_a_sample_goes_on_as_one_that_skips(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, photo = last_of_first_epoch(folder)
    photo.write_bytes(b"not an image")
    row, again = last_of_first_epoch(folder)
    assert again == photo
    whole = trained(capsys, config(folder, output="whole.st", more="epochs = 2"), "--on-bad-sample", "skip")
    path = config(folder, output="parts.st", more="epochs = 2")
    assert photo.name in broken_off(capsys, path).splitlines()[-1]
    assert checkpoint.job_state(folder / "parts.st.checkpoint")["step"] == 2
    parts = trained(capsys, path, "--on-bad-sample", "skip")
    assert_undisturbed(parts, whole)
    assert parts["skipped"] == whole["skipped"] == [row, row]


def interrupted_once(capsys: pytest.CaptureFixture[str], path: str, *options: str) -> None:
    """Leave a checkpoint after the first step."""
    from upriver.cli.train.loop import StopSignal

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StopSignal, "requested", True, raising=False)
        patch.setattr(StopSignal, "__init__", lambda self: setattr(self, "_before", {}))
        assert main(["train", path, *options]) == 130
    capsys.readouterr()


@pytest.mark.parametrize(
    ("then", "now", "named"),
    some(
        1,
        [
            ('on_bad_sample = "skip"', 'on_bad_sample = "fail"', "its on_bad_sample is 'skip', here 'fail'"),
            ('exact = "bitwise"', 'exact = "numeric"', "its exact is 'bitwise', this job's 'numeric'"),
            ('prefix = "bf16"', "", "its prefix is 'bf16', here None"),
        ],
    ),
)
@pytest.mark.full
def test_what_changes_the_training_is_refused(
    then: str, now: str, named: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted_once(capsys, config(folder, more=f"epochs = 2\n{then}"))
    assert main(["train", config(folder, more=f"epochs = 2\n{now}")]) == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('servers = ["https://127.0.0.1:9"]\nca = "nothing.pem"', "cannot read the authorities nothing.pem"),
        ('servers = ["https://127.0.0.1:9"]\nkey = "job.key"', "key was given without certificate"),
        ('servers = ["http://127.0.0.1:9"]\nca = "{folder}/ca.pem"', "ca.pem holds no certificates in PEM"),
        ('servers = ["ray+http://127.0.0.1:9", "http://127.0.0.1:9"]', "give it alone"),
        ("adapt_batch = 6", "adapt_batch must be 0, or a whole number of at least two micro-batches"),
        ("micro_batch = 2\nadapt_batch = 4", "adapt_batch needs exact='numeric'"),
    ],
)
def test_how_servers_are_reached_is_checked_before_anything_is_trained(
    more: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "ca.pem").write_text("no certificate")
    path = Path(config(folder, more=more.format(folder=folder)))
    if "micro_batch = 2" in more:
        path.write_text(path.read_text().replace("micro_batch = 4", "", 1))
    assert main(["train", str(path)]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not list(folder.glob("trained.safetensors*.checkpoint"))


@pytest.mark.full
def test_what_only_says_where_servers_are_may_change(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted_once(capsys, config(folder, more="epochs = 2"))
    more = 'epochs = 2\nservers = ["http://127.0.0.1:9"]\nadapt_batch = 0'
    assert trained(capsys, config(folder, more=more))["resumed"] is True


@pytest.mark.full
def test_fewer_epochs_than_have_begun_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(folder, more="epochs = 3")
    for _ in range(5):
        interrupted_once(capsys, path)
    assert main(["train", config(folder, more="epochs = 1")]) == 2
    assert "is in epoch 2, so epochs must be at least 2, got 1" in capsys.readouterr().err.splitlines()[-1]
    assert len(losses(trained(capsys, config(folder, more="epochs = 2")))) == 8


@pytest.mark.full
def test_train_with_held_out_samples_of_fewer_classes_matches_names_and_reports_what_it_leaves_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (first, *_) = sorted(each.name for each in (folder / "train").iterdir())
    shutil.rmtree(folder / "heldout" / first)
    (folder / "train" / first / "9.tif").write_bytes(b"II*\0")
    assert main(["train", config(folder, more="epochs = 1")]) == 2
    assert f"'train/{first}/9.tif': .tif is not supported" in capsys.readouterr().err
    assert main(["train", config(folder, more='epochs = 1\non_left_out = "report"')]) == 0
    assert f"left out: 1 of a format that is not read ('train/{first}/9.tif')" in capsys.readouterr().err
    (folder / "heldout" / "other").mkdir()
    next((folder / "heldout").glob("*/*.png")).rename(folder / "heldout" / "other" / "0.png")
    assert main(["train", config(folder, output="again.st", more='on_left_out = "report"')]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "heldout 'heldout' has other classes than the training samples: class 'other' is none of" in line


@pytest.mark.full
def test_other_data_is_named_and_changes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(folder)
    interrupted_once(capsys, path)
    before = (folder / "trained.safetensors.checkpoint").read_bytes()
    for part in ("train", "heldout"):
        (folder / part / "grey").mkdir()
        (folder / part / "dark" / "0.png").rename(folder / part / "grey" / "0.png")
    assert main(["train", path]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "the state is of another job: its " in line
    assert line.endswith(f"; delete {folder / 'trained.safetensors.checkpoint'} to start anew")
    assert (folder / "trained.safetensors.checkpoint").read_bytes() == before


@pytest.mark.full
def test_only_the_words_of_a_checkpoint_are_read_for_its_state(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted_once(capsys, config(folder))
    monkeypatch.setattr("safetensors.torch.load_file", lambda *_: pytest.fail("tensors are read"))
    assert checkpoint.job_state(folder / "trained.safetensors.checkpoint")["micro_batch"] == 4


def test_a_checkpoint_of_another_run_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    interrupted_once(capsys, config(folder))
    assert main(["train", config(folder, more="epochs = 3\nseed = 5")]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "its seed is 0, here 5" in line


# ------------------------------------------------------------------------------------- full disks, and locks


def told(monkeypatch: pytest.MonkeyPatch, after: dict[int, Callable[[], object]]) -> None:
    """Call each function once its epoch has been reported."""
    tell = train._tell

    def telling(record: dict[str, Any]) -> None:
        tell(record)
        after.get(record["epoch"], lambda: None)()

    monkeypatch.setattr(train, "_tell", telling)


@pytest.mark.full
def test_a_disk_that_is_full_at_a_checkpoint_ends_no_training(
    folder: Path, small_disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(capsys, config(folder, output="whole.st"))
    kept = small_disk / "out.st.checkpoint"
    found: list[tuple[int, int]] = []

    def look() -> None:
        saved = checkpoint.load(kept, config={})
        found.append((len(saved.progress.epochs), len(list(small_disk.iterdir()))))
        (small_disk / "filler").unlink()

    told(monkeypatch, {1: lambda: fill(small_disk), 2: look})
    path = config(folder, output="disk/out.st")
    assert main(["train", path, "--json"]) == 0
    out, err = capsys.readouterr()
    assert found == [(1, 4)], "the old checkpoint, the output's lock, the settings and what fills the disk"
    assert f"error: cannot write {kept}: " in err and "No space left on device" in err
    assert "; no checkpoint of epoch 2" in err and "epoch 3:" in err and "Traceback" not in err
    assert losses(json.loads(out)) == losses(whole)
    assert json.loads(out)["output_sha256"] == whole["output_sha256"]
    assert sorted(os.listdir(small_disk)) == ["out.st", "out.st.toml"]


@pytest.mark.full
def test_a_disk_that_is_full_at_the_end_costs_no_epoch(
    folder: Path, small_disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(capsys, config(folder, output="whole.st"))
    path = config(folder, output="disk/out.st")
    with monkeypatch.context() as patch:
        told(patch, {3: lambda: fill(small_disk)})
        assert "cannot write" in broken_off(capsys, path).splitlines()[-1]
    (small_disk / "filler").unlink()
    parts = trained(capsys, path)
    assert_undisturbed(parts, whole)
    assert parts["samples"] == {}


def test_room_is_looked_for_before_anything_is_trained(
    folder: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(folder, output="disk/out.st")
    fill(small_disk)
    assert main(["train", path]) == 2
    err = capsys.readouterr().err
    assert re.search(
        r"^error: the disk of .*/disk/out\.st has 0 B free, and training needs [\d.]+ kB", err, re.M
    )
    assert "epoch 1" not in err
    assert sorted(os.listdir(small_disk)) == ["filler", "out.st.toml"]


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_room_for_a_checkpoint_is_what_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.BatchNorm1d(100), nn.Linear(100, 100))
    model[0].requires_grad_(False)
    optimizer = make_optimizer(name, model, lr=0.1, momentum=0.9, weight_decay=0.0)
    model(torch.ones(2, 100)).sum().backward()
    free = 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    output, path = tmp_path / "out", tmp_path / "out.checkpoint"
    with pytest.raises(StoreError) as found:
        checkpoint.check_room(path, output, model, optimizer)
    needed = float(re.search(r"needs ([\d.]+) kB", str(found.value))[1])  # type: ignore[index]
    optimizer.step()
    progress = checkpoint.Progress(config={}, job={}, epochs=[], losses=[])
    checkpoint.save(path, model, optimizer, progress)
    saved = sum(tensor.nbytes for tensor in load_file(path).values()) - torch.get_rng_state().nbytes
    whole = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert needed == pytest.approx((saved + max(saved, whole)) / 1e3, rel=0.01)
    free = round(1e3 * needed)
    checkpoint.check_room(path, output, model, optimizer)


def test_an_output_that_another_run_has_is_refused_by_its_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(folder, more="epochs = 1")
    with files.owned(folder / "trained.safetensors"):
        assert main(["train", path]) == 2
        err = capsys.readouterr().err
        assert re.fullmatch(
            rf"error: process {os.getpid()} on \S+ is writing to {folder}/trained.safetensors: .*\n", err
        )
    (folder / ".trained.safetensors.lock").touch()  # of an owner that was killed
    (folder / ".trained.safetensors.checkpoint-12345678#1").touch()
    trained(capsys, path)
    assert {path.name for path in folder.glob("*trained.safetensors*")} == {
        "trained.safetensors",
        "trained.safetensors.toml",
    }


def test_bad_samples_fail_or_are_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train" / "dark" / "0.png").write_bytes(b"not an image")
    path = config(folder, more="epochs = 1")
    assert main(["train", path]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    assert "train/dark/0.png" in line
    document = trained(capsys, path, "--on-bad-sample", "skip")
    assert document["skipped"] == [10]  # rows: bright first, then dark, each by name
    assert not list(folder.glob(".trained*"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("epoch = 3", "epoch"),
        ("epochs = 0", "epochs"),
        ('epochs = "3"', "epochs"),
        ("lr = nan", "lr"),
        ('optimizer = "lion"', "optimizer"),
        ('policy = "magic"', "magic"),
        ('freeze_to = "layer9"', "layer9"),
        ('freeze_to = "3"', "everything is frozen"),
        ('classifier = "0.0"', "0.0"),
        ('path = "nothing"', "nothing"),
        ("micro_batch = 0", "micro_batch"),
        ('micro_batch = "most"', "micro_batch"),
        ('autocast = "float8"', "autocast"),
        ('prefix = "fp8"', "prefix"),
        ('keep = "all"', "keep"),
        ('keep = {memory = "much"}', "memory"),
        ('keep = {store = "yes"}', "store"),
        ("keep = {room = 5}", "room"),
        ("compile_tail = 1", "compile_tail"),
        ('output = "/does/not/exist/x"', "/does/not/exist"),
        ('weights = "/does/not/exist.safetensors"', "/does/not/exist.safetensors"),
    ],
)
def test_bad_configuration_is_named(
    change: str, named: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(config(folder, more=""))
    key = change.partition(" ")[0]
    kept = [line for line in path.read_text().splitlines() if not line.startswith(f"{key} =")]
    path.write_text("\n".join([*kept, change]))
    assert main(["train", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert named in last
    assert "Traceback" not in captured.err


def test_a_missing_key_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "short.toml"
    path.write_text('model = "trained_models:small"\n')
    assert main(["train", str(path)]) == 2
    assert "freeze_to" in capsys.readouterr().err


class Head(nn.Module):
    """Classifier without a layer of PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(4, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply, then draw, as some models do in any mode."""
        return x @ self.matrix + torch.rand(())


def a_vector() -> torch.Tensor:
    return torch.zeros(1, 4)


def an_image() -> torch.Tensor:
    return torch.zeros(1, 3, 6, 6)


def convolved() -> nn.Module:
    """Return a network that ends as SqueezeNet does."""
    head = nn.Sequential(nn.Dropout(), nn.Conv2d(4, 7, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), head, nn.Flatten())


def test_classifier_is_replaced_only_where_needed() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 7, bias=False)))
    state = torch.get_rng_state()
    assert fit_classifier(model, None, 7, seed=0, example=a_vector) is None
    assert fit_classifier(model, None, 2, seed=0, example=a_vector) == "1.0"
    assert model.get_submodule("1.0").weight.shape == (2, 3)
    assert model.get_submodule("1.0").bias is None
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ConfigError, match="no linear layer"):
        fit_classifier(nn.ReLU(), None, 2, seed=0, example=a_vector)


@pytest.mark.parametrize(
    ("model", "name", "example", "replaced"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 7))), "1", a_vector, "1.0"),
        (lambda: nn.Sequential(nn.Linear(4, 7), nn.Softmax(1)), "0", a_vector, "0"),
        (convolved, "1", an_image, "1.1"),
        (convolved, "1.1", an_image, "1.1"),
        (lambda: nn.Sequential(nn.Linear(4, 4), Head()), "1", a_vector, "1"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Identity()), "1", a_vector, "1"),
    ],
)
def test_any_module_may_be_the_classifier(
    model: Callable[[], nn.Module], name: str, example: Callable[[], torch.Tensor], replaced: str
) -> None:
    network, again = model(), model()
    before = {each: module.training for each, module in network.named_modules()}
    state = torch.get_rng_state()
    assert fit_classifier(network, name, 2, seed=5, example=example) == replaced
    assert torch.equal(torch.get_rng_state(), state)
    assert network(example()).shape == (1, 2)
    assert all(module.training for module in network.modules()) and all(before.values())
    assert fit_classifier(network, name, 2, seed=5, example=example) is None
    fit_classifier(again, name, 2, seed=5, example=example)
    new = network.get_submodule(replaced).state_dict()
    assert all(map(torch.equal, new.values(), again.get_submodule(replaced).state_dict().values()))


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("head", "the model has no module 'head'; near are "),
        ("", "the model has no module ''"),
        ("0.0", r"with '0\.0' replaced, the model must give a tensor of shape \(1, 2\) .*, got RuntimeError"),
        ("0.1", r"with '0\.1' replaced, .* shape \(1, 2\) for one sample, got "),
    ],
)
def test_module_that_is_no_classifier_is_refused(name: str, named: str) -> None:
    model = nn.Sequential(*convolved(), nn.Identity())
    with pytest.raises(ConfigError, match=named):
        fit_classifier(model, name, 2, seed=0, example=an_image)


class Detects(nn.Module):
    """Answer with two tensors in eval, as some heads do."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 7)

    def forward(self, x: torch.Tensor) -> Any:
        found = self.last(x)
        return found if self.training else (found.softmax(1), found)


def test_linear_layer_is_replaced_in_a_model_that_answers_otherwise_in_eval() -> None:
    model = Detects()
    assert fit_classifier(model, None, 2, seed=0, example=a_vector) == "last"
    assert model(a_vector()).shape == (1, 2)


def test_compiled_model_is_not_compiled_for_its_classifier() -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise AssertionError("compiled")

    model = torch.compile(nn.Sequential(nn.Linear(4, 4), Head()), backend=backend)
    assert fit_classifier(model, "_orig_mod.1", 2, seed=0, example=a_vector) == "_orig_mod.1"


def test_training_replaces_a_head_of_the_models_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "headed_models.py").write_text(OWN_HEAD)
    path = Path(config(folder, more='epochs = 1\nclassifier = "head"'))
    text = path.read_text().replace("trained_models:small", "headed_models:headed")
    path.write_text(text.replace('freeze_to = "0"', 'freeze_to = "body"'))
    assert main(["train", str(path)]) == 0
    assert "head is new, for 2 classes" in capsys.readouterr().err
    assert load_file(folder / "trained.safetensors")["head.weight"].shape == (2, 4)
