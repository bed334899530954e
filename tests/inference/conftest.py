"""Run one server for most tests, which computes with as many threads as this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.server.running import Running, running


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("store").as_uri()) as found:
        yield found.wait_ready()
