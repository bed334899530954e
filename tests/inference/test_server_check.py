"""Check the proof that a server gives before its first request, and the measurements made then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import upriver
from tests.examples import some
from tests.inference.asking import RARELY, SELDOM, chain, far_of, here
from tests.inference.between import Between, between
from tests.server.running import Running, wait_for
from upriver.control.partition import PartitionRule
from upriver.errors import Busy, CaptureError, ProgramNotFound, ProtocolError
from upriver.inference import remote_server as far_module
from upriver.inference.offload import Offload
from upriver.program.capture import whole_model
from upriver.program.capture.prefix import capture

FREE, BUSY = {"machine": 0.1, "k": 1.0}, {"machine": 0.95, "k": 1.0}

RUN, PROFILE = "/v1/run", "/v1/profile"


@pytest.fixture
def front(server: Running) -> Iterator[Between]:
    with between(server.url) as found:
        yield found


def asking(front: Between, **options: Any) -> Offload:
    settings: dict[str, Any] = {"example_inputs": torch.randn(2, 64), "cut": 3, **SELDOM, **options}
    return upriver.offload(chain(), servers=[front.url], **settings)


# ------------------------------------------------------------------------- another process at the address


@pytest.mark.full
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


@pytest.mark.full
def test_a_process_that_dies_while_it_measures_is_not_let_in_for_what_it_showed(front: Between) -> None:
    """The next process answers all further questions, and would be admitted without a canary."""

    def replaced(path: str) -> None:
        if path == PROFILE:
            front.process = "second"

    front.before = replaced
    with asking(front) as answer:
        wait_for(lambda: far_of(answer)._costs)
        assert [costs.process for costs in far_of(answer)._costs.values()] == ["second"]
        assert (RUN, "first") in front.asked and (RUN, "second") in front.asked


@pytest.mark.full
def test_a_server_that_does_not_name_its_process_is_asked(front: Between) -> None:
    front.process, x = "", torch.randn(2, 64)
    with asking(front) as answer:
        for _ in range(2):
            assert torch.equal(answer(x), here(chain(), x))
        assert answer.counts["server"] == 2


# ----------------------------------------------------------------------------------- seconds of stages


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path))
    return tmp_path / "profiles"


def takes(front: Between, stage_s: float, load: dict[str, Any] = FREE) -> None:
    """Make the server take this long for each stage, without a way to know that it is slow."""
    front.profile_s = front.run_s = stage_s
    front.k, front.load = 1.0, load


def known_s(answer: Offload) -> list[float]:
    """Return the device's estimate of the server's stage seconds."""
    return [second for costs in far_of(answer)._costs.values() for second in costs.server_s]


@pytest.mark.full
def test_what_was_kept_is_used_as_long_as_it_is_so(front: Between, cache: Path) -> None:
    takes(front, 0.01)
    for _ in range(2):
        with asking(front) as answer:
            assert known_s(answer) == pytest.approx([0.01] * 7)
    assert front.count(PROFILE) == 1
    for stage_s in (
        0.002,
        0.02,
    ):  # it was busier then, or is now without knowing it: the server was started again
        takes(front, stage_s)
        with asking(front) as answer:
            assert known_s(answer) == pytest.approx([stage_s] * 7)
    assert front.count(PROFILE) == 3
    front.run_s = 0.02 * 3  # this time it can tell
    front.k = 3.0
    with asking(front) as answer:
        assert known_s(answer) == pytest.approx([0.02] * 7)
    assert front.count(PROFILE) == 3


@pytest.mark.parametrize("requests", some(1, [False, True]))
def test_what_a_busy_server_shows_is_not_kept_and_is_measured_anew_when_it_is_free(
    requests: bool, front: Between, cache: Path
) -> None:
    takes(front, 0.01, BUSY)
    with asking(front, tuning=replace(RARELY, load_s=0.02)) as answer:
        assert known_s(answer) == pytest.approx([0.01] * 7)
        assert not list(cache.glob("*"))
        asked = front.count("/v1/load")
        wait_for(lambda: front.count("/v1/load") > asked + 3)
        assert front.count(PROFILE) == 1, "as long as it is busy that is how it is"
        takes(front, 0.002)

        def anew() -> bool:
            if requests:  # they tell k, and nothing about the machine
                answer(torch.randn(2, 64))
            return known_s(answer) == pytest.approx([0.002] * 7)

        wait_for(anew)
        wait_for(lambda: list(cache.glob("*")))
        asked = front.count("/v1/load")
        wait_for(lambda: requests or front.count("/v1/load") > asked + 3)
        assert front.count(PROFILE) == 2


@pytest.mark.parametrize(("first_s", "believed_s"), [(0.03, 0.01), (0.002, 0.002)])
@pytest.mark.full
def test_the_first_run_there_counts_only_until_its_stages_can_be_measured(
    first_s: float, believed_s: float, front: Between, cache: Path
) -> None:
    """The server was started again, and is measuring for another client just now."""
    takes(front, 0.01)
    with asking(front):
        pass
    takes(front, first_s)
    front.refuses[PROFILE] = Busy("another profile is being measured")
    with asking(front, tuning=replace(RARELY, load_s=0.02)) as answer:
        assert known_s(answer) == pytest.approx([believed_s] * 7)
        wait_for(lambda: front.count(PROFILE) >= 3)
        takes(front, 0.005)
        del front.refuses[PROFILE]
        wait_for(lambda: known_s(answer) == pytest.approx([0.005] * 7))
        asked = front.count("/v1/load")
        wait_for(lambda: front.count("/v1/load") > asked + 3)
        measured = front.count(PROFILE)
    with asking(front) as answer:
        assert known_s(answer) == pytest.approx([0.005] * 7)
    assert front.count(PROFILE) == measured, "that was kept"


def test_a_server_that_measures_no_stages_is_not_asked_again_and_again(front: Between, cache: Path) -> None:
    takes(front, 0.01)
    front.refuses[PROFILE] = ProtocolError("no such thing")
    with asking(front, tuning=replace(RARELY, load_s=0.02)) as answer:
        assert known_s(answer) == pytest.approx([0.01] * 7)
        wait_for(lambda: front.count("/v1/load") > 4)
        assert front.count(PROFILE) == 1 and not list(cache.glob("*"))


ABSURD: list[dict[str, Any]] = [
    {"profile_s": 1e10},
    {"profile_s": 1.5e9},
    {"profile_s": 1e-300},
    {"run_s": 1e10, "refuses": {PROFILE: Busy("for ever")}},
    {"run_s": 1e308},
    {"phases": {"forward": 1e308, "encode": 1e308}},
    {"phases": {"forward": 1e9, "encode": 1e9}},
    {"k": 1e308},
    {"load": {**FREE, "k": 1e308}},
    {"load": {**FREE, "expected_wait_s": 1e308}},
]
"""Statements that a server may make about itself."""


@pytest.mark.parametrize("when", [pytest.param("from the start", marks=pytest.mark.full), "later"])
@pytest.mark.parametrize("said", some(1, ABSURD), ids=str)
def test_no_number_of_a_server_s_keeps_a_request_from_its_answer(
    said: dict[str, Any], when: str, front: Between, cache: Path
) -> None:
    x = torch.randn(2, 64)

    def say() -> None:
        for name, value in said.items():
            setattr(front, name, value)

    if when == "from the start":
        say()
    with asking(front, cut=None, tuning=replace(RARELY, load_s=0.02)) as answer:
        say()
        for cut in (None, 0, 3):
            answer._rule = PartitionRule(cut=cut)
            for _ in range(3):
                assert torch.equal(answer(x), here(chain(), x))
                assert str(answer.plan) and answer.why


# ------------------------------------------------------------------------------------------------ programs


@pytest.mark.parametrize(("skipped", "level"), some(1, [(0, "op"), (1, "module"), (2, None)]))
def test_a_server_that_has_not_the_program_is_to_be_pushed_that_one(
    skipped: int, level: Any, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages end with modules, or there is a single one, where a cut between operators would change bits."""
    tries, through_cuts = count(), whole_model.through_cuts

    def changes_bits(*args: Any) -> Any:
        if next(tries) < skipped:
            raise CaptureError("other bits")
        return through_cuts(*args)

    monkeypatch.setattr(whole_model, "through_cuts", changes_bits)
    model, x = chain(seed=98), torch.randn(1, 64)
    with pytest.raises(ProgramNotFound) as raised:
        upriver.offload(model, example_inputs=x, servers=[server.url], push=False)
    if level is None:
        assert str(raised.value).endswith("let it be sent (without push=False or --no-push)")
        return
    push = f"upriver push MODEL STORE --granularity {level} --micro-batch 1"
    assert f"{push} (and --input-shape 64 where MODEL comes without an example)" in str(raised.value)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ProgramNotFound, match="1 --autocast bfloat16 "),
    ):
        upriver.offload(model, example_inputs=x, servers=[server.url], push=False)
    assert capture(model, x, granularity=level).digest in str(raised.value)
