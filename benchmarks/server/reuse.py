"""Compare cached programs with programs read for each request: Figure 12 of HAPI (2025)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, ClassVar

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
from benchmarks.server.world import file_bytes
from upriver.report.figure import legend_above

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ON, OFF = "kept", "read anew"
EARLY, LATE = "after stage 1", "at the freeze point"
TENANT = "one"
GOAL = 0.95
"""Least speed-up of the cache, which must cost nothing. Its gain depends on the network."""


@dataclass(frozen=True, kw_only=True)
class Reuse(Claim):
    """Sequential requests a second.

    Attributes:
        networks: Each with a server that caches its program and one that does not.
        requests: Requests of a run, one micro-batch each.
        micro_batch: Samples of a micro-batch.
    """

    name: ClassVar[str] = "reuse"
    title: ClassVar[str] = "Programs kept between requests"
    says: ClassVar[str] = (
        "Keeping a program loaded between requests makes them faster, the more so the larger its weights are "
        "beside its computation, and never slower (Figure 12 of HAPI, 2025)."
    )

    networks: tuple[str, ...]
    requests: int
    micro_batch: int

    @property
    def places(self) -> list[str]:
        """Return the networks and their cuts."""
        return [f"{network} {cut}" for network in self.networks for cut in (EARLY, LATE)]

    @property
    def cells(self) -> tuple[str, ...]:
        return tuple(f"{place}, {way}" for place in self.places for way in (ON, OFF))

    def measure(self, bench: Bench) -> None:
        missing = [cell for cell, _ in bench.missing(self)]
        for network in self.networks:
            if any(cell.startswith(f"{network} ") for cell in missing):
                self._measure(bench, network)

    def _measure(self, bench: Bench, network: str) -> None:
        """Measure with both servers running. The server without a request does nothing."""
        program = bench.world.program(network, self.micro_batch)
        questions = {
            cut: bench.world.question(program, stop, bench.world.batches(0, self.micro_batch))
            for cut, stop in ((EARLY, 1), (LATE, program.num_stages))
        }
        # An admitted program must fit. Loaded, it needs more memory than its files, so it is not cached.
        settings = {ON: {}, OFF: {"program_budget_bytes": file_bytes(program)}}
        with ExitStack() as stack:
            servers = {
                way: stack.enter_context(bench.server(keys, [TENANT])) for way, keys in settings.items()
            }
            for server in servers.values():
                for cut in questions:
                    self._run(bench, server, questions, cut, 1)
            for cell, repeat in bench.todo(self, lambda cell: cell.startswith(f"{network} ")):
                place, _, way = cell.rpartition(", ")
                cut = place.removeprefix(f"{network} ")
                row = self._run(bench, servers[way], questions, cut, self.requests)
                about = {"weights": program.weight_nbytes, "per_s": row["right"] / row["seconds"]}
                bench.add(self, cell, repeat, {**row, **about})

    def _run(self, bench: Bench, server: Server, questions: Questions, cut: str, count: int) -> Row:
        stream = Stream(name=TENANT, token=server.tokens[TENANT], questions=(cut,), count=count)
        before = server.metrics()
        requests = ended(bench.generator.put(server, questions, [stream]))
        after = server.metrics()
        found = {
            way: round(after.of(name, found=way) - before.of(name, found=way))
            for name in ("upriver_program_requests_total",)
            for way in ("kept", "read")
        }
        return {**outcomes(requests), "seconds": span_s(requests), **found}

    # ---------------------------------------------------------------------------------------- reporting

    def speedup(self, rows: Rows, place: str) -> float:
        """Return the speed-up of the cache, at the median of the repeats."""
        return rows.ratios(f"{place}, {OFF}", f"{place}, {ON}", "seconds").median

    def verdict(self, rows: Rows) -> Verdict:
        found = {place: self.speedup(rows, place) for place in self.places}
        kept, read = (self._all(rows, way) for way in (ON, OFF))
        apart = all(row["kept"] == row["asked"] for row in kept) and all(
            row["read"] == row["asked"] for row in read
        )
        best = max(found, key=found.__getitem__)
        honest = "" if apart else " The servers did not keep and read programs as they should have."
        return Verdict(
            met=min(found.values()) >= GOAL and apart and all_right(rows),
            text=f"with a kept program requests are {median(found.values()):.2f} times as fast at the "
            f"median, {min(found.values()):.2f} at least (goal {GOAL}), {found[best]:.2f} at most ({best}); "
            f"{wrong_text(rows)}.{honest}",
        )

    def _all(self, rows: Rows, way: str) -> list[Row]:
        return [row for place in self.places for row in rows.of(f"{place}, {way}")]

    def tables(self, rows: Rows) -> str:
        lines = [
            (
                place,
                f"{rows.of(f'{place}, {ON}')[0]['weights'] / 1e6:.0f}",
                rows.text(f"{place}, {ON}", "per_s"),
                rows.text(f"{place}, {OFF}", "per_s"),
                rows.ratios(f"{place}, {OFF}", f"{place}, {ON}", "seconds").text(),
                f"{sum(row['read'] for row in rows.of(f'{place}, {ON}'))} and "
                f"{sum(row['read'] for row in rows.of(f'{place}, {OFF}'))} of "
                f"{sum(row['asked'] for row in rows.of(f'{place}, {OFF}'))}",
            )
            for place in self.places
        ]
        header = (
            "network and cut",
            "weights, MB",
            "requests a second, kept",
            "read anew",
            "kept over read anew",
            "times that it was read",
        )
        return table_of(header, lines)

    def notes(self) -> Sequence[str]:
        return (
            f"Requests of one micro-batch of {self.micro_batch} JPEGs, one after another, {self.requests} in "
            "a run; a program holds everything up to the freeze point, wherever the cut is. Read anew: the "
            "server may keep no more bytes of programs than this one's files have, and it takes more when "
            "loaded, so it goes when no request uses it.",
            "Weights come from files on the same machine, most likely from the page cache; the graph of a "
            "program and its need for memory are remembered in both. From a store over a network reading "
            "takes longer.",
        )

    def draw(self, rows: Rows, figure: Figure) -> None:
        axes = figure.subplots()
        for shift, cut in ((-0.2, EARLY), (0.2, LATE)):
            heights = [self.speedup(rows, f"{network} {cut}") for network in self.networks]
            axes.bar([number + shift for number in range(len(heights))], heights, width=0.4, label=cut)
        axes.set_xticks(range(len(self.networks)), self.networks)
        axes.axhline(1.0, color="black", linewidth=0.8, label="read anew")
        axes.set(xlabel="network", ylabel="speed-up by a kept program (times)")
        legend_above(axes, ncols=3)


FULL = Reuse(networks=("alexnet", "resnet18", "densenet121", "vgg11"), requests=3, micro_batch=16, repeats=5)
QUICK = Reuse(networks=("tiny",), requests=2, micro_batch=2, repeats=1)
