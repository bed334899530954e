"""Run several requests of one iteration at once: Figure 14 of HAPI (2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, ClassVar

from benchmarks.harness.measuring import Spread
from benchmarks.server.claim import (
    Bench,
    Claim,
    Questions,
    Row,
    Rows,
    Verdict,
    all_right,
    outcomes,
    span_s,
    table_of,
    wrong_text,
)
from benchmarks.server.host import Server
from benchmarks.server.load import Stream, ended
from benchmarks.server.world import crossing_bytes, cuts
from upriver.report.figure import legend_above

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TENANT = "one"
CONCURRENCY = (1, 2, 4)
GOAL = 0.95
"""Least speed-up of every cut: concurrency must cost nothing. The gain depends on network and cut. A cut
counts as slower if the median of its repeats is below this value and no repeat reaches 1. Of two dozen
medians one is always low."""


@dataclass(frozen=True, kw_only=True)
class Concurrency(Claim):
    """Seconds until the last byte of an iteration's last request.

    Attributes:
        networks: Each is cut at ``num_cuts`` places.
        requests: Requests of an iteration, one micro-batch each.
        micro_batch: Samples of a micro-batch.
    """

    name: ClassVar[str] = "concurrency"
    title: ClassVar[str] = "Several requests at once"
    says: ClassVar[str] = (
        "All requests of an iteration are through sooner, and never later, with 2 or 4 of them at once than "
        "one after another (Figure 14 of HAPI, 2025): from the first question to the last byte of the last "
        "answer."
    )

    networks: tuple[str, ...]
    num_cuts: int
    requests: int
    micro_batch: int

    @property
    def places(self) -> list[str]:
        """Return the networks and their cuts, each by its number."""
        return [f"{network} {number}" for network in self.networks for number in range(1, self.num_cuts + 1)]

    @property
    def cells(self) -> tuple[str, ...]:
        return tuple(f"{place} x{at_once}" for place in self.places for at_once in CONCURRENCY)

    def measure(self, bench: Bench) -> None:
        warm: dict[str, tuple[Questions, Row]] = {}
        with bench.server({}, [TENANT]) as server:
            for cell, repeat in bench.todo(self):
                place, _, at_once = cell.rpartition(" x")
                if place not in warm:
                    warm[place] = self._place(bench, place)
                    self._run(bench, server, warm[place][0], 1)
                questions, about = warm[place]
                row = self._run(bench, server, questions, int(at_once))
                bench.add(self, cell, repeat, {**about, **row})

    def _place(self, bench: Bench, place: str) -> tuple[Questions, Row]:
        network, _, number = place.rpartition(" ")
        program = bench.world.program(network, self.micro_batch)
        found = cuts(program, self.num_cuts)
        cut = found[min(int(number), len(found)) - 1]
        questions = {
            str(request): bench.world.question(
                program, cut, bench.world.batches(request * self.micro_batch, self.micro_batch)
            )
            for request in range(self.requests)
        }
        about = {"cut": cut, "stage": program.stages[cut - 1].name, "bytes": crossing_bytes(program, cut)}
        return questions, about

    def _run(self, bench: Bench, server: Server, questions: Questions, at_once: int) -> Row:
        stream = Stream(
            name=TENANT,
            token=server.tokens[TENANT],
            questions=tuple(questions),
            count=self.requests,
            in_flight=at_once,
        )
        requests = ended(bench.generator.put(server, questions, [stream]))
        seconds, work_s = span_s(requests), sum(each.work_s for each in requests)
        return {**outcomes(requests), "seconds": seconds, "at_work": work_s / seconds}

    # ---------------------------------------------------------------------------------------- reporting

    def speedups(self, rows: Rows, place: str, at_once: int) -> Spread:
        """Return how many times as fast as sequential requests each repeat is."""
        return rows.ratios(f"{place} x1", f"{place} x{at_once}", "seconds")

    def speedup(self, rows: Rows, place: str, at_once: int) -> float:
        """Return the median of the speed-ups."""
        return self.speedups(rows, place, at_once).median

    def slower(self, rows: Rows) -> list[str]:
        """Return the cuts at which concurrency costs time."""
        cells = [(place, n) for place in self.places for n in CONCURRENCY[1:]]
        found = {f"{place} x{n}": self.speedups(rows, place, n) for place, n in cells}
        return [cell for cell, each in found.items() if each.median < GOAL and max(each.values) < 1]

    def verdict(self, rows: Rows) -> Verdict:
        found = {n: [self.speedup(rows, place, n) for place in self.places] for n in CONCURRENCY[1:]}
        slower = self.slower(rows)
        told = "; ".join(
            f"{n} at once: {median(each):.2f} at the median, {min(each):.2f} to {max(each):.2f}"
            for n, each in found.items()
        )
        return Verdict(
            met=not slower and all_right(rows),
            text=f"times as fast as one after another, over {len(self.places)} cuts: {told}; slower "
            f"{'nowhere' if not slower else 'at ' + ', '.join(slower)} (a median below {GOAL}, and no repeat "
            f"that reaches 1); {wrong_text(rows)}.",
        )

    def tables(self, rows: Rows) -> str:
        lines = []
        for place in self.places:
            about = rows.of(f"{place} x1")[0]
            seconds = [rows.text(f"{place} x{n}", "seconds") for n in CONCURRENCY]
            ratios = [self.speedups(rows, place, n).text() for n in CONCURRENCY[1:]]
            at_work = [f"{rows.spread(f'{place} x{n}', 'at_work').median:.2f}" for n in CONCURRENCY]
            network = place.rpartition(" ")[0]
            lines.append(
                (
                    network,
                    about["cut"],
                    about["stage"],
                    f"{about['bytes'] / 1e3:.0f}",
                    *seconds,
                    *ratios,
                    ", ".join(at_work),
                )
            )
        header = (
            "network",
            "cut",
            "after",
            "kB a sample",
            *(f"{n} at once, s" for n in CONCURRENCY),
            *(f"{n} over 1" for n in CONCURRENCY[1:]),
            "share of the time in which the worker computed: 1, 2, 4 at once",
        )
        return table_of(header, lines)

    def notes(self) -> Sequence[str]:
        return (
            f"An iteration is {self.requests} requests of one micro-batch of {self.micro_batch} JPEGs; the "
            "client has 1, 2 or 4 of them under way. One worker: what can overlap is reading, HTTP and "
            "the client's work with computing. The paper varied the training batch, which gives 1, 2 and 4 "
            "requests of one size; the time of each is over as many requests here.",
            f"{self.num_cuts} cuts a network, evenly over those that one tensor crosses, the last at the "
            "freeze point. Front and worker share one core here; in the paper a GPU computes. The bound is a "
            "worker that computes all the time: the last column says how near to it a run comes.",
        )

    def draw(self, rows: Rows, figure: Figure) -> None:
        axes = figure.subplots()
        for shift, at_once in ((-0.2, 2), (0.2, 4)):
            heights = [self.speedup(rows, place, at_once) for place in self.places]
            places = [number + shift for number in range(len(heights))]
            axes.bar(places, heights, width=0.4, label=f"{at_once} at once")
        labels = [self._label(rows, place) for place in self.places]
        axes.set_xticks(range(len(labels)), labels, fontsize="x-small")
        axes.axhline(1.0, color="black", linewidth=0.8, label="one after another")
        axes.set(ylabel="throughput over one after another (times)", xlabel="cut, and network")
        legend_above(axes, ncols=3)

    def _label(self, rows: Rows, place: str) -> str:
        """Return the label of a cut, with the network at its first cut."""
        network, _, number = place.rpartition(" ")
        cut = rows.of(f"{place} x1")[0]["cut"]
        return f"{cut}\n{network}" if number == "1" else f"{cut}\n"


FULL = Concurrency(
    networks=("alexnet", "resnet18", "densenet121"), num_cuts=4, requests=4, micro_batch=8, repeats=5
)
QUICK = Concurrency(networks=("tiny",), num_cuts=2, requests=4, micro_batch=2, repeats=1)
