"""Test the benchmark of a server: load, watching and judging apart, then each claim in its smallest form."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness.children import Failed
from benchmarks.harness.memory_group import Watch, memory_group, pss_and_rss
from benchmarks.harness.records import Deadline, Records
from benchmarks.server import __main__ as server
from benchmarks.server import load as server_load
from benchmarks.server.adaptation import OFF as FIXED
from benchmarks.server.adaptation import ON as ADAPTIVE
from benchmarks.server.adaptation import reductions
from benchmarks.server.claim import Bench, Claim, Rows, outcomes, percentile
from benchmarks.server.fairness import ALONE, EQUAL, WEIGHTED
from benchmarks.server.host import Generator, Metrics, Server, toml
from benchmarks.server.load import (
    CLOSED,
    LEFT,
    OK,
    WRONG,
    Asked,
    Done,
    Order,
    Question,
    Stream,
    digest_of,
    ended,
)
from benchmarks.server.memory import ALL, ONE
from benchmarks.server.overload import AFTER, recovery_s
from benchmarks.server.readers import Stalled, stall
from benchmarks.server.report import picture, write
from benchmarks.server.reuse import OFF as READ
from benchmarks.server.tenants import NEAR, PLAIN
from upriver.errors import Overloaded, ServerUnavailable, StoreError
from upriver.protocol import DatasetRef, RunRequest
from upriver.types import MicroBatch, Timings

REQUEST = RunRequest(
    micro_batches=((0,),),
    start=-1,
    stop=0,
    micro_batch=1,
    dataset=DatasetRef(store="default", digest="0" * 64),
)
RIGHT, OTHER = torch.zeros(2), torch.ones(2)
QUICK = {claim.name: claim for claim in server.QUICK}


# ------------------------------------------------------------------------------------------------- load


class Scripted:
    """Client whose token says how its requests end: r refused, w wrong, e with an error, else right."""

    def __init__(self, url: str, *, token: str) -> None:
        self._says = list(token)
        self._closed = threading.Event()

    @contextmanager
    def run(self, request: RunRequest) -> Iterator[list[tuple[MicroBatch, Timings]]]:
        if self._closed.wait(0.001):
            raise ServerUnavailable("this client was closed")
        said = self._says.pop(0) if self._says else "a"
        if said == "r":
            raise Overloaded("no room", retry_after_s=0.01)
        if said == "l":
            raise Overloaded("no room for long", retry_after_s=60.0)
        if said == "e":
            raise StoreError("gone")
        batch = MicroBatch(ids=(0,), position=0, tensors=(OTHER if said == "w" else RIGHT,))
        yield [(batch, Timings(phases={"queue": 9.0, "forward": 0.5}))]

    def close(self) -> None:
        self._closed.set()


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    monkeypatch.setattr(server_load, "ServerClient", Scripted)
    questions = {"q": Question(request=REQUEST, digests=(digest_of([RIGHT]),))}

    def carry_out(*streams: Stream) -> Done:
        return server_load.carry_out(Order(url="http://nowhere", questions=questions, streams=streams))

    return carry_out


def stream(name: str, token: str = "a", **fields: Any) -> Stream:
    return Stream(name=name, token=token, questions=("q",), **fields)


def test_a_refused_request_is_asked_again_until_it_is_answered(put: Callable[..., Done]) -> None:
    (asked,) = put(stream("s", "rra", count=1)).streams["s"]
    assert (asked.outcome, asked.tries, asked.work_s) == (OK, 3, 0.5)
    assert outcomes([asked]) == {"asked": 1, "right": 1, "others": {}, "why": "", "refused": 2}


def test_a_request_is_given_up_after_its_tries_or_its_patience(put: Callable[..., Done]) -> None:
    done = put(stream("tries", "rrrr", count=1, most_tries=2), stream("patience", "l", count=1, patience_s=5))
    assert [(each.outcome, each.tries) for each in done.streams["tries"]] == [("overloaded", 2)]
    assert [(each.outcome, each.tries) for each in done.streams["patience"]] == [("overloaded", 1)]


def test_wrong_answers_and_errors_are_told_apart(put: Callable[..., Done]) -> None:
    done = put(stream("s", "wea", count=3))
    assert [each.outcome for each in done.streams["s"]] == [WRONG, "store", OK]
    assert outcomes(ended(done))["others"] == {WRONG: 1, "store": 1}


def test_values_are_held_to_a_tolerance(tmp_path: Path) -> None:
    check = server_load.Check(Question(request=REQUEST, values=str(written(tmp_path, torch.ones(2, 3)))))
    for wanted in (torch.ones(1, 3), torch.ones(1, 3) + 1e-5):
        check(MicroBatch(ids=(0,), position=1, tensors=(wanted,)))
    assert check.right
    check = server_load.Check(Question(request=REQUEST, values=str(written(tmp_path, torch.ones(1, 3)))))
    check(MicroBatch(ids=(0,), position=1, tensors=(torch.full((1, 3), 1.1),)))
    assert not check.right


def written(folder: Path, values: torch.Tensor) -> Path:
    np.save(folder / "values.npy", values.numpy())
    return folder / "values.npy"


class Meanwhile(Scripted):
    """Client that sends at once where its token is g; all others wait for it."""

    asked = threading.Event()

    def __init__(self, url: str, *, token: str) -> None:
        super().__init__(url, token=token)
        self._first = token == "g"

    @contextmanager
    def run(self, request: RunRequest) -> Iterator[list[tuple[MicroBatch, Timings]]]:
        if self._first:
            self.asked.set()
        else:
            assert self.asked.wait(60)
        with super().run(request) as answer:
            yield answer


def test_who_has_no_end_goes_on_until_the_others_are_through(
    put: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_load, "ServerClient", Meanwhile)
    done = put(stream("greedy", "g", in_flight=4), stream("modest", count=5))
    assert [each.outcome for each in done.streams["modest"]] == [OK] * 5
    assert done.streams["greedy"], "it has asked meanwhile"
    assert {each.outcome for each in done.streams["greedy"]} <= {OK, CLOSED}
    assert {each.outcome for each in ended(done)} == {OK}


def test_streams_follow_each_other(put: Callable[..., Done]) -> None:
    done = put(stream("second", count=3, after="first"), stream("first", count=3))
    assert max(each.done_s for each in done.streams["first"]) <= min(
        each.asked_s for each in done.streams["second"]
    )


def test_an_open_stream_asks_whatever_becomes_of_it(put: Callable[..., Done]) -> None:
    done = put(stream("open", "l" * 20, rate=100.0, seconds=0.2))
    assert len(done.streams["open"]) == 20
    assert {each.outcome for each in done.streams["open"]} == {LEFT}, "those who wait leave at the end"
    done = put(stream("open", rate=5.0, seconds=4.0))  # a thread may not run at once
    found = [each.outcome for each in done.streams["open"]]
    assert len(found) == 20 and OK in found and set(found) <= {OK, LEFT}


def test_a_thread_that_fails_fails_the_order(put: Callable[..., Done]) -> None:
    with pytest.raises(KeyError):
        put(Stream(name="s", token="a", questions=("unknown",), count=1), stream("greedy"))


@contextmanager
def sending(data: bytes) -> Iterator[str]:
    """Serve these bytes to every connection, and close it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                while b"\r\n\r\n" not in connection.recv(1 << 16):
                    pass
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize("end", [b"", b"0\r\n\r\n"])
def test_a_stalled_reader_says_how_its_answer_ended(end: bytes) -> None:
    data = b"HTTP/1.1 200 OK\r\n\r\n" + bytes(4 << 20) + end
    with sending(data) as url:
        (taken,) = stall(url, Stalled(token="t", question="q", count=1, hold_s=0.05), REQUEST)
    assert (taken.status, taken.num_bytes, taken.closed) == (200, len(data), True)
    assert taken.whole == bool(end)


# ------------------------------------------------------------------------------------------------- host


def test_a_servers_file_says_what_was_meant() -> None:
    document = {
        "port": 0,
        "admission": "adaptive",
        "collect_s": 0.05,
        "stores": {"default": "file:///a b"},
        "tenants": {"t01": {"token_hashes": ["ab"], "weight": 4.0}, "t.2": {"token_hashes": []}},
        "caps": {"pixels": 10},
    }
    assert tomllib.loads(toml(document)) == document


def test_counters_are_summed_over_labels() -> None:
    metrics = Metrics(
        '# HELP a_total x\na_total{t="1",r="x"} 2.0\na_total{t="2",r="x"} 3.0\na_total_other 9.0\nb 1.5\n'
    )
    assert metrics.of("a_total") == 5 and metrics.of("a_total", t="2") == 3
    assert metrics.of("b") == 1.5 and metrics.of("c") == 0


@pytest.mark.slow
@pytest.mark.full
def test_an_order_that_took_too_long_is_no_answer_to_the_next_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, Generator() as generator:
        nobody: Any = SimpleNamespace(
            url=f"http://127.0.0.1:{listener.getsockname()[1]}", said=lambda: "it was silent"
        )
        readers = [Stalled(token="t", question="q", count=1, hold_s=1.0)]
        with pytest.raises(Failed, match="it was silent"):
            generator.put(nobody, {"q": Question(request=REQUEST)}, readers=readers, limit_s=0.01)
        assert generator.put(nobody, {}).readers == []


def test_a_server_that_has_ended_has_no_metrics(tmp_path: Path) -> None:
    gone = Server("memory://", tmp_path, {}, tenants={"t": {}})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(Failed, match="no /metrics"):
        gone.metrics()


def test_memory_is_that_of_the_processes() -> None:
    pss, rss = pss_and_rss(os.getpid())
    assert 0 < pss <= rss
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with child:
        with Watch(os.getpid()) as watch:
            pass
        assert watch.looks > 1 and watch.peaks["workers"] > 0
        assert watch.peaks["together"] <= watch.peaks["front"] + watch.peaks["workers"]
    assert pss_and_rss(child.pid) == (0, 0), "it has gone"


def test_what_a_server_takes_when_the_block_ends_is_seen() -> None:
    """This holds however long the watch rests between two looks."""
    code = "input(); data = b'x' * (64 << 20); print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:
        assert child.stdin is not None and child.stdout is not None
        asked = threading.Event()
        with Watch(child.pid, every_s=1000.0, ask=asked.set) as watch:
            assert asked.wait(60)
            child.stdin.write(b"\n")
            child.stdin.flush()
            assert child.stdout.readline()
        child.communicate(b"\n")
    assert (watch.looks, watch.peaks["front"] > 64 << 20) == (2, True)


def test_a_group_counts_what_its_processes_take() -> None:
    with memory_group("test", 1 << 30) as group:
        if group is None:
            pytest.skip("no control group can be made here")
        code = "data = b'x' * (64 << 20); print(flush=True); input()"
        argv = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group.path / "cgroup.procs")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([*argv, sys.executable, "-c", code], **pipes) as child:
            assert child.stdout is not None and child.stdout.readline()
            assert 64 << 20 <= group.used_bytes() < 1 << 30
            child.communicate(b"\n")
        assert group.kills() == 0
    assert not group.path.exists()


# ---------------------------------------------------------------------------------------------- judging


@pytest.fixture
def kept(tmp_path: Path) -> Bench:
    return Bench(Records(tmp_path / "records.jsonl"), Deadline(None), tmp_path, samples=1)


def test_only_runs_of_these_settings_and_this_code_count(kept: Bench) -> None:
    claim = QUICK["memory"]
    assert Rows(claim, kept.records).state == "0 of 2 runs made"
    kept.add(claim, ONE, 0, {"seconds": 1.0})
    rows = Rows(claim, kept.records)
    assert rows.missing == [(ALL, 0)] and not rows.complete and kept.missing(claim) == [(ALL, 0)]
    assert len(Rows(claim, kept.records, code="other").missing) == 2
    full = next(each for each in server.FULL if each.name == "memory")
    assert full.settings != claim.settings and not Rows(full, kept.records).rows
    again = Records(kept.records.path)
    assert Rows(claim, again).missing == [(ALL, 0)]


def answered(count: int = 4) -> dict[str, Any]:
    return {"asked": count, "right": count, "others": {}, "refused": 0}


@pytest.mark.parametrize(
    ("change", "met"),
    [
        ({}, True),
        ({"seconds": 13.0}, False),
        ({"restarts": 1}, False),
        ({"right": 3, "others": {"overloaded": 1}}, False),
        ({"beyond_idle": 111}, False),
        ({"group_beyond_idle": 111}, False),
        ({"peaks": {"workers": 111, "group": 0}}, False),
    ],
)
def test_memory_is_judged_by_every_part_of_its_goal(kept: Bench, change: dict[str, Any], met: bool) -> None:
    claim = QUICK["memory"]
    row = {
        **answered(),
        "seconds": 10.0,
        "restarts": 0,
        "budget": 100,
        "asks": 400,
        "idle": {"workers": 1, "front": 1},
        "peaks": {"workers": 110, "group": 0},
        "beyond_idle": 110,
        "group_beyond_idle": 0,
    }
    kept.add(claim, ONE, 0, row)
    kept.add(claim, ALL, 0, {**row, "seconds": 12.0, **change})
    rows = Rows(claim, kept.records)
    assert claim.verdict(rows).met is met
    assert len(claim.tables(rows).splitlines()) == 4


@pytest.mark.parametrize(("weighted", "met"), [(1.5, True), (1.51, False)])
def test_fairness_is_judged_by_the_slowest_in_a_hundred(kept: Bench, weighted: float, met: bool) -> None:
    claim = QUICK["fairness"]
    for cell, slow in ((ALONE, 1.0), (EQUAL, 2.3), (WEIGHTED, weighted)):
        row = {**answered(), "latencies": [0.5, slow], "micro_batch_s": 0.1, "greedy": 7}
        kept.add(claim, cell, 0, row)
    assert claim.verdict(Rows(claim, kept.records)).met is met


@pytest.mark.parametrize(
    ("seconds", "met"),
    [((10.0, 10.0, 10.0), True), ((10.6, 10.6, 9.9), True), ((10.6, 10.6, 10.1), False)],
)
def test_concurrency_costs_time_where_every_repeat_says_so(
    kept: Bench, seconds: tuple[float, ...], met: bool
) -> None:
    claim: Any = replace(QUICK["concurrency"], repeats=len(seconds))
    for cell in claim.cells:
        for repeat, slow in enumerate(seconds):
            at_once = "tiny 2 x4" in cell
            row = {**answered(), "seconds": slow if at_once else 10.0, "cut": 1, "stage": "a", "bytes": 1}
            kept.add(claim, cell, repeat, {**row, "at_work": 0.9})
    rows = Rows(claim, kept.records)
    assert claim.verdict(rows).met is met
    assert len(claim.tables(rows).splitlines()) == 2 + len(claim.places)


@pytest.mark.parametrize(("peak", "met"), [(100, True), (101, False)])
def test_stalled_readers_are_to_stay_within_the_budget(kept: Bench, peak: int, met: bool) -> None:
    claim: Any = QUICK["stalled"]
    row = {
        **answered(),
        "budget": 100,
        "reserved": 100,
        "micro_batch_bytes": 10,
        "idle": {"front_rss": 0, "together": 0, "workers": 0},
        "peaks": {"front_rss": 5, "together": 5, "workers": peak},
        "cut_off": claim.readers,
        "let_go_s": claim.deadline_s,
        "whole": 0,
        "restarts": 0,
    }
    kept.add(claim, claim.cells[0], 0, row)
    assert claim.verdict(Rows(claim, kept.records)).met is met


def test_percentiles_are_values_that_there_are() -> None:
    values = [float(number) for number in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([3.0], 0.99)) == (50.0, 99.0, 3.0)


def test_a_smaller_batch_is_counted_by_requests() -> None:
    assert reductions([{"25": 0, "50": 0, "100": 4}], 100) == (0.0, 0.0)
    assert reductions([{"25": 1, "50": 1, "100": 2}], 100) == (0.5, pytest.approx(0.3125))
    assert reductions([{}], 100) == (0.0, 0.0)


def test_recovery_is_when_latencies_stay_normal() -> None:
    def after(*latencies: float) -> Done:
        times = [10.0 + number for number in range(len(latencies))]
        asked = [
            Asked(question="q", asked_s=at, done_s=at + took, outcome=OK, tries=1)
            for at, took in zip(times, latencies, strict=True)
        ]
        return Done(streams={AFTER: asked})

    assert recovery_s(after(0.1, 0.1), 10.0, 0.1) == 0.0
    assert recovery_s(after(0.9, 0.1, 0.1), 10.0, 0.1) == 1.0
    assert recovery_s(after(0.9, 0.1, 0.9, 0.14), 10.0, 0.1) == 3.0
    assert recovery_s(after(0.1, 0.9), 10.0, 0.1) is None
    assert recovery_s(after(0.9, 0.1, 0.9, *[0.1] * 8), 10.0, 0.1) == 1.0, "an odd one of ten"
    assert recovery_s(after(0.9, 0.1, 0.9, *[0.1] * 7), 10.0, 0.1) == 3.0, "one of nine is too many"
    assert recovery_s(after(), 10.0, 0.1) is None


def test_the_declared_settings_are_what_was_promised() -> None:
    full: dict[str, Any] = {claim.name: claim for claim in server.FULL}
    assert list(full) == list(QUICK)
    assert (full["memory"].tenants, full["memory"].times) == (16, 4.0)
    assert full["fairness"].greedy == 32
    assert full["fairness"].repeats * full["fairness"].requests >= 100, "a 99th percentile"
    assert full["concurrency"].networks == ("alexnet", "resnet18", "densenet121")
    assert full["concurrency"].num_cuts == 4
    assert (min(full["tenants"].counts), max(full["tenants"].counts)) == (1, 10)
    assert full["adaptation"].sizes[0] == 25
    assert (full["overload"].times, full["overload"].overload_s) == (4.0, 60.0)
    assert (full["stalled"].readers, full["stalled"].deadline_s) == (64, 20.0)


# --------------------------------------------------------------------------------------------- each claim


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("bench")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    records = Records(folder / "server_quick.jsonl")
    with server.bench(records, Deadline(None), folder, quick=True) as made:
        yield made
    torch.set_num_threads(threads)


def runs(claim: Claim, bench: Bench) -> Rows:
    """Run all of a claim; check that each occurs once."""
    assert server.measure([claim], bench) == []
    rows = Rows(claim, bench.records)
    assert not rows.missing and len(rows.rows) == claim.repeats * len(claim.cells)
    return rows


@pytest.mark.full
def test_memory_in_its_smallest_form(on: Bench) -> None:
    claim: Any = QUICK["memory"]
    rows = runs(claim, on)
    for row in rows.rows:
        assert (row["right"], row["others"], row["restarts"]) == (claim.tenants * claim.per_tenant, {}, 0)
        # Shared memory counts for less when other processes share it.
        assert 0 < row["idle"]["workers"] < 2 * row["peaks"]["workers"] and row["looks"] > 1


@pytest.mark.full
def test_fairness_in_its_smallest_form(on: Bench) -> None:
    claim: Any = QUICK["fairness"]
    rows = runs(claim, on)
    for row in rows.rows:
        assert row["right"] == row["asked"] == claim.requests + row["greedy"]
        assert len(row["latencies"]) == claim.requests
    assert [bool(row["greedy"]) for row in rows.rows] == [False, True, True]


@pytest.mark.full
def test_concurrency_in_its_smallest_form(on: Bench) -> None:
    claim: Any = QUICK["concurrency"]
    rows = runs(claim, on)
    assert {row["right"] for row in rows.rows} == {claim.requests}
    assert len({row["cut"] for row in rows.rows}) == claim.num_cuts


@pytest.mark.full
def test_tenants_in_their_smallest_form(on: Bench) -> None:
    claim: Any = QUICK["tenants"]
    rows = runs(claim, on)
    for count in claim.counts:
        (near,), (plain,) = rows.of(f"{NEAR} x{count}"), rows.of(f"{PLAIN} x{count}")
        assert near["right"] == count and near["mean_s"] <= near["makespan_s"]
        assert plain["right"] + sum(plain["others"].values()) == count == plain["asked"]
        assert plain["right"] == len(plain["losses"])
        assert plain["limited_by"] == "share" or plain["right"] == count, plain["why"]
    assert len({loss for row in rows.rows for _, loss in row.get("losses", [])}) <= 1


@pytest.mark.full
def test_adaptation_in_its_smallest_form(on: Bench) -> None:
    claim: Any = QUICK["adaptation"]
    rows = runs(claim, on)
    for count in claim.counts:
        (adaptive,), (fixed,) = rows.of(f"{ADAPTIVE} x{count}"), rows.of(f"{FIXED} x{count}")
        assert adaptive["right"] == count == sum(adaptive["batches"].values()), adaptive["why"]
        assert "skipped" in fixed or fixed["right"] == count


@pytest.mark.full
def test_reuse_in_its_smallest_form(on: Bench) -> None:
    claim: Any = QUICK["reuse"]
    for row in runs(claim, on).rows:
        anew = row["cell"].endswith(READ)
        assert row["right"] == claim.requests
        assert (row["kept"], row["read"]) == ((0, claim.requests) if anew else (claim.requests, 0))


@pytest.mark.full
def test_overload_in_its_smallest_form(on: Bench) -> None:
    for row in runs(QUICK["overload"], on).rows:
        assert (row["wrong"], row["failed"], row["restarts"]) == (0, 0, 0), row["why"]
        assert row["peak"] > 0 and 0 < row["right"] <= row["asked"]


@pytest.mark.full
def test_stalled_readers_in_their_smallest_form(on: Bench) -> None:
    claim: Any = QUICK["stalled"]
    (row,) = runs(claim, on).rows
    assert row["right"] == row["asked"] > 0, row["why"]
    assert (row["cut_off"], row["whole"], row["restarts"]) == (claim.readers, 0, 0)
    assert set(row["statuses"]) <= {0, 200}
    assert 0 < row["reserved"] <= row["budget"] and row["running"] >= claim.readers
    assert row["let_go_s"] is not None


@pytest.mark.full
def test_the_report_has_every_claim(on: Bench, tmp_path: Path) -> None:
    text = write(server.QUICK, on.records, tmp_path, "made")
    assert (tmp_path / "made.md").read_text(encoding="utf-8") == text
    for claim in server.QUICK:
        rows = Rows(claim, on.records)
        assert f"## {claim.title}" in text
        assert (tmp_path / picture(claim, "made")).exists() == rows.complete
        assert rows.complete or rows.state in text


def test_the_command_lists_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["server", "--quick", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--list", "--only", "reuse", "stalled"])
    server.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["reuse", "stalled"]
    monkeypatch.setattr(sys, "argv", [*command, "--report"])
    server.main()
    assert capsys.readouterr().out.count("Not finished: 0 of ") == len(server.QUICK)
    assert (tmp_path / "server_quick.md").exists() and not list(tmp_path.glob("*.png"))
    with pytest.raises(SystemExit):
        server.parsed(["--only", "nonsense"])


def test_wrong_answers_fail_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = QUICK["reuse"]
    row = {"claim": claim.name, "settings": claim.settings, "cell": claim.cells[0], "repeat": 0}
    row |= {"commit": "abc", "code": "abc", "at": 1.0, "others": {"wrong": 2, "left": 1}}
    Records(tmp_path / "server_quick.jsonl").add("one", row)
    monkeypatch.setattr(sys, "argv", ["server", "--quick", "--out", str(tmp_path), "--report"])
    with pytest.raises(SystemExit, match="error: reuse: 2 wrong answers"):
        server.main()
