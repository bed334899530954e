"""Load a server with four times its capacity. Measure its goodput, and the time until it recovers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.harness.children import Failed
from benchmarks.harness.measuring import Spread
from benchmarks.server.claim import (
    Bench,
    Claim,
    Questions,
    Row,
    Rows,
    Verdict,
    latencies,
    outcomes,
    table_of,
)
from benchmarks.server.host import Server
from benchmarks.server.load import LEFT, OK, WRONG, Asked, Done, Stream, ended
from upriver.report.figure import legend_above

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POLITE, RUDE = "clients that wait", "clients that do not"
RUDE_TRIES = 4
"""Number of tries of a client that does not wait after a refusal: 16 times the load in requests."""

PATIENCE_S = 10.0
"""Seconds after which a client that waits as advised gives up. Three of four cannot be served. The longer
they retry, the larger the part of the server's work that is refusing."""

PROBE_PAUSE_S = 0.1
"""Seconds between two requests of the client that checks the recovery."""

BEFORE, AFTER = "before", "after"
GOAL_GOODPUT, GOAL_RECOVERY_S = 0.9, 5.0

NORMAL = 1.5
"""Latency counts as normal below this multiple of the median before the load."""

ODD = 0.1
"""Share of requests that may be slower after the recovery. A shared machine delays some."""


@dataclass(frozen=True, kw_only=True)
class Overload(Claim):
    """Goodput under too much load, and latencies after it.

    Attributes:
        network: Network of all requests.
        micro_batch: Samples of a request.
        tenants: Tenants that make the load.
        at_once: Concurrent requests that give the peak.
        times: The load, over the peak.
        saturate_s: Seconds in which the peak is measured.
        normal_s: Seconds in which latencies are measured before the load.
        overload_s: Seconds of the load.
        after_s: Seconds in which latencies are measured after the load.
        max_admitted: Requests that may compute at once.
        max_waiting: Requests that may wait. The server finishes them after the load.
    """

    name: ClassVar[str] = "overload"
    title: ClassVar[str] = "Four times too much load"
    says: ClassVar[str] = (
        "Under four times the load that it can do, for a minute, the server answers at 0.9 times its peak "
        "rate or more, and latencies are normal again 5 s after the load ends; whether clients wait as they "
        "are told or not."
    )

    network: str
    micro_batch: int
    tenants: int
    at_once: int
    times: float
    saturate_s: float
    normal_s: float
    overload_s: float
    after_s: float
    max_admitted: int
    max_waiting: int

    @property
    def cells(self) -> tuple[str, ...]:
        return (POLITE, RUDE)

    @property
    def names(self) -> list[str]:
        """Return the names of the tenants."""
        return [f"t{number}" for number in range(1, self.tenants + 1)]

    # ------------------------------------------------------------------------------------------ running

    def measure(self, bench: Bench) -> None:
        program = bench.world.program(self.network, self.micro_batch)
        questions = {
            str(number): bench.world.question(
                program,
                program.num_stages,
                bench.world.batches(number * self.micro_batch, self.micro_batch),
            )
            for number in range(4)
        }
        settings = {"max_admitted": self.max_admitted, "max_waiting": self.max_waiting}
        with bench.server(settings, self.names) as server:
            warm = [_stream(server, questions, name, name, count=2) for name in self.names]
            bench.generator.put(server, questions, warm)
            for cell, repeat in bench.todo(self):
                bench.add(self, cell, repeat, self._run(bench, server, questions, cell))

    def _run(self, bench: Bench, server: Server, questions: Questions, cell: str) -> Row:
        peak, at_work = self._peak(bench, server, questions)
        before = server.metrics()
        done = bench.generator.put(server, questions, self._streams(server, questions, cell, peak))
        flood = ended(done, self.names)
        begin_s, end_s = self.normal_s, self.normal_s + self.overload_s
        answered = [each.done_s for each in flood if each.outcome == OK]
        per_second = [0] * round(end_s + self.after_s + 60)
        for at in answered:
            per_second[min(int(at), len(per_second) - 1)] += 1
        normal = latencies(done.streams.get(BEFORE, []))
        if not normal:
            raise Failed("nothing was answered before the load began")
        return {
            **outcomes(flood),
            "seconds": self.overload_s,
            "peak": peak,
            "at_work": at_work,
            "goodput": sum(begin_s <= at < end_s for at in answered) / self.overload_s,
            "offered": len(flood) / self.overload_s,
            "tries": sum(each.tries for each in flood) / self.overload_s,
            "wrong": sum(each.outcome == WRONG for each in flood),
            "failed": _failed(flood),
            "normal_s": median(normal),
            "latency_s": median(latencies(flood) or [0.0]),
            "recovery_s": recovery_s(done, end_s, median(normal)),
            "restarts": server.metrics().restarts - before.restarts,
            "per_second": per_second[: int(end_s + self.after_s)],
        }

    def _peak(self, bench: Bench, server: Server, questions: Questions) -> tuple[float, float]:
        """Return the answers a second with enough concurrent requests to fill the server, without the ends.

        The second figure is the share of the time in which the worker computed.
        """
        streams = [
            _stream(
                server,
                questions,
                name,
                name,
                in_flight=max(1, self.at_once // self.tenants),
                seconds=self.saturate_s,
            )
            for name in self.names
        ]
        requests = ended(bench.generator.put(server, questions, streams))
        right = [each for each in requests if each.outcome == OK]
        if len(right) < 2:
            raise Failed(f"{len(right)} answers in {self.saturate_s:g} s tell no rate")
        done = [each.done_s for each in right]
        peak = (len(done) - 1) / (max(done) - min(done))
        return peak, peak * median(each.work_s for each in right)

    def _streams(self, server: Server, questions: Questions, cell: str, peak: float) -> list[Stream]:
        """Return one client before, the flood, and one client after.

        The last client retries at once after a refusal.
        """
        polite = {"patience_s": PATIENCE_S}
        rude = {"pause_s": 0.0, "most_tries": RUDE_TRIES}
        flood = [
            _stream(
                server,
                questions,
                name,
                name,
                rate=self.times * peak / self.tenants,
                begin_s=self.normal_s,
                seconds=self.overload_s,
                **(polite if cell == POLITE else rude),
            )
            for name in self.names
        ]
        first, end_s = self.names[0], self.normal_s + self.overload_s
        before = _stream(server, questions, BEFORE, first, seconds=self.normal_s)
        after = _stream(
            server,
            questions,
            AFTER,
            first,
            begin_s=end_s,
            seconds=self.after_s,
            pause_s=PROBE_PAUSE_S,
        )
        return [before, *flood, after]

    # ---------------------------------------------------------------------------------------- reporting

    def verdict(self, rows: Rows) -> Verdict:
        told, met = [], not rows.sum("wrong") and not rows.sum("failed") and not rows.sum("restarts")
        for cell in self.cells:
            share = _goodput(rows, cell)
            worst = max(_recoveries(rows, cell))
            met = met and share.median >= GOAL_GOODPUT and worst <= GOAL_RECOVERY_S
            told.append(f"{cell}: {share.text()} of the peak, normal again after {_within(worst)}")
        return Verdict(
            met=met,
            text=f"{'; '.join(told)}, at worst (goals {GOAL_GOODPUT} and {GOAL_RECOVERY_S:g} s); "
            f"{rows.sum('wrong')} "
            f"wrong answers, {rows.sum('failed')} errors but refusals, {rows.sum('restarts')} workers ended.",
        )

    def tables(self, rows: Rows) -> str:
        lines = [
            (
                cell,
                f"{row['peak']:.2f}",
                f"{row['at_work']:.2f}",
                f"{row['offered']:.1f}",
                f"{row['tries']:.1f}",
                f"{row['goodput']:.2f}",
                f"{row['goodput'] / row['peak']:.2f}",
                f"{row['normal_s']:.2f}",
                f"{row['latency_s']:.2f}",
                _within(_recovery(row)),
            )
            for cell in self.cells
            for row in rows.of(cell)
        ]
        header = (
            "load",
            "peak, answers a second",
            "share of it in which the worker computed",
            "asked for a second",
            "tries a second",
            "goodput, a second",
            "of the peak",
            "normal latency, s",
            "latency under load, s",
            "normal again after",
        )
        return table_of(header, lines)

    def notes(self) -> Sequence[str]:
        return (
            f"One micro-batch of {self.micro_batch} JPEGs through {self.network}. The peak is measured "
            f"before each run, for {self.saturate_s:g} s, with {self.at_once} requests at once; then "
            f"{self.times:g} times as many requests come for {self.overload_s:g} s, evenly, whatever becomes "
            "of those before.",
            f"Clients that wait ask again when the server says, for {PATIENCE_S:g} s at most. Those that do "
            f"not ask again at once, {RUDE_TRIES} times in all, and give up. When the load ends nobody asks "
            "again; what the server has taken in it still answers.",
            f"The server works on {self.max_admitted} requests at once, or on the first of each tenant, and "
            f"lets {self.max_waiting} wait: the "
            "operator's choice of how long a queue may take to work off. Normal again: the first moment from "
            "which a client of one of the same tenants, one request at a time, gets its answers in "
            f"{NORMAL} times the median before, but for one in {1 / ODD:g}; it asks every {PROBE_PAUSE_S:g} "
            "s while it is refused. Front and worker share a core, so refusing costs computing.",
        )

    def draw(self, rows: Rows, figure: Figure) -> None:
        axes = figure.subplots()
        for cell, color in ((POLITE, "tab:blue"), (RUDE, "tab:orange")):
            for number, row in enumerate(rows.of(cell)):
                shares = [count / row["peak"] for count in row["per_second"]]
                label = cell if number == 0 else "_"
                axes.plot(range(len(shares)), shares, color=color, alpha=0.6, linewidth=0.8, label=label)
        overload = (self.normal_s, self.normal_s + self.overload_s)
        axes.axvspan(*overload, color="black", alpha=0.06, label="overload")
        axes.axhline(GOAL_GOODPUT, color="black", linewidth=0.8, label="goal")
        axes.set(xlabel="time (s)", ylabel="answers/s over the peak (times)", ylim=(0, None))
        legend_above(axes, ncols=4)


def recovery_s(done: Done, end_s: float, normal_s: float) -> float | None:
    """Return the seconds from the end of the load until requests are as fast as before.

    From that request on, all but `ODD` of the requests are normal. The result is None without such a request.
    """
    requests = sorted(done.streams.get(AFTER, []), key=lambda each: each.asked_s)
    slow = [each.outcome != OK or each.done_s - each.asked_s > NORMAL * normal_s for each in requests]
    for at, each in enumerate(requests):
        if not slow[at] and sum(slow[at:]) <= ODD * len(slow[at:]):
            return max(0.0, each.asked_s - end_s)
    return None


def _stream(server: Server, questions: Questions, name: str, tenant: str, **fields: Any) -> Stream:
    return Stream(name=name, token=server.tokens[tenant], questions=tuple(questions), **fields)


def _failed(requests: Sequence[Asked]) -> int:
    """Return the number of requests that ended with neither an answer nor advice to retry."""
    fine = {OK, WRONG, LEFT, "overloaded", "quota"}
    return sum(each.outcome not in fine for each in requests)


def _goodput(rows: Rows, cell: str) -> Spread:
    return Spread.of(row["goodput"] / row["peak"] for row in rows.of(cell))


def _recovery(row: Row) -> float:
    return float("inf") if row["recovery_s"] is None else float(row["recovery_s"])


def _recoveries(rows: Rows, cell: str) -> list[float]:
    return [_recovery(row) for row in rows.of(cell)]


def _within(seconds: float) -> str:
    return "longer than was looked at" if seconds == float("inf") else f"{seconds:.1f} s"


FULL = Overload(
    network="alexnet:features",
    micro_batch=48,
    tenants=4,
    at_once=4,
    times=4.0,
    saturate_s=15.0,
    normal_s=6.0,
    overload_s=60.0,
    after_s=12.0,
    max_admitted=2,
    max_waiting=1,
    repeats=3,
)
QUICK = Overload(
    network="tiny",
    micro_batch=2,
    tenants=2,
    at_once=2,
    times=4.0,
    saturate_s=1.0,
    normal_s=0.5,
    overload_s=1.0,
    after_s=1.0,
    max_admitted=2,
    max_waiting=4,
    repeats=1,
)
