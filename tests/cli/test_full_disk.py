"""Commands on a full disk: one line says so, and the disk holds what it held."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.client.training import images
from tests.conftest import fill
from upriver.cli import main

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
    """Everything in a folder, folders among it."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


@pytest.fixture
def disk(small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small disk that holds a dataset and a picture, beside a model to import."""
    images(small_disk, 10)
    (small_disk / "old.svg").write_text("an older picture")
    (tmp_path / "full_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    return small_disk


@pytest.mark.parametrize("name", COMMANDS)
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
    """What no command has thought of is said in the same words."""

    def failing(num_bytes: int) -> None:
        (disk / "of a library").write_bytes(bytes(1 << 20))

    fill(disk)
    monkeypatch.setattr("secrets.token_urlsafe", failing)
    assert main(["token"]) == 2
    assert capsys.readouterr().err == "error: cannot write a file: No space left on device\n"
