"""Fixtures for tests of whole jobs: some photos, the losses of the plain path on them, a server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import upriver
from tests.finetune.training import photos, run
from tests.program.nets import Small
from tests.recording import recorded_once
from upriver.pipeline import Dataset

__all__ = ["recorded_once"]  # a fixture of these tests, too

Reference = tuple[list[torch.Tensor], Small]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """Compute with as many threads as the servers of these tests."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return photos(tmp_path_factory.mktemp("store"), 200)


@pytest.fixture(scope="session")
def plain(data: Dataset) -> Reference:
    torch.set_num_threads(1)  # fixtures of a session come before those of a module
    losses, model, _ = run(upriver.connect(), data, policy="nosplit")
    return losses, model


@pytest.fixture(scope="session")
def near() -> Iterator[upriver.Near]:
    with upriver.connect(server_threads=1) as near:
        yield near
