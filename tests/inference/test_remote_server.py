"""Check a device's handling of one server turn by turn, with a stopped clock and a scripted server."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.examples import some
from tests.inference.asking import bitwise, chain
from upriver.control.partition import ServerConditions
from upriver.errors import (
    DeadlineExceeded,
    DoesNotFit,
    Forbidden,
    NotExact,
    Overloaded,
    ProgramNotFound,
    ServerUnavailable,
    TooLarge,
    UpriverError,
)
from upriver.inference import remote_server as far_module
from upriver.inference import uplink as uplink_module
from upriver.inference.costs import CutCosts, HandlingTimes, crossing_bytes
from upriver.inference.exchange import ExchangeResult
from upriver.inference.remote_server import LONGEST_PAUSE_S, PAUSE_S, OffloadTuning, RemoteServer
from upriver.inference.server_check import PROBES, AdmittedNetwork
from upriver.link import ROUND_TRIPS, LinkEstimator
from upriver.program.capture.whole_model import CapturedModel, capture_whole
from upriver.program.example_inputs import Example
from upriver.retry import Backoff
from upriver.types import MOST_FACTOR, Timings

RTT_S, QUESTION_S = 0.01, 1.0
"""Seconds of a round trip, and the time limit of a probe."""


class Upmost(random.Random):
    """Draw the maximum every time."""

    def uniform(self, a: float, b: float) -> float:
        return b


@dataclass
class There:
    """A server, and everything that a `RemoteServer` does with it.

    Attributes:
        now_s: Time of the clock.
        rate: Bytes per second of the uplink.
        rtt_s: Seconds of a round trip.
        refuses: Error for the check with the program of this digest.
        down: Error for all other requests.
        machine: Load of the server's machine.
        did: Probes, round trips, questions and checks, in order.
    """

    now_s: float = 1000.0
    rate: float = 1e6
    rtt_s: float = RTT_S
    refuses: dict[str, UpriverError] = field(default_factory=dict)
    down: UpriverError | None = None
    machine: float = 0.0
    did: list[str] = field(default_factory=list)
    url: str = "http://there"
    meter: Any = field(default_factory=lambda: SimpleNamespace(observed_bandwidth=lambda: None))

    def load(self, **_: Any) -> Any:
        self._do("load")
        return SimpleNamespace(k=1.0, expected_wait_s=0.0, machine=self.machine)

    def admit(
        self, _: Any, captured: CapturedModel, device_s: Sequence[float], *, link: LinkEstimator, **__: Any
    ) -> AdmittedNetwork:
        self._do("let in")
        if (error := self.refuses.get(captured.program.digest)) is not None:
            raise error
        self.probe(self, link, small=ROUND_TRIPS, large=PROBES)
        stages = captured.program.num_stages
        return AdmittedNetwork(
            costs=CutCosts(program=captured.program, device_s=device_s, server_s=(0.001,) * stages),
            provisional=False,
            cuts=(0,),
            load=self.load(),
        )

    def probe(self, _: Any, link: LinkEstimator, *, small: int, large: int, every_s: float = 5.0) -> None:
        self._do("probe" if large else "round trips")
        for size in [1] * small + [0] * large:
            num_bytes = size or link.probe_bytes(every_s)
            seconds = self.rtt_s + num_bytes / self.rate
            if seconds > QUESTION_S:
                raise ServerUnavailable("no answer in time")
            link.add_transfer(num_bytes, seconds)

    def close(self) -> None:
        pass

    def _do(self, what: str) -> None:
        self.did.append(what)
        if self.down is not None:
            raise self.down


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> There:
    there = There()
    clock = SimpleNamespace(monotonic=lambda: there.now_s)
    for module in (far_module, uplink_module):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(far_module, "admit", there.admit)
    monkeypatch.setattr(far_module, "probe", there.probe)
    return there


@pytest.fixture
def far(there: There) -> Iterator[RemoteServer]:
    """Return a server handle that takes turns when a test says so, with the longest allowed pauses."""
    tuning, agreement = OffloadTuning(probe_s=5.0, load_s=10.0), bitwise()
    far = RemoteServer(there, tuning, agreement=agreement)  # type: ignore[arg-type]
    far._thread = SimpleNamespace(ident=1, join=lambda: None)  # type: ignore[assignment]
    far._backoff = Backoff(base_s=PAUSE_S, cap_s=LONGEST_PAUSE_S, rng=Upmost())
    far._breaker._backoff = far._backoff
    yield far
    far.close()


@pytest.fixture(scope="module")
def networks() -> list[CapturedModel]:
    """Return one network, captured for two forms of call."""
    model = chain()
    return [capture_whole(model, Example.of(torch.randn(rows, 64))) for rows in (1, 4)]


def serve(far: RemoteServer, *networks: CapturedModel) -> None:
    for captured in networks:
        far.serve(captured, (0.01,) * captured.program.num_stages)


def turn(far: RemoteServer) -> float:
    """Do one turn of the thread's work; return the seconds until its next turn."""
    try:
        return far._turn()
    except UpriverError as error:
        far.failed(None, error)
        return 0.0


def finished(took_s: float = 0.1, stages_s: float = 0.0) -> ExchangeResult:
    timings = Timings(k=2.0, expected_wait_s=0.0, stages={1: stages_s / 4, 7: stages_s * 3 / 4})
    return ExchangeResult(tensors=(), timings=timings, took_s=took_s)


# ---------------------------------------------------------------------------------------- refusals

OF_ONE_NETWORK = [
    ProgramNotFound("not here"),
    DoesNotFit("too much memory"),
    TooLarge("too many bytes"),
    NotExact("other bits"),
    Forbidden("no place for programs"),
]


@pytest.mark.parametrize("error", OF_ONE_NETWORK, ids=lambda error: error.code)
def test_who_is_not_let_in_with_one_network_is_asked_for_the_others(
    error: UpriverError, far: RemoteServer, there: There, networks: list[CapturedModel]
) -> None:
    first, second = networks
    there.refuses[second.program.digest] = error
    serve(far, first)
    turn(far)
    serve(far, second)
    for _ in range(5):
        turn(far)
        assert far.costs(first) is not None and far.why_not(first) == ""
        assert far.costs(second) is None and str(error) in far.why_not(second)
        far.answered(first, 3, finished())
        there.now_s += 2 * LONGEST_PAUSE_S
    assert there.did.count("let in") == 1 + 5, "the first network once"
    del there.refuses[second.program.digest]
    turn(far)
    assert far.costs(second) is not None and far.why_not(second) == ""


def test_a_network_that_is_refused_is_tried_more_and_more_seldom(
    far: RemoteServer, there: There, networks: list[CapturedModel]
) -> None:
    first, second = networks
    there.refuses[second.program.digest] = ProgramNotFound("not here")
    serve(far, first, second)
    pauses = []
    for _ in range(9):
        turn(far)
        far.answered(first, 3, finished())
        pauses.append(far._wanted[second.program.digest].breaker.left_s(there.now_s))
        there.now_s += pauses[-1]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, *[LONGEST_PAUSE_S] * 4]


@pytest.mark.parametrize(
    "error",
    [TooLarge("too many bytes"), DoesNotFit("too much memory"), DeadlineExceeded("too long")],
    ids=lambda error: error.code,
)
def test_a_request_that_is_refused_has_nothing_let_in_anew(
    error: UpriverError, far: RemoteServer, there: There, networks: list[CapturedModel]
) -> None:
    first, second = networks
    serve(far, first, second)
    turn(far)
    far.failed(second, error)
    assert far.costs(second) is None and str(error) in far.why_not(second)
    assert far.costs(first) is not None
    there.now_s += LONGEST_PAUSE_S
    assert far.costs(second) is not None
    turn(far)
    assert there.did.count("let in") == 2


def test_a_network_of_which_it_gives_other_bits_is_let_in_anew_alone(
    far: RemoteServer, there: There, networks: list[CapturedModel]
) -> None:
    first, second = networks
    serve(far, first, second)
    turn(far)
    far.failed(second, NotExact("other bits at cut 3"))
    there.now_s += LONGEST_PAUSE_S
    assert far.costs(first) is not None and far.costs(second) is None
    turn(far)
    assert far.costs(second) is not None
    assert there.did.count("let in") == 3


@pytest.mark.parametrize(
    "error", [ServerUnavailable("gone"), ProgramNotFound("not any more")], ids=lambda error: error.code
)
def test_a_server_that_may_be_another_one_is_let_in_anew(
    error: UpriverError, far: RemoteServer, there: There, networks: list[CapturedModel]
) -> None:
    serve(far, *networks)
    turn(far)
    far.failed(networks[1], error)
    there.now_s += LONGEST_PAUSE_S
    assert [far.costs(captured) for captured in networks] == [None, None]
    turn(far)
    assert None not in [far.costs(captured) for captured in networks]
    assert there.did.count("let in") == 4


@pytest.mark.parametrize("killer", [0, 1])
def test_one_network_that_a_server_fails_by_keeps_no_other_out(
    killer: int, far: RemoteServer, there: There, networks: list[CapturedModel]
) -> None:
    bad, good = networks[killer], networks[1 - killer]
    there.refuses[bad.program.digest] = ServerUnavailable("broke off")
    serve(far, *networks)
    asked = 0
    for _ in range(600):  # half a second each
        there.now_s += 0.5
        turn(far)
        if far.costs(good) is not None:
            asked += 1
            far.answered(good, 3, finished())
    assert asked > 590
    assert there.did.count("let in") < 10 + 300 / LONGEST_PAUSE_S


def test_one_that_is_gone_when_a_network_is_to_be_let_in_is_asked_for_none(
    far: RemoteServer, there: There, networks: list[CapturedModel]
) -> None:
    serve(far, networks[0])
    turn(far)
    there.down = ServerUnavailable("gone")
    serve(far, networks[1])
    turn(far)
    assert [far.costs(captured) for captured in networks] == [None, None]
    assert far.why_not(networks[0]) == "http://there: gone"
    there.down = None
    there.now_s += LONGEST_PAUSE_S
    turn(far)
    assert None not in [far.costs(captured) for captured in networks]


# ------------------------------------------------------------------------------------------ pauses


def test_pauses_grow_until_a_request_is_answered(
    far: RemoteServer, there: There, networks: list[CapturedModel]
) -> None:
    """This holds too for a server that passes every check and fails every request."""
    captured = networks[0]
    serve(far, captured)

    def pauses(number: int) -> list[float]:
        found = []
        for _ in range(number):
            turn(far)
            assert far.costs(captured) is not None
            far.failed(captured, ServerUnavailable("gone"))
            assert far.costs(captured) is None
            found.append(far._breaker.left_s(there.now_s))
            there.now_s += found[-1]
        return found

    assert pauses(8) == [1.0, 2.0, 4.0, 8.0, 16.0, *[LONGEST_PAUSE_S] * 3]
    turn(far)
    far.answered(captured, 3, finished())
    assert pauses(2) == [1.0, 2.0]


def test_a_server_without_room_is_left_alone_as_long_as_it_says(
    far: RemoteServer, there: There, networks: list[CapturedModel]
) -> None:
    captured = networks[0]
    serve(far, captured)
    turn(far)
    far.failed(captured, Overloaded("no room", retry_after_s=20.0))
    assert far._breaker.left_s(there.now_s) == 20.0 and far.costs(captured) is None
    assert far.why_not(captured) == "http://there: no room"
    there.now_s += 20.0
    assert far.costs(captured) is not None
    assert there.did.count("let in") == 1


# ----------------------------------------------------------------------------------------- probes


def probes_beside(far: RemoteServer, there: There, captured: CapturedModel, cut: int, took_s: float) -> int:
    """Return the number of probes in a minute with a request every two seconds."""
    there.did.clear()
    for _ in range(30):
        there.now_s += 2.0
        far.answered(captured, cut, finished(took_s))
        turn(far)
    return there.did.count("probe")


def test_a_request_puts_a_probe_off_only_if_it_shows_the_link(far: RemoteServer, there: There) -> None:
    """At cut 6 of 7 a single packet crosses, which measures a round trip."""
    wide = capture_whole(chain(), Example.of(torch.randn(16, 64)))
    assert [crossing_bytes(wide.program, cut) for cut in (0, 6)] == [4096, 768]
    serve(far, wide)
    turn(far)
    far.answered(wide, 6, finished())
    assert probes_beside(far, there, wide, 0, took_s=RTT_S + 4096 / there.rate) == 0
    assert probes_beside(far, there, wide, 6, took_s=0.1) >= 9
    costs = far._costs[wide.program.digest]
    far._costs[wide.program.digest] = replace(costs, handling=HandlingTimes(front_s=1.0))
    assert probes_beside(far, there, wide, 0, took_s=0.1) >= 9, "it took less than the front is known to"


def test_a_server_that_is_left_alone_for_its_load_is_asked_for_it_sooner(
    far: RemoteServer, there: There, networks: list[CapturedModel]
) -> None:
    serve(far, networks[0])
    turn(far)
    there.did.clear()
    far._probed_at = far._shown_at = math.inf  # it concerns the load
    assert turn(far) == 10.0
    far._wake.clear()
    for _ in range(3):
        far.ask_load_soon()
        assert far._wake.is_set(), "its thread sleeps for longer than that"
        assert turn(far) == 1.0 and there.did == []
        there.now_s += 0.75
        far.ask_load_soon()
        assert turn(far) == 0.25
        there.now_s += 0.25
        assert turn(far) == 10.0 and there.did == ["load"], "once, until the next request is kept away"
        there.did.clear()
        far._wake.clear()
    far.ask_load_soon()
    far.answered(networks[0], 0, finished())
    far._probed_at = far._shown_at = math.inf
    assert turn(far) == 10.0, "it has told by itself"


def test_a_server_that_is_left_alone_for_its_link_is_probed_sooner(
    far: RemoteServer, there: There, networks: list[CapturedModel]
) -> None:
    there.rate = 1e6
    serve(far, networks[0])
    turn(far)
    there.did.clear()
    far._wake.clear()
    for _ in range(3):
        far._heard_at = there.now_s
        assert turn(far) == 5.0
        far.probe_soon()
        assert far._wake.is_set(), "its thread sleeps for longer than that"
        assert turn(far) == 0.5 and there.did == []
        there.now_s += 0.5
        assert turn(far) == 5.0 and there.did == ["probe"], "once, until the next request is kept away"
        there.did.clear()
        far._wake.clear()


def test_a_thin_link_is_not_probed_so_soon_and_never_less_often_than_without_haste(
    far: RemoteServer, there: There, networks: list[CapturedModel]
) -> None:
    for rate, wait_s in ((81920.0, 1.0), (1e4, 5.0)):
        there.rate = rate
        far.failed(None, ServerUnavailable("gone"))
        there.now_s += 100.0
        serve(far, networks[0])
        turn(far)
        far.probe_soon()
        assert turn(far) == pytest.approx(wait_s, rel=1e-3)


def conditions(far: RemoteServer, captured: CapturedModel) -> ServerConditions:
    costs = far.costs(captured)
    assert costs is not None
    found = far.now(costs)
    assert found is not None
    return found


def test_each_answer_shows_the_factor_of_its_own_stages(
    far: RemoteServer, there: There, networks: list[CapturedModel]
) -> None:
    captured = networks[0]
    serve(far, captured)
    turn(far)
    assert conditions(far, captured).own is None
    for stages_s, load in ((0.014, 2.0), (0.07, 10.0), (0.0, 1.0), (1e9, MOST_FACTOR)):
        far.answered(captured, 0, finished(stages_s=stages_s))  # of 7 ms on the idle server
        assert conditions(far, captured).load == 2.0
        own = conditions(far, captured).own
        assert own is not None
        assert (own.load, own.server_s, own.told) == pytest.approx((load, 0.007, 2.0))
    far.overtaken(captured)
    assert conditions(far, captured).own is None, "how long it would have taken is not known"


def misses(far: RemoteServer, captured: CapturedModel) -> int:
    return conditions(far, captured).misses


def test_a_miss_is_an_answer_by_which_the_device_is_better(
    far: RemoteServer, there: There, networks: list[CapturedModel]
) -> None:
    first, second = networks
    serve(far, first, second)
    turn(far)
    for stages_s, wanted in ((0.014, 0), (0.07, 1), (0.1, 2), (0.014, 0), (0.07, 1)):
        far.answered(first, 0, finished(RTT_S + 256 / there.rate, stages_s))
        assert (misses(far, first), misses(far, second)) == (wanted, 0)


def test_a_request_that_was_overtaken_is_a_miss_and_the_link_is_probed(
    far: RemoteServer, there: There, networks: list[CapturedModel]
) -> None:
    first, second = networks
    serve(far, first, second)
    turn(far)
    there.did.clear()
    for number in (1, 2):
        there.now_s += 1.0
        far._wake.clear()
        far.overtaken(first)
        assert (misses(far, first), misses(far, second)) == (number, 0)
        assert far._wake.is_set(), "its thread sleeps"
        assert turn(far) == 5.0
        assert there.did == ["probe"] * number
        there.now_s += 3.0
        assert (conditions(far, first).silent_s, conditions(far, second).silent_s) == (3.0, 4.0 * number)


def test_a_server_that_lost_is_tried_at_once_when_its_machine_becomes_free(
    far: RemoteServer, there: There, networks: list[CapturedModel]
) -> None:
    captured = networks[0]
    serve(far, captured)
    turn(far)
    for machine, wanted in ((0.95, 3), (0.95, 3), (0.5, 1)):
        if machine > 0.9:
            far._misses[captured.program.digest] = 3
        far._heard_at = -math.inf
        there.machine = machine
        turn(far)
        assert misses(far, captured) == wanted
    there.did.clear()
    assert turn(far) == 5.0 and there.did == ["probe"], "a busy server reads slowly"
    far._misses[captured.program.digest] = 3
    far._heard_at = -math.inf
    turn(far)
    assert misses(far, captured) == 3, "it was free before"


@pytest.mark.parametrize("became", some(1, [1 / 14, 14.0]))
def test_two_probes_that_change_a_choice_are_believed(became: float, far: RemoteServer, there: There) -> None:
    captured = capture_whole(chain(), Example.of(torch.randn(16, 64)))
    if became > 1:
        there.rate /= became
    serve(far, captured)
    turn(far)
    far._misses[captured.program.digest] = 3
    there.rate *= became
    there.did.clear()
    there.now_s += 5.0
    turn(far)
    assert there.did == ["probe", "probe"] and misses(far, captured) == 1
    assert far.link.bandwidth() == pytest.approx(there.rate, rel=1e-3)
    there.rate *= 1.01
    far._heard_at = there.now_s
    there.did.clear()
    there.now_s += 5.0
    turn(far)
    assert there.did == ["probe"], "no choice depends on so little"


def test_figures_are_old_when_nothing_has_shown_them_for_twice_as_long_as_it_may(
    far: RemoteServer, there: There, networks: list[CapturedModel]
) -> None:
    serve(far, networks[0])
    turn(far)
    there.now_s += 10.0
    assert not conditions(far, networks[0]).old
    there.now_s += 0.1
    assert conditions(far, networks[0]).old, "the link"
    far._shown_at = there.now_s
    assert not conditions(far, networks[0]).old
    there.now_s += 10.0
    far._shown_at = there.now_s
    assert conditions(far, networks[0]).old, "the load"


def test_a_probe_waits_for_a_request_that_is_under_way(
    far: RemoteServer, there: There, networks: list[CapturedModel]
) -> None:
    serve(far, networks[0])
    turn(far)
    there.did.clear()
    far._wake.clear()
    there.now_s += 4.0
    with far.under_way():
        there.now_s += 1.0
        assert turn(far) == 5.0, "until the load is to be asked for"
        there.now_s += 3.0
        assert turn(far) == 2.0 and there.did == []
        with far.under_way():
            pass
        assert turn(far) == 2.0 and there.did == []
        assert far._wake.is_set(), "it looks again"
        far._wake.clear()
    assert far._wake.is_set()
    assert turn(far) == 2.0 and there.did == ["probe"]
    far._wake.clear()
    with far.under_way():
        there.now_s += 1.0
    assert not far._wake.is_set(), "nothing is due"


def test_of_a_link_that_the_request_has_shown_the_round_trip_alone_is_measured(
    far: RemoteServer, there: There
) -> None:
    captured = capture_whole(chain(), Example.of(torch.randn(16, 64)))
    serve(far, captured)
    turn(far)
    there.did.clear()
    with far.under_way():
        there.now_s += 6.0
        turn(far)
        far.answered(captured, 0, finished(RTT_S + 4096 / there.rate))
    assert far._wake.is_set()
    assert turn(far) == 5.0 and there.did == ["round trips"]
    there.now_s += 3.0
    far.answered(captured, 0, finished(RTT_S + 4096 / there.rate))
    there.now_s += 2.0
    assert turn(far) == 3.0 and there.did == ["round trips"] * 2, "until five seconds after the request"
    there.now_s += 3.0
    assert turn(far) == 5.0 and there.did == ["round trips"] * 2 + ["probe"]


@pytest.mark.parametrize(("before", "after"), [(0.005, 0.105), (0.105, 0.005)])
def test_a_round_trip_of_another_length_is_learned_while_requests_show_the_link(
    before: float, after: float, far: RemoteServer, there: There
) -> None:
    captured = capture_whole(chain(), Example.of(torch.randn(800, 64)))
    there.rtt_s, there.rate, size = before, 1e7, crossing_bytes(captured.program, 0)
    serve(far, captured)
    turn(far)
    there.rtt_s = after
    for _ in range(20):
        there.now_s += 1.0
        far.answered(captured, 0, finished(there.rtt_s + size / there.rate))
        turn(far)
    assert far.link.latency_s == pytest.approx(after, rel=0.01)
    assert far.link.bandwidth() == pytest.approx(there.rate, rel=0.01)
    assert there.did.count("probe") <= 3, "at the let-in, and perhaps after the first request that was odd"


def test_what_one_request_says_of_the_link_is_made_sure_of_at_once(far: RemoteServer, there: There) -> None:
    captured = capture_whole(chain(), Example.of(torch.randn(16, 64)))
    serve(far, captured)
    turn(far)
    usual_s = RTT_S + 4096 / there.rate
    there.rate /= 20
    there.did.clear()
    with far.under_way():
        there.now_s += 1.0
        far.answered(captured, 0, finished(usual_s))
        far._wake.clear()
    assert not far._wake.is_set() and turn(far) == 4.0 and there.did == [], "it is as it was"
    with far.under_way():
        there.now_s += 1.0
        far.answered(captured, 0, finished(RTT_S + 4096 / there.rate))
        far._wake.clear()
        assert turn(far) == 10.0 and there.did == [], "until the load is to be asked for"
    assert far._wake.is_set()
    assert turn(far) == 5.0 and there.did == ["probe"]
    assert far.link.bandwidth() == pytest.approx(there.rate, rel=1e-3), "it is believed"
    there.did.clear()
    for number in range(30):
        there.now_s += 1.0
        far.answered(captured, 0, finished(RTT_S + 4096 / (there.rate * (1, 10)[number % 2])))
        turn(far)
    assert 1 <= there.did.count("probe") <= 6, "a link that jumps is not probed after each request"


def test_a_probe_waits_for_no_request_that_began_after_it_was_due(
    far: RemoteServer, there: There, networks: list[CapturedModel]
) -> None:
    """Requests that show nothing about the link follow each other without a gap."""
    serve(far, networks[0])
    turn(far)
    there.did.clear()
    there.now_s += 4.0
    first, second = far.under_way(), far.under_way()
    first.__enter__()
    there.now_s += 2.0
    second.__enter__()
    turn(far)
    assert there.did == []
    first.__exit__(None, None, None)
    turn(far)
    assert there.did == ["probe"]
    second.__exit__(None, None, None)


@pytest.mark.parametrize(("beside", "probes"), [(False, 2), (True, 1)])
def test_a_probe_is_not_repeated_beside_a_request(
    beside: bool, probes: int, far: RemoteServer, there: There, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe is repeated where the link seems to have changed and is free."""
    serve(far, capture_whole(chain(), Example.of(torch.randn(16, 64))))
    turn(far)
    there.rate /= 14
    there.now_s += 5.0
    there.did.clear()
    with ExitStack() as requests:

        def probe(*args: Any, **kwargs: Any) -> None:
            there.probe(*args, **kwargs)
            if beside:
                requests.enter_context(far.under_way())

        monkeypatch.setattr(far_module, "probe", probe)
        turn(far)
        assert there.did.count("probe") == probes


def test_a_request_to_one_server_puts_off_the_probes_of_others(
    far: RemoteServer, there: There, networks: list[CapturedModel]
) -> None:
    other = RemoteServer(There(), OffloadTuning(), far._uplink, agreement=far._agreement)  # type: ignore[arg-type]
    serve(far, networks[0])
    turn(far)
    there.did.clear()
    with other.under_way():
        there.now_s += 6.0
        turn(far)
        assert there.did == []
    turn(far)
    assert there.did == ["probe"]


def test_a_link_that_has_become_thin_locks_no_server_out(far: RemoteServer, there: There) -> None:
    """Requests of 600 kB over 8 MB/s, then 0.1 MB/s: a probe of their size exceeds its time limit."""
    captured = capture_whole(chain(), Example.of(torch.randn(2400, 64)))
    assert crossing_bytes(captured.program, 0) == 614_400
    there.rate = 8e6
    serve(far, captured)
    turn(far)
    far.answered(captured, 0, finished(took_s=RTT_S + 614_400 / there.rate))
    there.rate = 1e5
    there.now_s += 5.0
    turn(far)
    assert far.costs(captured) is None and "no answer in time" in far.why_not(captured)
    there.now_s += LONGEST_PAUSE_S
    turn(far)
    costs = far.costs(captured)
    assert costs is not None
    now = far.now(costs)
    assert now is not None and now.upload_bytes_per_s == pytest.approx(1e5, rel=1e-3)
    there.now_s += 5.0
    turn(far)
    assert far.costs(captured) is not None


def test_what_was_known_of_the_link_outlives_a_refusal(
    far: RemoteServer, there: There, networks: list[CapturedModel]
) -> None:
    serve(far, networks[0])
    turn(far)
    for error in (Overloaded("no room"), TooLarge("too many bytes")):
        far.failed(networks[0], error)
        there.now_s += LONGEST_PAUSE_S
        assert far.link.bandwidth() is not None
