"""Compare batches that adapt to free memory with fixed ones: Figure 13 and Table 3 of HAPI (2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.harness.memory_group import MemoryGroup, Watch, memory_group
from benchmarks.harness.reports import legend_outside
from benchmarks.server.claim import (
    MIB,
    Bench,
    Claim,
    Questions,
    Row,
    Rows,
    Verdict,
    mib,
    outcomes,
    span_s,
    table_of,
)
from benchmarks.server.host import Metrics, Server
from benchmarks.server.load import Question, Stream, ended
from upriver.rpc.tolerance import FLOAT32
from upriver.server.observability.metrics import ROWS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ON, OFF = "on", "off"
TENANT = "one"
GOAL_ALONE = 1.1
"""Most slowdown allowed where memory suffices: adaptation then costs only the wait for others, and noise."""

MOST_TRIES = 20
"""Number of tries of a request that finds no memory."""

PLENTY_BYTES = 1 << 40
"""A budget that never holds a request back."""

WATCH_S = 0.1
"""Seconds between two looks at memory. Every worker's process has hundreds of thousands of pages here."""

FRONT_BYTES = 256 << 20
"""Memory of the process that talks HTTP, where no group reports what remains."""

RESERVE = 0.1
"""Share of the found memory that a server leaves free by default."""

NO_GROUP = "no control group can be made on this machine, so nothing would end a server that takes too much"


@dataclass(frozen=True, kw_only=True)
class Adaptation(Claim):
    """Requests that arrive at once, and offer a large forward pass.

    Attributes:
        network: Network of all requests.
        sizes: Samples of a forward pass: the smallest, the request's own, to the largest, the whole request.
        counts: Requests at once.
        workers: Workers of the server, one for each request. The paper gives each request a process.
        real_bytes: Memory of the server's processes.
        collect_s: Seconds that a round waits for further requests.
    """

    name: ClassVar[str] = "adaptation"
    title: ClassVar[str] = "Batches that adapt to memory"
    says: ClassVar[str] = (
        "With batch adaptation any number of requests is computed in the memory there is, and in no more "
        "time than without while there is enough of it; without, workers are ended for want of memory "
        "(Figure 13 and Table 3 of HAPI, 2022)."
    )

    network: str
    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    workers: int
    real_bytes: int
    collect_s: float

    @property
    def cells(self) -> tuple[str, ...]:
        return tuple(f"{way} x{count}" for count in self.counts for way in (ON, OFF))

    # ------------------------------------------------------------------------------------------ running

    def measure(self, bench: Bench) -> None:
        questions = self._questions(bench)
        with ExitStack() as stack:
            groups = {way: stack.enter_context(memory_group(way, self.real_bytes)) for way in (ON, OFF)}
            servers = {
                way: stack.enter_context(self._server(bench, way, groups[way]))
                for way in (ON, OFF)
                if way == ON or groups[way] is not None
            }
            for way, server in servers.items():
                self._warm(bench, server, questions, way)
            many = _stream(servers[ON], ON, self.counts[-1], at_once=True)
            bench.generator.put(servers[ON], questions, [many])  # the workers have programs of every size
            cold: set[str] = set()
            for cell, repeat in bench.todo(self):
                while cold:  # new workers must not start during a measurement, nor be measured cold
                    each = cold.pop()
                    servers[each].wait_for_workers()
                    self._warm(bench, servers[each], questions, each)
                way, _, count = cell.rpartition(" x")
                known = way in servers
                row = self._run(bench, servers[way], questions, way, int(count)) if known else _skipped()
                bench.add(self, cell, repeat, row)
                cold |= {way} if row.get("restarts") else set()

    def _warm(self, bench: Bench, server: Server, questions: Questions, way: str) -> None:
        """Make every worker compute once. The workers take turns."""
        bench.generator.put(server, questions, [_stream(server, way, self.workers)])

    def _questions(self, bench: Bench) -> dict[str, Question]:
        world, least, most = bench.world, self.sizes[0], self.sizes[-1]
        programs = world.sizes(self.network, self.sizes)
        small = world.batches(0, least, most // least)
        values = world.write_values(programs[0], small, bench.folder / "adaptation.npy")
        return {
            ON: world.sized(programs, small, values),
            OFF: world.sized(programs[-1:], world.batches(0, most), values),
        }

    def _server(self, bench: Bench, way: str, group: MemoryGroup | None) -> Server:
        settings: dict[str, Any] = {"workers": self.workers}
        if way == OFF:
            settings |= {"admission": "static", "memory_budget_bytes": PLENTY_BYTES}
        else:
            settings |= {
                "admission": "adaptive",
                "min_batch": self.sizes[0],
                "collect_s": self.collect_s,
                "memory_reserve": RESERVE,
            }
            if group is None:
                settings["memory_budget_bytes"] = int((1 - RESERVE) * (self.real_bytes - FRONT_BYTES))
        return bench.server(settings, [TENANT], group=group)

    def _run(self, bench: Bench, server: Server, questions: Questions, way: str, count: int) -> Row:
        before = server.metrics()
        kills = _kills(server, before)
        with Watch(server.pid, group=server.group, every_s=WATCH_S) as watch:
            stream = _stream(server, way, count, at_once=True)
            requests = ended(bench.generator.put(server, questions, [stream]))
        after = server.metrics()
        return {
            **outcomes(requests),
            "seconds": span_s(requests),
            "batches": self._batches(before, after) if way == ON else {},
            "restarts": after.restarts - before.restarts,
            "kills": _kills(server, after) - kills,
            "peak": watch.peaks["together"],
            "group_peak": watch.peaks["group"],
            "limited": server.group is not None,
        }

    def _batches(self, before: Metrics, after: Metrics) -> dict[str, int]:
        """Return the requests by the samples of their forward passes. Each size has a bucket of its own."""
        found = {}
        for size in self.sizes:
            at = next(number for number, edge in enumerate(ROWS) if edge >= size)
            passes = sum(sign * _passes(metrics, at) for sign, metrics in ((1, after), (-1, before)))
            found[str(size)] = round(passes * size / self.sizes[-1])
        return found

    # ---------------------------------------------------------------------------------------- reporting

    def verdict(self, rows: Rows) -> Verdict:
        on = [row for count in self.counts for row in rows.of(f"{ON} x{count}")]
        off = [row for count in self.counts for row in rows.of(f"{OFF} x{count}") if "skipped" not in row]
        lost = sum(row["asked"] - row["right"] for row in on)
        restarts, peak = sum(row["restarts"] for row in on), max(row["peak"] for row in on)
        alone = rows.ratios(f"{ON} x{self.counts[0]}", f"{OFF} x{self.counts[0]}", "seconds")
        told = NO_GROUP if not off else f"{sum(row['restarts'] for row in off)} workers were ended"
        quick, same = True, ""
        if alone.values:
            quick = alone.median <= GOAL_ALONE
            same = f"; a request alone takes {alone.text()} of its time without (goal {GOAL_ALONE})"
        return Verdict(
            met=not lost and not restarts and peak <= self.real_bytes and quick,
            text=f"with adaptation {lost} requests of {sum(row['asked'] for row in on)} were not answered "
            f"rightly, {restarts} workers were ended, and the peak is {mib(peak)} of {mib(self.real_bytes)} "
            f"MiB{same}. Without: {told}.",
        )

    def tables(self, rows: Rows) -> str:
        lines = []
        for count in self.counts:
            for way in (ON, OFF):
                cell = f"{way} x{count}"
                found = [row for row in rows.of(cell) if "skipped" not in row]
                if found:
                    lines.append(self._line(rows, cell, way, count, found))
        header = (
            "requests at once",
            "adaptation",
            "seconds",
            "answered rightly",
            "workers ended",
            "peak (PSS), MiB",
            "peak (group), MiB",
            "requests with a smaller batch",
            "mean reduction",
        )
        return table_of(header, lines)

    def _line(self, rows: Rows, cell: str, way: str, count: int, found: Sequence[Row]) -> tuple[object, ...]:
        smaller, reduction = reductions([row["batches"] for row in found], self.sizes[-1])
        grouped = max(row["group_peak"] for row in found)
        return (
            count,
            way,
            rows.text(cell, "seconds", digits=1),
            f"{sum(row['right'] for row in found)} of {sum(row['asked'] for row in found)}",
            sum(row["restarts"] for row in found),
            mib(max(row["peak"] for row in found)),
            mib(grouped) if grouped else "-",
            f"{smaller:.0%}" if way == ON else "-",
            f"{reduction:.1%}" if way == ON else "-",
        )

    def notes(self) -> Sequence[str]:
        sizes = ", ".join(map(str, self.sizes))
        return (
            f"{self.network}, requests of {self.sizes[-1]} JPEGs at once, {self.workers} workers on one "
            f"core, which have {self.real_bytes // MIB} MiB with their front, by a control group. On: each "
            f"request offers programs for {sizes} samples, and the server chooses, from the memory that it "
            "finds by itself. Off: static admission at the largest, with a budget far above what is there; "
            "a request whose worker is ended is tried once more by the server.",
            f"Memory is looked at every {1e3 * WATCH_S:g} ms.",
            f"Answers are held to values computed apart, within {FLOAT32}: sizes differ in low bits.",
            "A batch is smaller than what was asked for where it is below the largest size; the reduction is "
            "the share of it that is missing, over all requests. The paper has a GPU, training batches of "
            "1000 to 8000 and requests of 1000.",
        )

    def draw(self, rows: Rows, figure: Figure) -> None:
        times, memory = figure.subplots(1, 2)
        for way, style in ((ON, "-o"), (OFF, "--x")):
            for axes, name, scale in ((times, "seconds", 1.0), (memory, "peak", MIB)):
                spreads = [
                    (count, rows.spread(f"{way} x{count}", name, scale=scale)) for count in self.counts
                ]
                points = [(count, spread.median) for count, spread in spreads if spread.values]
                axes.plot(
                    [n for n, _ in points], [value for _, value in points], style, label=f"adaptation {way}"
                )
        memory.axhline(self.real_bytes / MIB, color="black", linewidth=0.8, label="memory of the server")
        times.set(xlabel="requests at once (number)", ylabel="time (s)", ylim=(0, None))
        memory.set(xlabel="requests at once (number)", ylabel="peak (MiB)", ylim=(0, None))
        legend_outside(figure, loc="outside lower center", ncols=3)


def reductions(batches: Sequence[Mapping[str, int]], asked: int) -> tuple[float, float]:
    """Return the share of requests with a reduced batch, and the mean reduction over all requests.

    Args:
        batches: Requests by batch, for each run.
        asked: The requested batch.
    """
    counts = [(int(batch), count) for run in batches for batch, count in run.items()]
    total = sum(count for _, count in counts)
    if not total:
        return 0.0, 0.0
    smaller = sum(count for batch, count in counts if batch < asked) / total
    return smaller, sum(count * (1 - batch / asked) for batch, count in counts) / total


def _kills(server: Server, metrics: Metrics) -> int:
    """Return the workers ended for lack of memory. A group of version 1 does not count its inner groups."""
    known = round(metrics.of("upriver_worker_restarts_total", reason="memory"))
    return max(known, server.group.kills() if server.group is not None else 0)


def _passes(metrics: Metrics, at: int) -> float:
    """Return the forward passes in one bucket. The counter of a bucket includes the smaller ones."""
    edges = [float(ROWS[number]) for number in (at, at - 1) if number >= 0]
    counts = [metrics.of("upriver_forward_rows_bucket", tenant=TENANT, le=str(edge)) for edge in edges]
    return counts[0] - sum(counts[1:])


def _stream(server: Server, way: str, count: int, *, at_once: bool = False) -> Stream:
    return Stream(
        name=TENANT,
        token=server.tokens[TENANT],
        questions=(way,),
        count=count,
        in_flight=count if at_once else 1,
        most_tries=MOST_TRIES,
    )


def _skipped() -> Row:
    return {"skipped": NO_GROUP}


FULL = Adaptation(
    network="resnet18:layer2.0",
    sizes=(25, 50, 100),
    counts=(1, 2, 4, 8),
    workers=8,
    real_bytes=7 << 30,
    collect_s=0.05,
    repeats=3,
)
QUICK = Adaptation(
    network="tiny",
    sizes=(2, 4, 8),
    counts=(1, 2),
    workers=1,
    real_bytes=2 << 30,
    collect_s=0.05,
    repeats=1,
)
