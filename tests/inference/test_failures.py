"""Check that every request gets the right answer from real and misbehaving servers."""

from __future__ import annotations

import math
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import pytest
import torch

import upriver
from tests.examples import often, some
from tests.inference.asking import (
    SELDOM,
    Chain,
    Proxy,
    Words,
    chain,
    cut_at,
    far_of,
    here,
    proxy,
    tell_link,
    tell_load,
)
from tests.rpc.scripted_http import Exchange, scripted
from tests.server.running import Running, free_port, running, wait_for
from upriver.errors import NotExact, Overloaded, ProgramError
from upriver.inference import offload as offload_module
from upriver.inference import remote_server as far_module
from upriver.inference.offload import Offload
from upriver.protocol import End, FrameDecoder
from upriver.types import MicroBatch, Timings

LONG = 3600.0

DEADLINE_S, LONG_AFTER_S = 3.0, 60.0
"""Deadline of requests to a server that misses it, and the time after which such a server acts."""


@pytest.fixture
def between(server: Running) -> Iterator[Proxy]:
    with proxy(server.url) as found:
        yield found


def asking(url: str, model: Chain, **options: Any) -> Offload:
    settings: dict[str, Any] = {"example_inputs": torch.randn(2, 64), "cut": 3, **SELDOM, **options}
    return upriver.offload(model, servers=[url], **settings)


def hurry(answer: Offload) -> None:
    """Give further requests a short deadline; earlier ones may be slow."""
    answer._patience = replace(answer._patience, deadline_s=DEADLINE_S)


def hang(exchange: Exchange) -> None:
    """Accept, and never answer."""
    time.sleep(LONG_AFTER_S)
    exchange.hang_up()


def trickle(exchange: Exchange) -> None:
    """Send a few bytes now and then."""
    exchange.start_chunks()
    for _ in range(int(LONG_AFTER_S / 0.05)):
        exchange.chunk(b"U")
        time.sleep(0.05)


def refuse(status: int, retry_after: str) -> Callable[[Exchange], None]:
    return lambda exchange: exchange.plain(status, b"", Retry_After=retry_after)


def answer_with(*tensors: torch.Tensor, other_ids: int = 0, position: int = 7) -> Callable[[Exchange], None]:
    def respond(exchange: Exchange) -> None:
        (sent,) = (each for each in FrameDecoder().feed(exchange.body) if isinstance(each, MicroBatch))
        ids = tuple(each + other_ids for each in sent.ids)
        exchange.frames(MicroBatch(ids=ids, position=position, tensors=tensors), Timings(), End())

    return respond


def break_off(exchange: Exchange) -> None:
    exchange.start_chunks()
    exchange.chunk(b"UPRV")
    exchange.hang_up()


WAYS_TO_FAIL = {
    "hangs": hang,
    "trickles": trickle,
    "hangs up": lambda exchange: exchange.hang_up(),
    "breaks off": break_off,
    "garbage": lambda exchange: exchange.plain(200, b"\x00\xff" * 500),
    "nothing": lambda exchange: exchange.plain(200, b""),
    "a page": lambda exchange: exchange.plain(404, b"<html>not here</html>"),
    "429": refuse(429, "60"),
    "503": refuse(503, "60"),
    "500": lambda exchange: exchange.plain(500, b"oh"),
    "other shape": answer_with(torch.zeros(2, 4)),
    "other type": answer_with(torch.zeros(2, 3, dtype=torch.float64)),
    "more tensors": answer_with(torch.zeros(2, 3), torch.zeros(2, 3)),
    "no tensor": answer_with(),
    "other ids": answer_with(torch.zeros(2, 3), other_ids=1),
    "other position": answer_with(torch.zeros(2, 3), position=6),
    "an error": lambda exchange: exchange.frames(Overloaded("no room", retry_after_s=60.0)),
}


@pytest.mark.parametrize("way", often(WAYS_TO_FAIL, "breaks off", "500"))
def test_a_server_that_fails_costs_no_answer(way: str, between: Proxy) -> None:
    model, x = chain(), torch.randn(2, 64)
    with asking(between.url, model, deadline_s=30.0) as answer:
        assert torch.equal(answer(x), here(model, x))
        assert answer.last is not None and answer.last.server == between.url
        between.instead = WAYS_TO_FAIL[way]
        if way in ("hangs", "trickles"):
            hurry(answer)
        asked = between.requests
        assert torch.equal(answer(x), here(model, x))
        assert (answer.last.server, answer.last.cut) == ("", 3)
        assert answer.last.why_not and between.requests > asked
        assert torch.equal(answer(x), here(model, x))
        assert answer.last.server == "" and not answer.last.why_not, "it is left alone for a while"
        assert between.url in answer.why and "Not asked" in answer.why
        assert answer.counts == {"requests": 3, "device": 2, "server": 1, "gave_up": 1, "hedged": 0}


@pytest.mark.parametrize("hedge_s", some(1, [None, 0.0, LONG]))
def test_a_request_is_known_to_be_under_way(hedge_s: float | None, between: Proxy) -> None:
    model, x = chain(), torch.randn(2, 64)
    with asking(between.url, model, hedge_s=hedge_s) as answer:
        uplink, busy = far_of(answer)._uplink, []

        def look(exchange: Exchange) -> None:
            busy.append(uplink.busy_since_s < math.inf)
            between.forward(exchange)

        def asked() -> list[bool]:
            answer(x)
            return busy

        between.instead = look
        wait_for(asked)  # when the device competes, a request may have nothing left to send
        assert all(busy) or hedge_s == 0.0, "there the device may have been first"
        assert uplink.busy_since_s == math.inf
        answer.warm()
        assert all(busy[1:]) and len(busy) > 1
        between.instead = WAYS_TO_FAIL["hangs up"]
        answer(x)
        assert uplink.busy_since_s == math.inf


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_module, "PAUSE_S", 0.02)
    monkeypatch.setattr(far_module, "LONGEST_PAUSE_S", 0.1)


@pytest.mark.parametrize("way", often(["breaks off", "503", "other shape"], "503"))
def test_a_server_that_is_well_again_is_asked_again(way: str, between: Proxy, short_pauses: None) -> None:
    model, x = chain(), torch.randn(2, 64)
    with asking(between.url, model, deadline_s=5.0) as answer:
        between.instead = WAYS_TO_FAIL[way]
        for _ in range(3):
            assert torch.equal(answer(x), here(model, x))
        between.instead = None

        def back() -> bool:
            assert torch.equal(answer(x), here(model, x))
            return answer.last is not None and answer.last.server == between.url

        wait_for(back)
        assert "Not asked" not in answer.why


@pytest.mark.full
def test_a_server_that_never_answers_anything_delays_the_start_and_no_request() -> None:
    model, x = chain(), torch.randn(2, 64)
    with scripted(hang) as url, asking(url, model, deadline_s=0.5) as answer:
        assert torch.equal(answer(x), here(model, x))
        assert answer.last is not None and answer.last.server == "" and not answer.last.why_not
        assert "no answer in time" in answer.why


def test_nobody_at_the_address(server: Running) -> None:
    model, x = chain(), torch.randn(2, 64)
    with upriver.offload(
        model, example_inputs=x, servers=["http://127.0.0.1:9", server.url], cut=3, **SELDOM
    ) as answer:
        assert torch.equal(answer(x), here(model, x))
        assert answer.last is not None and answer.last.server == server.url
        assert "http://127.0.0.1:9" in answer.why


def test_a_server_with_wrong_numbers_is_not_let_in(between: Proxy) -> None:
    """The server claims to compute the same bits, and does not."""
    model, x = chain(), torch.randn(2, 64)
    between.instead = answer_with(torch.zeros(2, 3))
    with pytest.raises(NotExact, match="other bits for the example"):
        asking(between.url, model, exact="bitwise")
    with asking(between.url, model) as answer:
        assert "of the largest apart for the example" in far_of(answer).why_not(answer._forms.first.captured)
        assert torch.equal(answer(x), here(model, x))
        assert "of the largest apart for the example" in answer.why
        assert answer.counts["server"] == 0


def test_a_deadline_that_is_over_before_the_cut_is_nobodys_fault(between: Proxy) -> None:
    model, x = chain(), torch.randn(2, 64)
    with asking(between.url, model, deadline_s=1e-9) as answer:
        asked = between.requests
        assert torch.equal(answer(x), here(model, x))
        assert answer.last is not None and "deadline was over" in answer.last.why_not
        assert between.requests == asked
        assert "Not asked" not in answer.why


def test_a_hung_server_is_broken_off_at_the_deadline(between: Proxy) -> None:
    model, x = chain(), torch.randn(2, 64)
    with asking(between.url, model) as answer:
        between.instead = hang
        hurry(answer)
        assert torch.equal(answer(x), here(model, x))
        assert answer.last is not None and "no answer in time" in answer.last.why_not
        wait_for(lambda: not far_of(answer)._client._connections.busy)


@pytest.mark.full
def test_a_deadline_holds_where_the_servers_name_is_not_found(
    between: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network is down, and a request needs a new connection."""
    model, x, original = chain(), torch.randn(2, 64), socket.getaddrinfo
    gone, over, found = threading.Event(), threading.Event(), []

    def getaddrinfo(host: str, *args: Any, flags: int = 0, **kwargs: Any) -> Any:
        if host != "edge-1":
            return original(host, *args, flags=flags, **kwargs)
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        if gone.is_set():
            over.wait(LONG_AFTER_S)
            found.append(host)
        return original("127.0.0.1", *args, flags=flags, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with asking(between.url.replace("127.0.0.1", "edge-1"), model) as answer:
        assert torch.equal(answer(x), here(model, x))
        assert answer.last is not None and answer.last.server
        gone.set()
        far_of(answer)._client.abort()
        hurry(answer)
        assert torch.equal(answer(x), here(model, x))
        assert answer.last.server == "" and "no answer in time" in answer.last.why_not
        assert found == []
        over.set()


# ------------------------------------------------------------------------------------------- hedging


def test_the_device_begins_beside_a_server_that_is_late(between: Proxy) -> None:
    model, x = chain(), torch.randn(2, 64)
    with asking(between.url, model, hedge_s=0.05) as answer:
        between.instead = hang
        assert torch.equal(answer(x), here(model, x))
        assert answer.last is not None and answer.last.hedged
        assert answer.last.server == "" and not answer.last.why_not
        assert "Not asked" not in answer.why, "being late is no failure"
        between.instead = None
        assert torch.equal(answer(x), here(model, x))
        assert answer.counts["hedged"] >= 1


def test_by_itself_a_server_that_is_late_is_hedged_then_tried_and_then_left_alone(
    between: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device only appears to be slow, so that it is always first once it computes."""
    monkeypatch.setattr(
        offload_module, "device_seconds", lambda captured, measure: (1.0,) * captured.program.num_stages
    )
    model, x = chain(), torch.randn(2, 64)
    wanted = here(model, x)
    with asking(between.url, model, cut=None) as answer:
        tell_link(answer, 1e9)
        tell_load(answer, 1.0)
        assert answer.decide().server == between.url
        between.instead = hang
        assert torch.equal(answer(x), wanted)
        assert answer.last is not None and answer.last.hedged
        assert (answer.last.server, answer.last.why_not) == ("", ""), "being late is no failure"
        between.instead = None
        tried = answer.decide()
        assert tried.server == between.url and tried.choice.hedge_s == 0
        assert "The device computes as well" in tried.why
        with answer._patience.hedging() as mine:
            assert mine and answer._decide(answer._forms.first, hedges=False)[0].server == ""
            assert torch.equal(answer(x), wanted)
            assert not answer.last.hedged and answer.last.server == "", "another one is hedged"
        assert torch.equal(answer(x), wanted)
        assert answer.last.hedged
        far_of(answer)._misses[answer.program.digest] = 2
        assert "sooner than a server did last" in answer.decide().why
        assert torch.equal(answer(x), wanted)
        assert not answer.last.hedged and answer.last.server == ""
        wait_for(lambda: not far_of(answer)._client._connections.busy)


@pytest.mark.full
def test_a_policy_of_others_is_not_hedged(between: Proxy) -> None:
    choices: tuple[dict[str, Any], ...] = ({"policy": "remote"}, {"policy": "loadpart"}, {"cut": 3})
    for options in choices:
        with asking(between.url, chain(), **{"cut": None, **options}) as answer:
            tell_link(answer, 1e9)
            assert answer.decide().choice.hedge_s is None


@pytest.mark.full
def test_a_server_that_is_quick_enough_is_not_hedged(server: Running) -> None:
    model, x = chain(), torch.randn(2, 64)
    with asking(server.url, model, hedge_s=LONG, deadline_s=LONG) as answer:
        for _ in range(10):
            assert torch.equal(answer(x), here(model, x))
        assert answer.counts["hedged"] == 0 and answer.counts["server"] == 10


def test_who_is_first_wins(between: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device computes when the server's answer comes: the answer counts, and the device stops."""
    model, x = chain(), torch.randn(2, 64)
    wanted = here(model, x)
    with asking(between.url, model, hedge_s=0.0) as answer:
        program = answer.program
        run, ran, may_answer = program.run, [], threading.Event()

        def late(exchange: Exchange) -> None:
            may_answer.wait(60)
            between.forward(exchange)

        def slow(tensors: Any, start: int, stop: int, *, on_stage: Any = None) -> Any:
            if on_stage is None:
                return run(tensors, start, stop)

            def note(position: int, seconds: float) -> None:
                ran.append(position)
                may_answer.set()
                end = time.monotonic() + 60
                while position == start + 2 and time.monotonic() < end:  # until it is overtaken
                    on_stage(position, seconds)
                    time.sleep(0.01)

            return run(tensors, start, stop, on_stage=note)

        monkeypatch.setattr(program, "run", slow)
        between.instead = late
        assert torch.equal(answer(x), wanted)
        assert answer.last is not None
        assert answer.last.hedged and answer.last.server == between.url
        assert ran and ran[-1] < program.num_stages


@pytest.mark.full
def test_the_servers_answer_does_not_wait_for_a_stage_here(
    between: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = chain(), torch.randn(2, 64)
    wanted = here(model, x)
    begun, may_end, computing = threading.Event(), threading.Event(), []

    def forward(exchange: Exchange) -> None:
        begun.wait(60)
        between.forward(exchange)

    with asking(between.url, model, hedge_s=0.0) as answer:
        run = answer.program.run

        def slow(tensors: Any, start: int, stop: int, *, on_stage: Any = None) -> Any:
            if on_stage is not None:
                computing.append(threading.current_thread())
                begun.set()
                may_end.wait(60)
            return run(tensors, start, stop, on_stage=on_stage)

        monkeypatch.setattr(answer.program, "run", slow)
        between.instead = forward
        assert torch.equal(answer(x), wanted)
        assert answer.last is not None and answer.last.server == between.url
        assert computing[0].is_alive()
        may_end.set()
        computing[0].join(60)
        assert not computing[0].is_alive()


@pytest.mark.parametrize("mode", some(1, [torch.no_grad, torch.enable_grad, torch.inference_mode]))
def test_the_device_computes_in_parallel_in_the_mode_of_the_caller(
    mode: Callable[[], Any], between: Proxy
) -> None:
    model, x = chain(), torch.randn(2, 64)
    wanted = here(model, x)
    with asking(between.url, model, hedge_s=0.0) as answer, mode():
        between.instead = hang
        found = answer(x)
        assert torch.equal(found, wanted) and not found.requires_grad
        assert answer.last is not None and answer.last.hedged and answer.last.server == ""
        assert found.is_inference() == torch.is_inference_mode_enabled()


@pytest.mark.full
def test_the_device_computes_in_the_callers_thread_where_there_is_no_other(
    between: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "upriver-device":
            raise RuntimeError("can't start new thread")
        start(thread)

    model, x = chain(), torch.randn(2, 64)
    with asking(between.url, model, hedge_s=0.0) as answer:
        between.instead = hang
        monkeypatch.setattr(threading.Thread, "start", refuse)
        assert torch.equal(answer(x), here(model, x))
        assert answer.last is not None and answer.last.hedged


class Known(ThreadPoolExecutor):
    """Remember the work that it was given."""

    def __init__(self) -> None:
        super().__init__(1)
        self.given: list[Future[Any]] = []

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        self.given.append(super().submit(*args, **kwargs))
        return self.given[-1]


@pytest.mark.full
def test_a_server_that_fails_while_it_is_hedged_is_left_alone(
    between: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server hangs up while the device computes the rest of the request."""
    model, x = chain(), torch.randn(2, 64)
    wanted = here(model, x)
    with Known() as helpers, asking(between.url, model) as answer:
        answer._patience = replace(answer._patience, hedge_s=0.0, helpers=helpers)
        program, run, may_fail = answer.program, answer.program.run, threading.Event()

        def hang_up(exchange: Exchange) -> None:
            may_fail.wait(60)
            exchange.hang_up()

        def slow(tensors: Any, start: int, stop: int, *, on_stage: Any = None) -> Any:
            if on_stage is not None:  # while the server computes
                may_fail.set()
                wait(helpers.given)
            return run(tensors, start, stop, on_stage=on_stage)

        monkeypatch.setattr(program, "run", slow)
        between.instead = hang_up
        assert torch.equal(answer(x), wanted)
        assert answer.last is not None
        assert answer.last.hedged and answer.last.server == "" and answer.last.why_not
        assert torch.equal(answer(x), wanted)
        assert not answer.last.hedged and "Not asked" in answer.why
        assert answer.counts["gave_up"] == 1 and len(helpers.given) == 1


@pytest.mark.full
def test_a_request_that_is_to_be_hedged_when_the_model_is_closed_is_answered(server: Running) -> None:
    model, x = chain(), torch.randn(2, 64)
    with asking(server.url, model, hedge_s=LONG) as answer:
        assert torch.equal(answer(x), here(model, x))
        far = far_of(answer)
        ask = far.ask

        def closing(*args: Any, **kwargs: Any) -> Any:
            answer.close()
            return ask(*args, **kwargs)

        far.ask = closing  # type: ignore[method-assign]
        assert torch.equal(answer(x), here(model, x))
        assert answer.last is not None and answer.last.server == "" and "closed" in answer.last.why_not


# ------------------------------------------------------------------------------- the caller's own fault


@pytest.mark.parametrize("cut", some(1, [1, 0, 99]))
@pytest.mark.parametrize("hedge_s", some(1, [None, 0.0]))
def test_what_is_wrong_with_the_input_is_raised_and_no_servers_fault(
    cut: int, hedge_s: float | None, server: Running
) -> None:
    model = Words()
    good, bad = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 300]])
    with upriver.offload(
        model, example_inputs=good, servers=[server.url], cut=0, hedge_s=hedge_s, **SELDOM
    ) as answer:
        cut_at(answer, min(cut, answer.program.num_stages))
        with pytest.raises(ProgramError, match="embedding"):
            answer(bad)
        assert torch.equal(answer(good), here(model, good))
        assert "Not asked" not in answer.why
        assert far_of(answer)._breaker.failures == 0


# --------------------------------------------------------------------------------------------- kills


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.full
def test_a_server_killed_at_a_random_moment_in_500_requests_costs_none(seed: int, tmp_path: Any) -> None:
    model, rng = chain(), random.Random(seed)
    inputs = [torch.randn(2, 64) for _ in range(20)]
    wanted = [here(model, x) for x in inputs]
    with running(tmp_path.as_uri()) as server, asking(server.wait_ready().url, model) as answer:
        moment = rng.randint(50, 400)
        after_s = rng.uniform(0.0, 0.01)
        right = 0
        for number in range(500):
            cut_at(answer, rng.randrange(7))
            if number == moment:
                timer = threading.Timer(after_s, server.process.send_signal, (signal.SIGKILL,))
                timer.start()
            right += torch.equal(answer(inputs[number % 20]), wanted[number % 20])
        timer.join()
        assert right == 500
        assert answer.counts["server"] >= moment
        assert answer.counts["device"] > 0
        assert server.process.wait(timeout=60) == -signal.SIGKILL


@pytest.mark.full
def test_a_worker_that_is_killed_comes_back_and_costs_none(tmp_path: Any, short_pauses: None) -> None:
    model, x = chain(), torch.randn(2, 64)
    wanted = here(model, x)
    with (
        running(tmp_path.as_uri()) as server,
        asking(server.wait_ready().url, model) as answer,
    ):
        for number in range(300):
            if number == 100:
                for pid in server.wait_workers():
                    os.kill(pid, signal.SIGKILL)
            assert torch.equal(answer(x), wanted)

        def back() -> bool:
            assert torch.equal(answer(x), wanted)
            return answer.last is not None and answer.last.server == server.url

        wait_for(back)


@pytest.mark.full
@pytest.mark.slow
def test_a_server_that_is_started_again_is_sent_the_program_again(tmp_path: Any, short_pauses: None) -> None:
    model, x = chain(), torch.randn(2, 64)
    wanted = here(model, x)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with running(first.as_uri(), port=free_port()) as server:
        port = int(server.address.rpartition(":")[2])
        answer = asking(server.wait_ready().url, model)
        assert torch.equal(answer(x), wanted)
        assert answer.counts["server"] == 1
        server.process.kill()
        server.process.wait()
        assert torch.equal(answer(x), wanted)
    with answer, running(second.as_uri(), port=port):

        def back() -> bool:
            assert torch.equal(answer(x), wanted)
            return answer.last is not None and bool(answer.last.server)

        wait_for(back)
