"""Let many tenants request several times the memory, and measure whether it runs out and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace

from benchmarks.harness.memory_group import Footprint, Watch, memory_group
from benchmarks.server.claim import (
    MIB,
    Bench,
    Claim,
    Questions,
    Row,
    Rows,
    Verdict,
    all_right,
    mib,
    outcomes,
    span_s,
    table_of,
    wrong_text,
)
from benchmarks.server.host import Server
from benchmarks.server.load import Done, Stream, ended
from upriver.report.figure import legend_above

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ONE, ALL = "one after another", "all at once"
GOAL_PEAK, GOAL_THROUGHPUT = 1.1, 0.8

NO_LIMIT_BYTES = 1 << 40
"""Limit of the control group around the server, which only counts."""


@dataclass(frozen=True, kw_only=True)
class Memory(Claim):
    """Memory under load.

    Attributes:
        networks: Assigned to the tenants in turn.
        tenants: Number of tenants.
        micro_batch: Samples of a request, which is one micro-batch.
        per_tenant: Requests of each tenant in a run.
        in_flight: Concurrent requests of each tenant.
        times: The memory that all tenants request together, over the memory budget.
        workers: Workers of the server, all on one core: two workers compute two requests at any moment.
        least_budget_bytes: A smaller budget leaves nothing next to idle workers.
    """

    name: ClassVar[str] = "memory"
    title: ClassVar[str] = "Memory never runs out"
    says: ClassVar[str] = (
        "16 tenants that together ask for four times the memory budget: no worker is ended for want of "
        "memory, the workers take at most 1.1 times the budget, every request is answered in the end, and at "
        "0.8 times or more of the throughput of the same requests one after another."
    )

    networks: tuple[str, ...]
    tenants: int
    micro_batch: int
    per_tenant: int
    in_flight: int
    times: float
    workers: int
    least_budget_bytes: int

    @property
    def cells(self) -> tuple[str, ...]:
        return (ONE, ALL)

    @property
    def names(self) -> list[str]:
        """Return the names of the tenants."""
        return [f"t{number:02}" for number in range(1, self.tenants + 1)]

    def network_of(self, name: str) -> str:
        """Return the network of a tenant."""
        return self.networks[self.names.index(name) % len(self.networks)]

    # ------------------------------------------------------------------------------------------ running

    def measure(self, bench: Bench) -> None:
        questions, asks = self._questions(bench)
        budget = max(int(asks / self.times), self.least_budget_bytes)
        settings = {"workers": self.workers, "memory_budget_bytes": budget}
        with (
            memory_group("counts", NO_LIMIT_BYTES) as group,
            bench.server(settings, self.names, group=group) as server,
        ):
            idle = Watch(server.pid, group=server.group).look()
            self._put(bench, server, questions, ONE, per_tenant=1)  # warms up: the server reads the programs
            for cell, repeat in bench.todo(self):
                row = self._run(bench, server, questions, cell, idle)
                bench.add(self, cell, repeat, {"budget": budget, "asks": asks, **row})

    def _questions(self, bench: Bench) -> tuple[Questions, int]:
        """Return the questions by network and number, and the bytes that all tenants request at once.

        The bytes leave out the tenants' programs.
        """
        world, found, needs = bench.world, {}, {}
        for network in self.networks:
            program = world.program(network, self.micro_batch)
            for number in range(self.per_tenant):
                batches = world.batches(number * self.micro_batch, self.micro_batch)
                found[f"{network}/{number}"] = world.question(program, program.num_stages, batches)
            needs[network] = world.need_bytes(program, found[f"{network}/0"])
        return found, sum(self.in_flight * needs[self.network_of(name)] for name in self.names)

    def _run(self, bench: Bench, server: Server, questions: Questions, cell: str, idle: Footprint) -> Row:
        before = server.metrics()
        with Watch(server.pid, group=server.group) as watch:
            done = self._put(bench, server, questions, cell, per_tenant=self.per_tenant)
        restarts = server.metrics().restarts - before.restarts
        requests = ended(done)
        return {
            **outcomes(requests),
            "seconds": span_s(requests),
            "restarts": restarts,
            "idle": idle.record(),
            "peaks": watch.peaks,
            "looks": watch.looks,
            "beyond_idle": watch.peaks["together"] - idle.together,
            "group_beyond_idle": watch.peaks["group"] - idle.group,
        }

    def _put(self, bench: Bench, server: Server, questions: Questions, cell: str, per_tenant: int) -> Done:
        streams = [
            Stream(
                name=name,
                token=server.tokens[name],
                questions=tuple(f"{self.network_of(name)}/{number}" for number in range(per_tenant)),
                count=per_tenant,
                in_flight=self.in_flight if cell == ALL else 1,
            )
            for name in self.names
        ]
        if cell == ONE:
            chained = [replace(stream, after=before.name) for before, stream in pairwise(streams)]
            streams = [streams[0], *chained]
        return bench.generator.put(server, questions, streams)

    # ---------------------------------------------------------------------------------------- reporting

    def verdict(self, rows: Rows) -> Verdict:
        peak = max(_over_budget(row) for row in rows.rows)
        restarts, share = rows.sum("restarts"), rows.ratios(ONE, ALL, "seconds")
        kept_up = share.median >= GOAL_THROUGHPUT
        met = all_right(rows) and not restarts and peak <= GOAL_PEAK and kept_up
        return Verdict(
            met=met,
            text=f"{restarts} workers ended, {wrong_text(rows)}; the peak is {peak:.2f} of the budget "
            f"(goal {GOAL_PEAK}), the throughput {share.text()} of that one after another "
            f"(goal {GOAL_THROUGHPUT}).",
        )

    def tables(self, rows: Rows) -> str:
        header = (
            "run",
            "seconds",
            "requests",
            "asked again after a refusal",
            "workers ended",
            "budget, MiB",
            "asked for at once, MiB",
            "idle: workers, front",
            "peak of workers, MiB",
            "of the budget",
            "peak of all beyond idle, MiB",
            "of the budget",
            "peak of the control group beyond idle, MiB",
        )
        return table_of(header, [self._line(cell, row) for cell in self.cells for row in rows.of(cell)])

    def _line(self, cell: str, row: Row) -> tuple[object, ...]:
        peaks, idle, budget = row["peaks"], row["idle"], row["budget"]
        return (
            cell,
            f"{row['seconds']:.1f}",
            f"{row['right']} of {row['asked']}",
            row["refused"],
            row["restarts"],
            mib(budget),
            mib(row["asks"]) if cell == ALL else "-",
            f"{mib(idle['workers'])}, {mib(idle['front'])}",
            mib(peaks["workers"]),
            f"{peaks['workers'] / budget:.2f}",
            mib(row["beyond_idle"]),
            f"{row['beyond_idle'] / budget:.2f}",
            mib(row["group_beyond_idle"]) if row["peaks"]["group"] else "-",
        )

    def notes(self) -> Sequence[str]:
        return (
            f"{self.tenants} tenants with a token each; {', '.join(self.networks)} in turn, each tenant "
            f"with a program of its own in the server's memory; {self.per_tenant} requests of one "
            f"micro-batch of {self.micro_batch} JPEGs each, {self.in_flight} at once. {self.workers} workers "
            "on one core.",
            "The budget is what all tenants' requests take at once by the server's own estimate, divided by "
            f"{self.times:g}, and at least {self.least_budget_bytes // MIB} MiB. Idle workers and the "
            "programs are held within it.",
            "Peaks: sums of PSS, in both kinds of run. All ratios to the budget must hold: of all that "
            "workers take, idle or not; of what workers and front take beyond their idle state; and of what "
            "the server's control group counts beyond it, where there is one: programs that no process has "
            "mapped are among that. Peaks need not have come at the same moment.",
            "One after another: one tenant's requests after the other's, so that no program is needed twice. "
            "Clients that are told to come back do so when the server says.",
        )

    def draw(self, rows: Rows, figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        found = [(place, row) for place, cell in enumerate(self.cells) for row in rows.of(cell)]
        places = [place for place, _ in found]
        for axes, mark, color, label, values in (
            (left, "o", "tab:blue", "workers", [row["peaks"]["workers"] / row["budget"] for _, row in found]),
            (
                left,
                "x",
                "tab:orange",
                "all, beyond idle",
                [row["beyond_idle"] / row["budget"] for _, row in found],
            ),
            (right, "o", "tab:blue", "a run", [row["right"] / row["seconds"] for _, row in found]),
        ):
            axes.plot(places, values, mark, color=color, alpha=0.6, label=label)
        left.axhline(GOAL_PEAK, color="black", linewidth=0.8, label="goal")
        for axes in (left, right):
            axes.margins(y=0.15)
        left.set(xlabel="requests", ylabel="peak over the budget (times)", ylim=(0, None))
        right.set(xlabel="requests", ylabel="throughput (requests/s)", ylim=(0, None))
        for axes in (left, right):
            legend_above(axes, ncols=3)
        for axes in (left, right):
            axes.set_xticks(range(len(self.cells)), self.cells)
            axes.set_xlim(-0.5, len(self.cells) - 0.5)


def _over_budget(row: Row) -> float:
    return max(row["peaks"]["workers"], row["beyond_idle"], row["group_beyond_idle"]) / row["budget"]


FULL = Memory(
    networks=("alexnet:features", "resnet18:layer4.0"),
    tenants=16,
    micro_batch=32,
    per_tenant=3,
    in_flight=2,
    times=4.0,
    workers=2,
    least_budget_bytes=0,
    repeats=5,
)
QUICK = Memory(
    networks=("tiny",),
    tenants=3,
    micro_batch=4,
    per_tenant=2,
    in_flight=2,
    times=4.0,
    workers=2,
    least_budget_bytes=1 << 30,
    repeats=1,
)
