"""What a server has to show before it is asked, and what is measured of it then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import upriver
from tests.inference.asking import SELDOM, chain, far_of, here
from tests.inference.between import Between, between
from tests.server.running import Running, wait_for
from upriver.client.inference import far as far_module
from upriver.client.inference.offload import Offload

RUN, PROFILE = "/v1/run", "/v1/profile"


@pytest.fixture
def front(server: Running) -> Iterator[Between]:
    with between(server.url) as found:
        yield found


def asking(front: Between, **options: Any) -> Offload:
    settings: dict[str, Any] = {"example_inputs": torch.randn(2, 64), "cut": 3, **SELDOM, **options}
    return upriver.offload(chain(), servers=[front.url], **settings)


# ------------------------------------------------------------------------- another process at the address


def test_an_answer_of_a_process_that_was_not_let_in_is_not_taken(
    front: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(far_module, "PAUSE_S", 0.02)
    x = torch.randn(2, 64)
    wanted = here(chain(), x)
    with asking(front) as answer:
        assert torch.equal(answer(x), wanted)
        assert answer.last is not None and answer.last.server == front.url
        before = len(front.asked)
        front.process = "second"
        assert torch.equal(answer(x), wanted)
        assert answer.last.server == "" and "another process answers there" in answer.last.why_not

        def back() -> bool:
            assert torch.equal(answer(x), wanted)
            return answer.last is not None and answer.last.server == front.url

        wait_for(back)
        after = [path for path, _ in front.asked[before + 1 :]]
        assert after[0] == "/livez" and after.index("/v1/info") < after.index(RUN)


def test_a_process_that_dies_while_it_measures_is_not_let_in_for_what_it_showed(front: Between) -> None:
    """The next one answers all further questions, and would be let in without a canary."""

    def replaced(path: str) -> None:
        if path == PROFILE:
            front.process = "second"

    front.before = replaced
    with asking(front) as answer:
        wait_for(lambda: far_of(answer)._costs or far_of(answer)._error)
        assert "another process answers there" in str(far_of(answer)._error)
        assert not far_of(answer)._costs


def test_a_server_that_does_not_name_its_process_is_asked(front: Between) -> None:
    front.process, x = "", torch.randn(2, 64)
    with asking(front) as answer:
        for _ in range(2):
            assert torch.equal(answer(x), here(chain(), x))
        assert answer.counts["server"] == 2
