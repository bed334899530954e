"""Check ``upriver.offload`` with a real server: the model's bits at every cut, and the best current cut."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import upriver
from tests.examples import some
from tests.inference.asking import (
    RARELY,
    SELDOM,
    Two,
    chain,
    cut_at,
    far_of,
    here,
    let_in,
    proxy,
    tell_link,
    tell_load,
)
from tests.inference.between import between
from tests.program.nets import Small
from tests.server.running import Running, running, wait_for
from upriver.control.partition import PartitionRule
from upriver.errors import CaptureError, ConfigError, ProgramNotFound
from upriver.inference import offload as offload_module
from upriver.inference.offload import Offload
from upriver.inference.remote_server import OffloadTuning
from upriver.policies import inference
from upriver.program.example_inputs import Example
from upriver.program.graph.artifact_store import publish
from upriver.program.models.registry import load_model
from upriver.store import Store
from upriver.types import Workload


def same(ours: Any, theirs: Any) -> bool:
    a, form_a = pytree.tree_flatten(ours)
    b, form_b = pytree.tree_flatten(theirs)
    return form_a == form_b and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True)
    )


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("upriver")}


def calls_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    example = Example.of(inputs)
    return example.args, dict(example.kwargs)


SIDES = {"alexnet": 64, "squeezenet1_1": 48, "resnet18": 32, "mobilenet_v3_small": 32}
"""Sides of the images for networks of torchvision. They are made where they run: the largest takes 240 MB."""


def networks() -> list[Any]:
    torch.manual_seed(0)
    cases: list[Any] = [
        pytest.param(Small(), torch.randn(2, 3, 16, 16), id="small"),
        pytest.param(
            Two(), Example(args=(torch.randn(3, 8),), kwargs={"other": torch.randn(3, 5)}), id="two"
        ),
        pytest.param(chain(), {"x": torch.randn(1, 64)}, id="chain"),
    ]
    return cases + [
        pytest.param(name, torch.randn(1, 3, side, side), id=name, marks=pytest.mark.full)
        for name, side in SIDES.items()
    ]


@pytest.mark.parametrize(("model", "inputs"), networks())
def test_every_cut_gives_the_models_own_bits(model: nn.Module | str, inputs: Any, server: Running) -> None:
    if isinstance(model, str):
        model, _ = load_model(f"torchvision:{model}")
    args, kwargs = calls_of(inputs)
    wanted = here(model, *args, **kwargs)
    with upriver.offload(
        model, example_inputs=inputs, servers=[server.url], measure="measure", **SELDOM
    ) as answer:
        let_in(answer)
        stages = answer.program.num_stages
        for cut in range(stages + 1):
            cut_at(answer, cut)
            assert same(answer(*args, **kwargs), wanted), cut
            assert answer.last is not None
            assert (answer.last.cut, answer.last.server) == (cut, server.url if cut < stages else "")
        assert answer.counts == {
            "requests": stages + 1,
            "device": 1,
            "server": stages,
            "gave_up": 0,
            "hedged": 0,
        }


@pytest.mark.full
def test_other_values_than_the_examples_are_computed_too(server: Running) -> None:
    model = Small()
    with upriver.offload(
        model, example_inputs=torch.zeros(1, 3, 16, 16), servers=[server.url], cut=4
    ) as answer:
        for seed in range(5):
            x = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
            assert torch.equal(answer(x), here(model, x))


def test_without_a_server_the_device_answers() -> None:
    model, x = chain(), torch.randn(2, 64)
    with upriver.offload(model, example_inputs=x) as answer:
        assert torch.equal(answer(x), here(model, x))
        assert answer.last is not None and (answer.last.server, answer.last.cut) == ("", 7)
        assert "no server to ask" in answer.why
        assert "no server to ask" in str(answer.plan)
        assert answer.plan.predicted is not None and answer.plan.cut == 7
        assert answer.warm() == {}
    assert model.training


@pytest.mark.full
def test_a_policy_without_choice_does_as_it_is_told(server: Running) -> None:
    model, x = chain(), torch.randn(1, 64)
    for policy, where in (("local", ""), ("remote", server.url)):
        with upriver.offload(model, example_inputs=x, servers=[server.url], policy=policy) as answer:
            assert torch.equal(answer(x), here(model, x))
            assert answer.last is not None and answer.last.server == where
            assert "as asked for" in answer.why


# ----------------------------------------------------------------------------------------- choices


@pytest.fixture
def slow_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the device appear to take 10 ms per stage."""
    monkeypatch.setattr(
        offload_module,
        "device_seconds",
        lambda captured, measure: tuple(0.01 for _ in captured.program.stages),
    )


@pytest.fixture
def asked(server: Running, slow_device: None) -> Any:
    with upriver.offload(
        chain(), example_inputs=torch.randn(100, 64), servers=[server.url], **SELDOM
    ) as answer:
        costs = far_of(answer)._costs
        for digest, each in costs.items():  # 1 ms a stage there, to the bit
            costs[digest] = type(each)(program=each.program, device_s=each.device_s, server_s=(0.001,) * 7)
        tell_load(answer, 1.0)  # other load on this machine does not count
        yield answer


def test_the_cut_follows_the_bandwidth(asked: Offload) -> None:
    """Values shrink from stage to stage, so a thin link keeps more stages on the device."""
    cuts = []
    for rate in (1e9, 1e6, 5e5, 2e5, 1e5, 1e4):
        tell_link(asked, rate)
        cuts.append(asked.decide().cut)
    assert cuts == sorted(cuts) and cuts[0] == 0 and cuts[-1] == 7 and len(set(cuts)) >= 3


def test_the_cut_follows_the_load_and_the_wait(asked: Offload) -> None:
    tell_link(asked, 1e9)
    cuts = []
    for k in (1.0, 5.0, 9.0, 12.0, 100.0):
        tell_load(asked, k)
        cuts.append(asked.decide().cut)
    assert cuts == sorted(cuts) and cuts[0] == 0 and cuts[-1] == 7
    tell_load(asked, 1.0, wait_s=10.0)
    assert asked.decide().cut == 7
    tell_load(asked, 1.0)
    assert asked.decide().cut == 0


def test_the_decision_is_that_of_the_policy_on_the_same_numbers(asked: Offload) -> None:
    for rate in (1e9, 1e6, 3e5, 1e5, 1e4):
        for k in (1.0, 4.0, 11.0):
            tell_link(asked, rate)
            tell_load(asked, k, wait_s=0.002)
            decision = asked.decide()
            assert decision.costs is not None and decision.now is not None
            profile, cluster = decision.costs.profile, decision.costs.cluster(decision.now)
            plan = inference.plan(profile, cluster, Workload(batch_size=1, num_samples=1))
            assert decision.cut == plan.cut
            assert decision.plan.table == plan.table
            assert decision.plan.predicted == plan.predicted
            assert plan.predicted is not None
            assert decision.predicted_s == pytest.approx(plan.predicted.epoch_s)


def test_a_decision_explains_itself(asked: Offload) -> None:
    tell_link(asked, 1e9)
    tell_load(asked, 1.0)
    decision = asked.decide()
    assert "0 of 7 stages run on the device and the rest on http" in decision.why
    assert "8 Gbit/s" in decision.why and "the device alone would take 0.070 s" in decision.why
    assert "> " in str(decision.plan) and "request s" in str(decision.plan)
    tell_link(asked, 1e4)
    assert "All 7 stages run on the device: the device alone would take 0.070 s" in asked.decide().why


def test_a_decision_is_printed_in_a_line(asked: Offload) -> None:
    """The line does not print all weights."""
    tell_link(asked, 1e9)
    tell_load(asked, 1.0)
    for decision in (asked.decide(), replace(asked.decide(), costs=None, now=None, server="")):
        assert (
            str(decision)
            == repr(decision)
            == (
                f"Decision(cut={decision.cut}, num_stages=7, server={decision.server!r}, "
                f"predicted_s={decision.predicted_s:.6g}, why={decision.why!r})"
            )
        )
    assert "tensor" not in str(asked._forms.first)


def test_a_deadline_that_a_server_would_miss_keeps_all_on_the_device(asked: Offload) -> None:
    tell_link(asked, 2e6)
    tell_load(asked, 1.0)
    assert asked.decide().cut < 7
    asked._patience = replace(asked._patience, deadline_s=0.01)
    decision = asked.decide()
    assert (decision.cut, decision.server) == (7, "")
    assert "no answer of a server would be there by the deadline of 0.010 s" in decision.why
    cut_at(asked, 3)
    assert asked.decide().cut == 3


@pytest.mark.full
def test_a_policy_can_be_blind_to_the_load(server: Running, slow_device: None) -> None:
    x = torch.randn(100, 64)
    for policy, moves in (("loadpart", True), ("neurosurgeon", False)):
        with upriver.offload(
            chain(), example_inputs=x, servers=[server.url], policy=policy, **SELDOM
        ) as answer:
            tell_link(answer, 1e9, rtt_s=100.0)  # neither of them counts a round trip
            tell_load(answer, 1.0)
            assert answer.decide().cut == 0
            tell_load(answer, 1e6)
            assert (answer.decide().cut > 0) == moves


@pytest.mark.full
def test_of_two_servers_the_better_one_is_asked(server: Running, slow_device: None) -> None:
    model, x = chain(), torch.randn(100, 64)
    with (
        proxy(server.url) as other,
        upriver.offload(model, example_inputs=x, servers=[server.url, other.url], **SELDOM) as answer,
    ):
        for better, worse in ((0, 1), (1, 0)):
            tell_link(answer, 1e9, number=better)
            tell_link(answer, 1e5, number=worse)
            decision = answer.decide()
            assert (decision.cut, decision.server) == (0, [server.url, other.url][better])
        assert torch.equal(answer(x), here(model, x))


def test_requests_tell_the_link_and_the_load(server: Running) -> None:
    x = torch.randn(100, 64)
    with upriver.offload(chain(), example_inputs=x, servers=[server.url], cut=0, **SELDOM) as answer:
        far = far_of(answer)
        tell_load(answer, 77.0, wait_s=5.0)
        tell_link(answer, 1e3)  # slower than this machine, however busy it is
        heard = far._heard_at
        answer(x)
        assert far._load < 77.0 and far._wait_s < 5.0 and far._heard_at > heard
        assert far.link.newest is not None and far.link.newest > 1e3
        assert answer.last is not None
        assert answer.last.sent_bytes == x.nbytes
        phases = answer.last
        assert phases.total_s >= phases.decide_s + phases.device_s + phases.link_s + phases.server_s > 0
        assert 25_600 in far.link._requests
        cut_at(answer, 3)
        answer(x)
        assert 9_600 not in far.link._requests, "the server has looked up what crosses there"
        answer(x)
        assert 9_600 in far.link._requests


@pytest.mark.full
def test_a_thread_asks_for_what_no_request_brings(server: Running) -> None:
    often = OffloadTuning(probe_s=0.05, load_s=0.05)
    with upriver.offload(
        chain(), example_inputs=torch.randn(1, 64), servers=[server.url], tuning=often
    ) as answer:
        far = far_of(answer)
        tell_load(answer, 77.0)
        probed, heard = far._probed_at, far._heard_at
        wait_for(lambda: far._probed_at > probed and far._heard_at > heard)
        assert far._load < 77.0
        assert answer.why.count("Not asked") == 0


@pytest.mark.full
def test_a_server_that_requests_are_kept_away_from_is_asked_whether_it_is_free(
    server: Running, slow_device: None
) -> None:
    model, x = chain(), torch.randn(100, 64)
    tuning = replace(RARELY, load_s=5.0)
    with upriver.offload(model, example_inputs=x, servers=[server.url], tuning=tuning) as answer:
        far = far_of(answer)
        tell_link(answer, 1e9)
        tell_load(answer, 1.0, wait_s=1e6)
        heard = far._heard_at
        assert torch.equal(answer(x), here(model, x))
        assert answer.last is not None and answer.last.cut == 7 and not answer.last.why_not
        assert far._load_sought or far._heard_at > heard
        wait_for(lambda: far._heard_at > heard)
        assert far._wait_s < 1e6 and answer.decide().server == server.url


@pytest.mark.full
def test_a_real_answer_tells_of_a_load_that_k_does_not_know(server: Running, slow_device: None) -> None:
    model, x = chain(), torch.randn(100, 64)
    with upriver.offload(model, example_inputs=x, servers=[server.url], tuning=RARELY) as answer:
        far = far_of(answer)
        tell_link(answer, 1e9)
        for there_s, is_news in ((1e3, False), (1e-9, True)):
            tell_load(answer, 1.0)
            far._costs = {
                digest: replace(costs, server_s=(there_s,) * len(costs.server_s))
                for digest, costs in far._costs.items()
            }
            cut_at(answer, 3)
            assert torch.equal(answer(x), here(model, x))
            assert answer.last is not None and answer.last.server == server.url
            now = answer.decide().now
            assert now is not None and now.own is not None and (now.own.load > 2) == is_news
            assert f"({now.own.load:.3g} by the last answer)" in answer.why


def tf32(value: bool) -> None:
    torch.backends.cudnn.allow_tf32 = value


def conv(value: str) -> None:
    torch.backends.mkldnn.conv.fp32_precision = value


@pytest.mark.parametrize(
    ("name", "put", "before", "other"),
    some(
        1,
        [
            ("matmul_precision", torch.set_float32_matmul_precision, "highest", "medium"),
            ("mkldnn", torch._C._set_mkldnn_enabled, True, False),
            ("conv_precision", tf32, True, False),
            ("conv_precision", conv, "none", "bf16"),
        ],
    ),
)
def test_a_server_is_not_asked_while_a_flag_of_this_process_is_another_one(
    name: str, put: Callable[[Any], None], before: Any, other: Any, server: Running
) -> None:
    model, x = chain(), torch.randn(2, 64)
    with upriver.offload(model, example_inputs=x, servers=[server.url], policy="remote", **SELDOM) as answer:
        wanted = here(model, x)
        assert torch.equal(answer(x), wanted)
        assert answer.last is not None and answer.last.server == server.url
        put(other)
        try:
            for _ in range(3):
                assert torch.equal(answer(x), here(model, x))
                assert answer.last.server == ""
            wait_for(lambda: f"computes with other low bits: {name} " in answer.decide().why)
        finally:
            put(before)
        wait_for(lambda: answer.decide().server == server.url)
        assert torch.equal(answer(x), wanted)
        assert answer.last.server == server.url


@pytest.mark.full
def test_calls_are_under_autocast_as_the_capture_was(server: Running) -> None:
    model, x = chain(), torch.randn(2, 64)
    with upriver.offload(model, example_inputs=x) as answer:
        wanted = here(model, x)
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(ConfigError, match="captured without autocast, and is called under autocast to bf"),
        ):
            answer(x)
        assert torch.equal(answer(x), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = here(model, x)
        with upriver.offload(model, example_inputs=x, servers=[server.url], cut=0, **SELDOM) as answer:
            for cut in range(answer.program.num_stages + 1):
                cut_at(answer, cut)
                assert same(answer(x), wanted) and answer(x).dtype == torch.bfloat16
                assert answer.last is not None and not answer.last.why_not
            for other in (torch.autocast("cpu", enabled=False), torch.autocast("cpu", torch.float16)):
                with other, pytest.raises(ConfigError, match="was captured under autocast to bfloat16, and"):
                    answer(x)


# ---------------------------------------------------------------------------------------- programs


@pytest.mark.full
def test_a_server_without_the_program_is_an_error_where_it_is_not_to_be_sent(
    tmp_path_factory: pytest.TempPathFactory, server: Running
) -> None:
    model = chain(seed=99)
    x, before = torch.randn(1, 64), threads()
    with pytest.raises(ProgramNotFound, match="upriver push MODEL STORE --granularity op --micro-batch 1"):
        upriver.offload(model, example_inputs=x, servers=[server.url], push=False)
    wait_for(lambda: not threads() - before)
    root = tmp_path_factory.mktemp("pushed")
    with upriver.offload(model, example_inputs=x) as alone:
        publish(alone.program, Store.open(root.as_uri()))
    with (
        running(root.as_uri()) as other,
        upriver.offload(
            model, example_inputs=x, servers=[other.wait_ready().url], push=False, cut=3
        ) as answer,
    ):
        assert torch.equal(answer(x), here(model, x))
        assert answer.last is not None and answer.last.server == other.url


@pytest.mark.full
def test_a_form_that_a_server_has_not_leaves_the_others_to_it(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model, one, four = chain(), torch.randn(1, 64), torch.randn(4, 64)
    root = tmp_path_factory.mktemp("one form")
    with upriver.offload(model, example_inputs=one) as alone:
        publish(alone.program, Store.open(root.as_uri()))
    with (
        running(root.as_uri()) as other,
        proxy(other.wait_ready().url) as between,
        upriver.offload(
            model, example_inputs=one, servers=[between.url], push=False, cut=3, **SELDOM
        ) as answer,
    ):
        asked = between.requests
        assert torch.equal(answer(four), here(model, four))
        second = answer._forms.find((four,), {})[0].captured
        wait_for(lambda: "upriver push MODEL STORE" in far_of(answer).why_not(second))
        for _ in range(5):
            assert torch.equal(answer(one), here(model, one))
            assert answer.last is not None and answer.last.server == between.url
            assert torch.equal(answer(four), here(model, four))
            assert answer.last.server == "" and "Not asked" in answer.why
        assert between.requests == asked + 5, "and none more to let it in again"


def test_another_form_is_captured_once_and_served_too(server: Running) -> None:
    model = chain()
    with upriver.offload(model, example_inputs=torch.randn(1, 64), servers=[server.url], cut=2) as answer:
        for _ in range(2):
            for rows in (1, 4):
                x = torch.randn(rows, 64)
                assert torch.equal(answer(x), here(model, x))
        assert len(answer._forms._known) == 2
        x = torch.randn(4, 64)
        wait_for(lambda: torch.equal(answer(x), here(model, x)) and answer.last.server)  # type: ignore[union-attr]
        with pytest.raises(ConfigError, match=r"argument 0 must be float32 of shape \(1, 64\)"):
            answer(torch.randn(1, 65))


@contextmanager
def stuck(server: Running, seed: int, others: torch.Tensor) -> Iterator[tuple[Offload, threading.Event]]:
    """Yield an offloaded model whose server has the example's form; the upload for ``others`` hangs."""
    may_go = threading.Event()
    with between(server.url) as front, ExitStack() as on_exit:
        answer = upriver.offload(
            chain(seed), example_inputs=torch.randn(1, 64), servers=[front.url], cut=3, **SELDOM
        )
        on_exit.callback(answer.close)
        on_exit.callback(may_go.set)
        sending = threading.Event()

        def slowly(path: str) -> None:
            if "/programs/" in path:
                sending.set()
                may_go.wait(60)

        front.before = slowly
        answer(others)
        assert sending.wait(60)
        yield answer, may_go


@pytest.mark.full
def test_every_form_that_has_come_is_waited_for(server: Running) -> None:
    four = torch.randn(4, 64)
    with stuck(server, 81, four) as (answer, may_go):
        [url] = answer.wait(0.1)
        assert url == far_of(answer).url
        assert torch.equal(answer(four), here(chain(81), four))
        assert answer.last is not None and answer.last.server == ""
        assert answer.warm() == {url: (3,)}, "the example's form needs none of that"
        may_go.set()
        assert answer.wait() == ()
        assert torch.equal(answer(four), here(chain(81), four))
        assert answer.last.server == url


@pytest.mark.full
def test_closing_while_a_form_is_sent_ends_the_wait_and_is_no_servers_fault(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with stuck(server, 82, torch.randn(4, 64)) as (answer, _), ThreadPoolExecutor(1) as other:
        waited = other.submit(answer.wait)
        answer.close()
        with pytest.raises(ConfigError, match="was closed"):
            waited.result(60)
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.full
@pytest.mark.parametrize("closes", [True, False])
def test_what_nobody_thought_of_is_said_unless_it_is_the_end(
    closes: bool, server: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with upriver.offload(
        chain(), example_inputs=torch.randn(1, 64), servers=[server.url], **SELDOM
    ) as answer:
        far = far_of(answer)

        def broken() -> float:
            far._closed = closes
            monkeypatch.undo()
            raise RuntimeError("not thought of")

        monkeypatch.setattr(far, "_turn", broken)
        far._wake.set()
        if closes:
            far._thread.join(60)
        else:
            wait_for(lambda: "not thought of" in answer.decide().why)
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert bool(said) is not closes


@pytest.mark.full
def test_warm_runs_the_likely_cuts_on_both_sides(server: Running) -> None:
    x = torch.randn(1, 64)
    with (
        proxy(server.url) as through,
        upriver.offload(
            chain(),
            example_inputs=x,
            servers=[through.url],
            measure="measure",
            deadline_s=120.0,
            tuning=replace(RARELY, cached_cuts=3),
        ) as answer,
    ):
        before = through.requests
        ready = answer.warm()
        assert list(ready) == [through.url] and len(ready[through.url]) <= 3
        assert through.requests - before == len(ready[through.url])
        answer._rule = PartitionRule(cut=4)
        assert answer.warm() == {through.url: (4,)}


# ------------------------------------------------------------------------------- threads and the end


def test_threads_share_it(server: Running) -> None:
    model = chain()
    inputs = [torch.randn(1, 64) for _ in range(8)]
    wanted = [here(model, x) for x in inputs]
    wrong: list[int] = []
    with upriver.offload(model, example_inputs=inputs[0], servers=[server.url], cut=2, **SELDOM) as answer:

        def ask(number: int) -> None:
            for _ in range(25):
                if not torch.equal(answer(inputs[number]), wanted[number]):
                    wrong.append(number)

        askers = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        assert wrong == []
        assert answer.counts["requests"] == 200 and answer.counts["server"] == 200
        assert len(far_of(answer)._client._connections.idle) <= 9
    assert torch.backends.mha.get_fastpath_enabled()


def test_nothing_is_left_after_the_end(server: Running) -> None:
    x = torch.randn(1, 64)
    before = threads()
    answer = upriver.offload(chain(), example_inputs=x, servers=[server.url], hedge_s=5.0)
    answer(x)
    assert threads() - before
    answer.close()
    answer.close()
    wait_for(lambda: not threads() - before)
    for call in (lambda: answer(x), answer.decide, answer.warm):
        with pytest.raises(ConfigError, match="closed"):
            call()


@pytest.mark.full
def test_nor_when_nobody_has_it_any_more(server: Running) -> None:
    x = torch.randn(1, 64)
    before = threads()
    answer = upriver.offload(chain(), example_inputs=x, servers=[server.url])
    answer(x)
    gone = weakref.ref(answer)
    del answer
    gc.collect()
    assert gone() is None
    wait_for(lambda: not threads() - before)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"policy": "best"}, "policy must be inference, loadpart"),
        ({"cut": 99}, r"cut must be a whole number in 0..7, got 99"),
        ({"cut": -1}, "cut must be"),
        ({"cut": 1, "policy": "local"}, "takes the place of a policy"),
        ({"deadline_s": 0}, "deadline_s must be a finite number > 0"),
        ({"hedge_s": -1}, "hedge_s must be"),
        ({"tuning": {"probe_s": 1}}, r"tuning must be a OffloadTuning \(OffloadTuning\(\)\), got"),
        ({"push": "no"}, "push must be True or False"),
        ({"exact": "nearly"}, "exact must be auto, bitwise, numeric"),
        ({"measure": "guess"}, "measure must be predict or measure"),
        ({"servers": "http://a:1"}, "servers must be a list"),
        ({"servers": None}, "servers must be a list of addresses, got None"),
        ({"servers": 5}, "servers must be a list of addresses, got 5"),
        ({"policy": ""}, "policy must be inference, .*, got ''"),
        ({"servers": ["a:1"]}, "a server is http://HOST:PORT"),
        ({"servers": ["ray+http://a:1"]}, "is a directory"),
        ({"token": "a b"}, "token must be"),
        ({"example_inputs": [1]}, "a model's inputs are"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], said: str) -> None:
    before = threads()
    with pytest.raises(ConfigError, match=said):
        upriver.offload(chain(), **{"example_inputs": torch.randn(1, 64), **arguments})
    assert not threads() - before


@pytest.mark.parametrize(
    ("field", "value"),
    [("probe_s", 0), ("load_s", float("nan")), ("window", 0), ("window", 8.0), ("cached_cuts", 0)],
)
def test_tuning_out_of_range_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be"):
        OffloadTuning(**{field: value})


def test_keywords_that_became_tuning_are_accepted_with_a_warning() -> None:
    old = {"probe_s": 3.0, "load_s": 7.0, "window": 4, "cached_cuts": 2}
    with (
        pytest.warns(DeprecationWarning) as caught,
        upriver.offload(chain(), example_inputs=torch.randn(1, 64), **old) as answer,
    ):
        assert answer._cached_cuts == 2
    assert [str(each.message) for each in caught] == [
        f"offload({name}=…) is offload(tuning=OffloadTuning({name}=…)) now; 0.3 will not have the old keyword"
        for name in old
    ]


def test_what_cannot_be_captured_is_said() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(CaptureError, match="control flow depends on data"):
        upriver.offload(Branch(), example_inputs=torch.randn(1, 4))
