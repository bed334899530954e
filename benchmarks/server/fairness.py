"""Measure how a greedy tenant affects a modest one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from benchmarks.harness.children import Failed
from benchmarks.harness.measuring import Spread
from benchmarks.server.claim import (
    Bench,
    Claim,
    Questions,
    Row,
    Rows,
    Verdict,
    all_right,
    latencies,
    outcomes,
    percentile,
    table_of,
    wrong_text,
)
from benchmarks.server.host import Server
from benchmarks.server.load import OK, Stream, ended
from upriver.report.figure import legend_above

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALONE, EQUAL, WEIGHTED = "alone", "beside, equal weights", "beside, weight 4"
GREEDY = "greedy"
TENANTS = {GREEDY: {}, "even": {}, "heavy": {"weight": 4.0}}
MODEST = {ALONE: "even", EQUAL: "even", WEIGHTED: "heavy"}
GOAL_EQUAL, GOAL_WEIGHTED = 2.2, 1.5
TAIL = 0.99


@dataclass(frozen=True, kw_only=True)
class Fairness(Claim):
    """Latencies of single requests, alone and next to a tenant with many requests in flight.

    Attributes:
        network: Network of both tenants.
        micro_batch: Samples of a micro-batch.
        micro_batches: Micro-batches of a request.
        greedy: Requests of the greedy tenant in flight.
        requests: Requests of the modest tenant in a run.
        ahead_s: Seconds by which the greedy tenant begins earlier.
        budget_bytes: Memory enough for all requests at once.
    """

    name: ClassVar[str] = "fairness"
    title: ClassVar[str] = "A greedy tenant beside a modest one"
    says: ClassVar[str] = (
        "Beside a tenant with 32 requests in flight, one with a single request in flight has a 99th "
        "percentile of at most 2.2 times that alone and one micro-batch at equal weights, and of at most 1.5 "
        "times that alone at weight 4; nobody gets an error."
    )

    network: str
    micro_batch: int
    micro_batches: int
    greedy: int
    requests: int
    ahead_s: float
    budget_bytes: int

    @property
    def cells(self) -> tuple[str, ...]:
        return (ALONE, EQUAL, WEIGHTED)

    def measure(self, bench: Bench) -> None:
        program = bench.world.program(self.network, self.micro_batch)
        samples = self.micro_batch * self.micro_batches
        questions = {
            str(number): bench.world.question(
                program,
                program.num_stages,
                bench.world.batches(number * samples, self.micro_batch, self.micro_batches),
            )
            for number in range(2)
        }
        settings = {"memory_budget_bytes": self.budget_bytes}
        with bench.server(settings, TENANTS) as server:
            for tenant in TENANTS:
                bench.generator.put(server, questions, [_stream(server, tenant, questions, count=2)])
            for cell, repeat in bench.todo(self):
                bench.add(self, cell, repeat, self._run(bench, server, questions, cell))

    def _run(self, bench: Bench, server: Server, questions: Questions, cell: str) -> Row:
        modest = MODEST[cell]
        begin_s = 0.0 if cell == ALONE else self.ahead_s
        streams = [_stream(server, modest, questions, count=self.requests, begin_s=begin_s)]
        if cell != ALONE:
            streams.append(_stream(server, GREEDY, questions, in_flight=self.greedy))
        done = bench.generator.put(server, questions, streams)
        answered = [each for each in ended(done, [modest]) if each.outcome == OK]
        if not answered:
            raise Failed(f"nothing was answered: {outcomes(ended(done, [modest]))}")
        return {
            **outcomes(ended(done)),
            "latencies": latencies(answered),
            "micro_batch_s": Spread.of(each.work_s for each in answered).median,
            "greedy": sum(each.outcome == OK for each in done.streams.get(GREEDY, [])),
        }

    # ---------------------------------------------------------------------------------------- reporting

    def verdict(self, rows: Rows) -> Verdict:
        alone, equal, weighted = (_p99(rows, cell) for cell in self.cells)
        one = _micro_batch_s(rows)
        within = equal <= GOAL_EQUAL * alone + one and weighted <= GOAL_WEIGHTED * alone
        return Verdict(
            met=within and all_right(rows),
            text=f"the modest tenant's 99th percentile is {alone:.2f} s alone, {equal:.2f} s beside the "
            f"greedy one at equal weights ({equal / alone:.2f} times; goal {GOAL_EQUAL} times and "
            f"{one:.2f} s for a micro-batch: {GOAL_EQUAL * alone + one:.2f} s), {weighted:.2f} s at weight 4 "
            f"({weighted / alone:.2f} times; goal {GOAL_WEIGHTED}); {wrong_text(rows)}.",
        )

    def tables(self, rows: Rows) -> str:
        alone = _p99(rows, ALONE)
        lines = []
        for cell in self.cells:
            values = _latencies(rows, cell)
            each = Spread.of(percentile(run, TAIL) for run in rows.values(cell, "latencies"))
            lines.append(
                (
                    cell,
                    len(values),
                    f"{percentile(values, 0.5):.2f}",
                    f"{percentile(values, TAIL):.2f}",
                    f"{percentile(values, TAIL) / alone:.2f}",
                    each.text(),
                    sum(rows.values(cell, "greedy")),
                    sum(rows.values(cell, "refused")),
                )
            )
        header = (
            "the modest tenant",
            "requests",
            "median, s",
            "99th percentile, s",
            "over alone",
            "99th percentile of each run, s",
            "greedy's answers",
            "refusals",
        )
        return table_of(header, lines)

    def notes(self) -> Sequence[str]:
        return (
            f"Both ask for the same: {self.micro_batches} micro-batches of {self.micro_batch} JPEGs through "
            f"{self.network}; so many have the requests of a training job. {self.requests} requests of the "
            f"modest tenant in a run, one after another; the greedy one begins {self.ahead_s:g} s earlier "
            f"and has {self.greedy} under way until they are answered. Percentiles are of all runs' requests "
            "together.",
            f"The server may have {self.greedy + 8} requests admitted, and memory for them. With a lower cap "
            "than the greedy tenant has requests, the modest one also waits until one of those is through: "
            "what is admitted is not taken back.",
            "A micro-batch that is being computed is not broken off, so whoever comes waits for the rest of "
            "one at least.",
        )

    def draw(self, rows: Rows, figure: Figure) -> None:
        axes = figure.subplots()
        for cell in self.cells:
            values = sorted(_latencies(rows, cell))
            shares = [(number + 1) / len(values) for number in range(len(values))]
            axes.step(values, shares, where="post", label=cell)
        axes.axhline(TAIL, color="black", linewidth=0.5, label=f"{TAIL:.0%}, which is compared")
        axes.set(xlabel="request of the modest tenant (s)", ylabel="answered by then (share)", xlim=(0, None))
        legend_above(axes, ncols=4)


def _stream(
    server: Server,
    tenant: str,
    questions: Questions,
    *,
    count: int | None = None,
    in_flight: int = 1,
    begin_s: float = 0.0,
) -> Stream:
    return Stream(
        name=tenant,
        token=server.tokens[tenant],
        questions=tuple(questions),
        count=count,
        in_flight=in_flight,
        begin_s=begin_s,
    )


def _latencies(rows: Rows, cell: str) -> list[float]:
    return [value for run in rows.values(cell, "latencies") for value in run]


def _p99(rows: Rows, cell: str) -> float:
    return percentile(_latencies(rows, cell), TAIL)


def _micro_batch_s(rows: Rows) -> float:
    return rows.spread(ALONE, "micro_batch_s").median


FULL = Fairness(
    network="alexnet:features",
    micro_batch=4,
    micro_batches=8,
    greedy=32,
    requests=25,
    ahead_s=2.0,
    budget_bytes=4 << 30,
    repeats=5,
)
QUICK = Fairness(
    network="tiny",
    micro_batch=2,
    micro_batches=2,
    greedy=4,
    requests=3,
    ahead_s=0.2,
    budget_bytes=2 << 30,
    repeats=1,
)
