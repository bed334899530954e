"""Measure the cost and the duration of readers that request half a gigabyte each and read nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from benchmarks.harness.memory_group import Watch
from benchmarks.server.claim import (
    MIB,
    Bench,
    Claim,
    Questions,
    Row,
    Rows,
    Verdict,
    all_right,
    latencies,
    mib,
    outcomes,
    percentile,
    table_of,
    wrong_text,
)
from benchmarks.server.host import Server
from benchmarks.server.load import Stream, ended
from benchmarks.server.readers import Stalled
from benchmarks.server.world import crossing_bytes
from upriver.protocol import Load
from upriver.report.figure import legend_above

if TYPE_CHECKING:
    from matplotlib.figure import Figure

READERS, GOOD = "readers", "good"
CELL = "stalled"
EACH_BYTES = 2 << 20
"""Bytes that a stalled reader may cost in addition to one micro-batch."""

ROOM = 1.1
"""The budget holds the requests of all readers, and a tenth more."""

LATE_S = 3.0
"""Most seconds from a deadline until the server has released everything: a micro-batch in progress."""

GOOD_RUNNING = 2
"""Most requests of the good client in flight: one, and the last one, which the server is releasing."""

AFTER_S = 5.0
"""Seconds that readers stall after their deadline. They then read what arrived."""


@dataclass(frozen=True, kw_only=True)
class StalledReaders(Claim):
    """Memory of a server whose readers read nothing.

    Attributes:
        network: Cut where tensors are large.
        cut: Cut of the answers.
        micro_batch: Samples of one micro-batch.
        micro_batches: Micro-batches of an answer.
        readers: Number of readers that read nothing.
        deadline_s: Deadline of their requests.
        idle_bytes: Part of the budget for idle workers and the programs.
    """

    name: ClassVar[str] = "stalled"
    title: ClassVar[str] = "Readers that take nothing"
    says: ClassVar[str] = (
        "64 readers that take nothing of 512 MB answers cost at most 2 MB and one micro-batch each, within "
        "the memory budget, and are cut off at their deadline; others are answered meanwhile."
    )

    network: str
    cut: int
    micro_batch: int
    micro_batches: int
    readers: int
    deadline_s: float
    idle_bytes: int

    @property
    def cells(self) -> tuple[str, ...]:
        return (CELL,)

    # ------------------------------------------------------------------------------------------ running

    def measure(self, bench: Bench) -> None:
        world, program = bench.world, bench.world.program(self.network, self.micro_batch)
        batches = world.batches(0, self.micro_batch, self.micro_batches)
        large = world.question(program, self.cut, batches, checked=False, deadline_s=self.deadline_s)
        questions = {READERS: large, GOOD: world.question(program, self.cut, batches[:1])}
        budget = self.idle_bytes + int(ROOM * (self.readers + 1) * world.need_bytes(program, large))
        one = crossing_bytes(program, self.cut) * self.micro_batch
        settings = {
            "memory_budget_bytes": budget,
            "max_admitted": self.readers + 8,
            "max_waiting": 2 * self.readers,
        }
        for cell, repeat in bench.todo(self):
            with bench.server(settings, [READERS, GOOD]) as server:
                warm = [_good(server, name, 2) for name in (GOOD, READERS)]
                bench.generator.put(server, questions, warm)
                row = self._run(bench, server, questions)
                bench.add(self, cell, repeat, {"budget": budget, "micro_batch_bytes": one, **row})

    def _run(self, bench: Bench, server: Server, questions: Questions) -> Row:
        looks: list[tuple[float, Load]] = []
        watch = Watch(server.pid, ask=_asking(server, looks))
        idle, began = watch.look(), time.monotonic()
        readers = Stalled(
            token=server.tokens[READERS],
            question=READERS,
            count=self.readers,
            hold_s=self.deadline_s + AFTER_S,
        )
        with watch:
            done = bench.generator.put(server, questions, [self._good(server)], [readers])
        after, good = server.metrics(), ended(done)
        most = max((load.running for _, load in looks), default=0)
        return {
            **outcomes(good),
            "seconds": time.monotonic() - began,
            "latencies": latencies(good),
            "idle": idle.record(),
            "peaks": watch.peaks,
            "reserved": max((load.reserved_bytes for _, load in looks), default=0),
            "running": most,
            "let_go_s": _let_go_s(looks, done.began),
            "cut_off": round(after.of("upriver_shed_requests_total", tenant=READERS, reason="deadline")),
            "restarts": after.restarts,
            "statuses": sorted({taken.status for taken in done.readers}),
            "taken": max((taken.num_bytes for taken in done.readers), default=0),
            "whole": sum(taken.whole for taken in done.readers),
        }

    def _good(self, server: Server) -> Stream:
        return Stream(
            name=GOOD, token=server.tokens[GOOD], questions=(GOOD,), seconds=self.deadline_s + AFTER_S
        )

    # ---------------------------------------------------------------------------------------- reporting

    def allowed(self, row: Row) -> int:
        """Return the bytes by which all readers together may enlarge the server."""
        return self.readers * (EACH_BYTES + int(row["micro_batch_bytes"]))

    def verdict(self, rows: Rows) -> Verdict:
        runs = rows.of(CELL)
        growth = max(_growth(row) / self.allowed(row) for row in runs)
        reserved = max(row["reserved"] / row["budget"] for row in runs)
        cut_off = min(row["cut_off"] for row in runs)
        let_go = max(_late(row) for row in runs)
        whole, restarts = rows.sum("whole"), rows.sum("restarts")
        inside = max(reserved, *(row["peaks"]["workers"] / row["budget"] for row in runs))
        held = growth <= 1 and inside <= 1 and cut_off == self.readers and not whole and not restarts
        return Verdict(
            met=held and let_go <= self.deadline_s + LATE_S and all_right(rows),
            text=f"the server grows by {growth:.2f} of what is allowed; of its budget it reserves "
            f"{reserved:.2f}, and never more than {inside:.2f} is reserved or taken by workers; {cut_off} of "
            f"{self.readers} readers are cut off, and everything is let go of {let_go:.1f} s after they "
            f"asked, with a deadline of {self.deadline_s:g} s. Of the client beside them: "
            f"{wrong_text(rows)}.",
        )

    def tables(self, rows: Rows) -> str:
        header = (
            "run",
            "under way at most",
            "front grows by (RSS), MiB",
            "front and workers (PSS), MiB",
            "allowed, MiB",
            "reserved, of MiB",
            "cut off",
            "let go of after, s",
            "most that one took, kB",
            "answers beside them",
            "their median, longest, s",
        )
        return table_of(
            header, [self._line(number, row) for number, row in enumerate(rows.of(CELL), start=1)]
        )

    def _line(self, number: int, row: Row) -> tuple[object, ...]:
        seconds = row["latencies"] or [0.0]
        return (
            number,
            row["running"],
            mib(row["peaks"]["front_rss"] - row["idle"]["front_rss"]),
            mib(row["peaks"]["together"] - row["idle"]["together"]),
            mib(self.allowed(row)),
            f"{mib(row['reserved'])} of {mib(row['budget'])}",
            f"{row['cut_off']} of {self.readers}",
            f"{_late(row):.1f}",
            f"{row['taken'] / 1e3:.0f}",
            f"{row['right']} of {row['asked']}",
            f"{percentile(seconds, 0.5):.2f}, {max(seconds):.2f}",
        )

    def notes(self) -> Sequence[str]:
        return (
            f"{self.readers} sockets of another tenant ask at once for {self.micro_batches} micro-batches of "
            f"{self.micro_batch} JPEGs up to cut {self.cut} of {self.network}, and read nothing until "
            f"{AFTER_S:g} s after their deadline of {self.deadline_s:g} s; then they take what is there. "
            "Their own buffers hold 128 kB; what the kernel holds on the server's side is no process's.",
            "A fresh server for each run; growth is over what it takes idle, after two requests of each "
            "tenant. Memory is looked at every 20 ms, what the server says of itself four times a second.",
            f"Let go of: nothing but the good client's requests is under way. {LATE_S:g} s beyond the "
            "deadline are allowed for it.",
        )

    def draw(self, rows: Rows, figure: Figure) -> None:
        axes = figure.subplots()
        found = list(enumerate(rows.of(CELL), start=1))
        numbers = [number for number, _ in found]
        growth = [_growth(row) / MIB for _, row in found]
        allowed = [self.allowed(row) / MIB for _, row in found]
        axes.bar(numbers, growth, width=0.5, color="tab:blue", label="grown")
        axes.hlines(
            allowed,
            [number - 0.3 for number in numbers],
            [number + 0.3 for number in numbers],
            color="black",
            label="allowed",
        )
        axes.set_xticks(numbers)
        axes.set(
            xlabel="run (number)", ylabel="growth of memory (MiB)", ylim=(0, 1.1 * max(allowed, default=1.0))
        )
        legend_above(axes, ncols=2)


def _growth(row: Row) -> int:
    """Return the growth of the front's resident memory or of all processes' shares, whichever is larger."""
    peaks, idle = row["peaks"], row["idle"]
    return max(peaks[name] - idle[name] for name in ("front_rss", "together"))


def _late(row: Row) -> float:
    return float("inf") if row["let_go_s"] is None else float(row["let_go_s"])


def _let_go_s(looks: Sequence[tuple[float, Load]], began: float) -> float | None:
    """Return the seconds until only the good client's requests remain in flight; None if never."""
    busy = [at for at, load in looks if load.running > GOOD_RUNNING]
    if looks and busy and busy[-1] == looks[-1][0]:
        return None
    return max(busy, default=began) - began


def _asking(server: Server, looks: list[tuple[float, Load]]) -> Callable[[], None]:
    def ask() -> None:
        load = server.load()
        if load is not None:
            looks.append((time.monotonic(), load))

    return ask


def _good(server: Server, tenant: str, count: int) -> Stream:
    return Stream(name=tenant, token=server.tokens[tenant], questions=(GOOD,), count=count)


FULL = StalledReaders(
    network="resnet18",
    cut=1,
    micro_batch=4,
    micro_batches=40,
    readers=64,
    deadline_s=20.0,
    idle_bytes=1 << 30,
    repeats=3,
)
QUICK = StalledReaders(
    network="tiny",
    cut=1,
    micro_batch=8,
    micro_batches=16,
    readers=3,
    deadline_s=8.0,
    idle_bytes=1 << 30,
    repeats=1,
)
