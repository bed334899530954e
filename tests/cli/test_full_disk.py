"""Test commands on a full disk: one line reports it, and the disk keeps its content."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import numpy as np
import pytest

from tests.conftest import fill
from tests.examples import often
from tests.finetune.training import images
from upriver.cli import main
from upriver.cli.demo import BarWatcher
from upriver.coldstart import publish_model
from upriver.profile.latency.benchmark_configs import RANGES
from upriver.program.models.registry import load_model
from upriver.progress import progress_bar

MODELS = """
from torch import nn

def small():
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 4 * 4, 2)
    return nn.Sequential(*layers)
"""

PUSH = ["push", "full_models:small", "file://{disk}", "--freeze-to", "2", "--input-shape", "3,8,8"]
CUTS = ["cuts", "full_models:small", "--input-shape", "3,8,8", "--plot", "{disk}/old.svg"]
COMMANDS: dict[str, list[str]] = {
    "index": ["index", "file://{disk}", "--path", "photos"],
    "push": PUSH,
    "push weights": [*PUSH[:3], "--input-shape", "3,8,8", "--weights-to", "models/small"],
    "cuts": CUTS,
}


def listed(folder: Path) -> dict[str, bytes]:
    """Return everything in a folder, subfolders included."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


@pytest.fixture
def disk(small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a dataset and a picture on a small disk; the model to import lies elsewhere."""
    images(small_disk, 10)
    (small_disk / "old.svg").write_text("an older picture")
    (tmp_path / "full_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    return small_disk


@pytest.mark.parametrize("name", often(COMMANDS, "push", "index"))
def test_a_full_disk_is_one_line_and_nothing_is_lost(
    disk: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    command = [part.format(disk=disk) for part in COMMANDS[name]]
    filler = fill(disk)
    before = listed(disk)
    assert main(command) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: cannot write ") and last.endswith("No space left on device")
    assert listed(disk) == before
    filler.unlink()
    assert main(command) == 0


def test_a_full_disk_that_nobody_expects_is_one_line(
    disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unforeseen write is reported in the same words."""

    def failing(num_bytes: int) -> None:
        (disk / "of a library").write_bytes(bytes(1 << 20))

    fill(disk)
    monkeypatch.setattr("secrets.token_urlsafe", failing)
    assert main(["token"]) == 2
    assert capsys.readouterr().err == "error: cannot write a file: No space left on device\n"


# -------------------------------------------------------------------------------------- printed output

METRICS = """{"schema": "upriver.metrics/1", "gthp": 200, "lthp": 40, "pcycle": 10, "speedup_threshold": 1.1,
"candidates": [{"name": "p1", "rthp": 20, "ocycle": 4}]}"""

NET = ["torchvision:squeezenet1_1", "--input-shape", "3,48,48"]
PRINTING: dict[str, list[str]] = {
    "calibrate": ["calibrate", "--quick"],
    "coldstart": ["coldstart", "file://{folder}/store/net", *NET, "--compare"],
    "cuts": CUTS[:-2],
    "gc": ["gc", "file://{folder}/store", "--dry-run", "--json"],
    "index": ["index", "file://{folder}/store", "--path", "photos", "--on-left-out", "report"],
    "infer": ["infer", "full_models:small", "--input-shape", "3,8,8", "--input", "{folder}/x.npy"],
    "plan": ["plan", "--policy", "fastflow", "--metrics", "{folder}/metrics.json"],
    "push": [*PUSH[:2], "file://{folder}/store", *PUSH[3:]],
    "token": ["token"],
    "train": ["train", "{folder}/train.toml"],
    "help": ["train", "--help"],
    "a wrong option": ["index", "--nothing"],
    "an error": ["index", "ftp://nowhere"],
}
DEAR = ("calibrate", "coldstart", "infer", "push", "train")
"""Commands whose lines beside the result are looked at by `make test-full` alone."""


@contextmanager
def full_file(disk: Path) -> Iterator[TextIO]:
    """Yield a full file, open as a process has its stderr."""
    file = (disk / "written").open("w", buffering=1)
    try:
        yield file
    finally:
        assert os.fstat(file.fileno()).st_size == 0
        with suppress(OSError):
            file.close()


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[str]:
    """Return a command whose input exists."""
    few = {kind: RANGES[kind] for kind in ("activation.relu",)}
    monkeypatch.setattr("upriver.profile.latency.calibration.RANGES", few)
    store = images(tmp_path / "store", 10)
    if request.param == "index":  # the command reports skipped files on stderr
        (tmp_path / "store" / "photos" / "class0" / "notes.doc").touch()
    (tmp_path / "full_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    if request.param == "coldstart":
        model, inputs = load_model(NET[0], seed=5, input_shape=(3, 48, 48))
        publish_model(model.eval(), store, "net.safetensors", (inputs.example(1),))
    np.save(tmp_path / "x.npy", np.ones((1, 3, 8, 8), np.float32))
    (tmp_path / "metrics.json").write_text(METRICS)
    (tmp_path / "train.toml").write_text(
        f'model = "full_models:small"\nfreeze_to = "2"\nstore = "{store.uri}"\npath = "photos"\n'
        f"image_size = 8\nbatch_size = 5\nmicro_batch = 5\nlr = 0.01\nepochs = 1\n"
        f'policy = "nosplit"\noutput = "{tmp_path}/trained.safetensors"\n'
    )
    return [part.format(folder=tmp_path) for part in PRINTING[request.param]]


@pytest.mark.parametrize(
    "options", [[], pytest.param(["--json"], marks=pytest.mark.full)], ids=["text", "json"]
)
@pytest.mark.parametrize(
    "command", often(PRINTING, "cuts", "index", "plan", "help", "an error"), indirect=True
)
def test_a_result_that_does_not_fit_is_one_line_and_no_success(
    command: list[str],
    options: list[str],
    small_disk: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill(small_disk)
    with full_file(small_disk) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main([*command, *options]) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith("error: ") and "Traceback" not in err
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        code = main([*command, *options])
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert code == 141 if "error: " not in err else code == 2


@pytest.mark.parametrize(
    "options", [pytest.param([], marks=pytest.mark.full), ["--json", "--debug"]], ids=["text", "json"]
)
@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=pytest.mark.full) if name in DEAR else name for name in PRINTING],
    indirect=True,
)
def test_what_is_said_beside_a_result_may_be_lost(
    command: list[str],
    options: list[str],
    small_disk: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This happens where stderr is a log."""
    usual = main([*command, *options])
    whole, err = capsys.readouterr()
    assert usual == (2 if command[1:] in (["--nothing"], ["ftp://nowhere"]) else 0), err
    fill(small_disk)
    with full_file(small_disk) as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert main([*command, *options]) == usual
    assert len(capsys.readouterr().out.splitlines()) == len(whole.splitlines())


def test_a_line_of_the_demo_may_be_lost(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(small_disk)
    with full_file(small_disk) as full:
        monkeypatch.setattr(sys, "stderr", full)
        with progress_bar() as bar:
            watch = BarWatcher(bar)
            for number in (1, 2):
                watch.say("a line")
                watch.advance("making images", number, 2)
