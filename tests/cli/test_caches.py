"""Check that commands with damaged caches give the same results, and leave usable caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.dataloader.autotune.test_throughput_recall import JOB
from tests.finetune.training import images
from tests.server.running import Running, running
from tests.test_cache import INSTEAD, KEPT
from upriver.cache import MAX_FILE_BYTES
from upriver.coldstart import publish_model
from upriver.program.models.registry import load_model
from upriver.rpc.local_server import EmbeddedServer
from upriver.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.full]  # tests of each cache are in tests/test_cache.py

MODELS = """
import torch
from torch import nn

def small():
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 4 * 4, 5)
    return nn.Sequential(*layers)

def large():
    return nn.Sequential(*(nn.Linear(640, 640) for _ in range(3))), torch.ones(1, 640)
"""

COMMAND = """
import sys
from upriver.cli import main
from upriver.profile.latency import calibration
calibration.RANGES = {kind: calibration.RANGES[kind] for kind in ("conv", "bias", "matmul")}
sys.exit(main())
"""
"""Command that calibrates three kinds of operators."""

TRAIN = """
model = "cached_models:small"
freeze_to = "2"
store = "{uri}"
path = "photos"
image_size = 8
batch_size = 10
micro_batch = 5
lr = 0.01
epochs = 1
output = "{folder}/trained.safetensors"
"""


class Commands:
    """Commands that read or write a cache, each a process of its own with the same cache folder."""

    def __init__(self, folder: Path, server: Running, worker: EmbeddedServer) -> None:
        self.cache, self._folder, self._server, self._worker = folder / "cache", folder, server, worker
        self._store = images(folder / "store", 20).uri
        (folder / "cached_models.py").write_text(MODELS)
        (folder / "train.toml").write_text(TRAIN.format(uri=self._store, folder=folder))
        np.save(folder / "x.npy", np.ones((1, 640), np.float32))

    def _ended(self, *command: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-c", *command],
            env={
                **os.environ,
                "UPRIVER_CACHE": str(self.cache),
                "PYTHONPATH": os.pathsep.join([str(self._folder), *sys.path]),
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        told = [line for line in done.stderr.splitlines() if str(self.cache) in line]
        assert len(told) <= 1 and "Traceback" not in done.stderr, done.stderr
        return json.loads(done.stdout)

    def calibrate(self) -> bool:
        kept: str = self._ended(COMMAND, "calibrate", "--quick", "--json")["kept"]
        return Path(kept).is_file()

    def coldstart(self) -> bool:
        uri = f"{self._store}/net"
        found: bool = self._ended(COMMAND, "coldstart", uri, "cached_models:large", "--compare", "--json")[
            "plain"
        ]["same_answer"]
        return found

    def infer(self) -> list[float]:
        files = ("--input", str(self._folder / "x.npy"), "--output", str(self._folder / "answer.safetensors"))
        more = ("--weights", str(self._folder / "store" / "net.safetensors"), "--json")
        self._ended(COMMAND, "infer", "cached_models:large", *files, *more, "--server", self._server.url)
        [answer] = load_file(self._folder / "answer.safetensors").values()
        return answer.flatten().tolist()

    def train(self) -> list[float]:
        found = self._ended(COMMAND, "train", str(self._folder / "train.toml"), "--json")
        return [found["output_sha256"], *found["epochs"][0]["losses"]]

    def load(self) -> int:
        batches: int = self._ended(JOB, self._worker.url, "mine", "2", "1")["batches"]
        return batches

    @property
    def all(self) -> list[Callable[[], object]]:
        """Return the commands, readers of a cache before its writer."""
        return [self.coldstart, self.infer, self.train, self.load, self.calibrate]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    folder = tmp_path_factory.mktemp("caches")
    (folder / "store").mkdir()
    with (
        running((folder / "store").as_uri()) as server,
        EmbeddedServer.start_worker(["tests.dataloader"], workers=1) as worker,
        pytest.MonkeyPatch.context() as patch,
    ):
        found = Commands(folder, server.wait_ready(), worker)
        patch.syspath_prepend(folder)
        model, _ = load_model("cached_models:large", seed=5)
        publish_model(
            model.eval(), Store.open((folder / "store").as_uri()), "net.safetensors", (torch.ones(1, 640),)
        )
        yield found


@pytest.mark.parametrize("damage", ["pipe", "binary", "a terabyte"])
def test_commands_with_damaged_caches_give_what_they_gave(commands: Commands, damage: str) -> None:
    whole = [command() for command in commands.all]
    files = [path for path in commands.cache.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == KEPT.keys()
    for path in files:
        path.unlink()
        INSTEAD[damage](path)
    assert [command() for command in commands.all] == whole
    assert all(path.is_file() and path.stat().st_size < MAX_FILE_BYTES for path in files)
    assert all(kept.startswith("{") for kept in map(Path.read_text, files))
