"""Compare one to ten tenants with training in the store: Figure 11 of HAPI (2022)."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import mean
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.harness.children import Failed, Lines, ProcessLost, module_command
from benchmarks.harness.memory_group import MemoryGroup, Watch, memory_group
from benchmarks.harness.slowed import cpu_s
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
    table_of,
)
from benchmarks.server.host import CORES, SERVER_CORE, Server, end, environment, pinned
from benchmarks.server.load import OK, Stream, ended
from benchmarks.server.world import World
from upriver.report.figure import legend_above

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEAR, PLAIN = "near the store", "all in the store"
BUILD_LIMIT_S = 180.0
STEP_LIMIT_S = 600.0
WATCH_S = 0.2
"""Seconds between two looks at the server's memory. Memory is no goal here, and a look costs core time."""


@dataclass(frozen=True, kw_only=True)
class Tenants(Claim):
    """Tenants that arrive at once with one training batch each.

    Attributes:
        networks: Assigned to the tenants in turn.
        counts: Tenants at once.
        samples: Samples of each tenant's training batch.
        micro_batch: Samples of the server's micro-batch.
        budget_bytes: Memory of both ways.
    """

    name: ClassVar[str] = "tenants"
    title: ClassVar[str] = "One to ten tenants, and everything in the store"
    says: ClassVar[str] = (
        "However many tenants come at once, the near-data server answers each, where training everything in "
        "the store, on the same core and in the same memory, runs out of memory or takes longer in the mean "
        "(Figure 11 of HAPI, 2022)."
    )

    networks: tuple[str, ...]
    counts: tuple[int, ...]
    samples: int
    micro_batch: int
    budget_bytes: int

    @property
    def cells(self) -> tuple[str, ...]:
        return tuple(f"{way} x{count}" for count in self.counts for way in (NEAR, PLAIN))

    def networks_of(self, count: int) -> list[str]:
        """Return the networks of this many tenants."""
        return list(islice(cycle(self.networks), count))

    # ------------------------------------------------------------------------------------------ running

    def measure(self, bench: Bench) -> None:
        names = [f"t{number}" for number in range(1, max(self.counts) + 1)]
        questions = self._questions(bench.world)
        with bench.server({"memory_budget_bytes": self.budget_bytes}, names) as server:
            for name, network in zip(names, self.networks_of(len(names)), strict=True):
                bench.generator.put(server, questions, [_stream(server, name, f"{network} warm")])
            for cell, repeat in bench.todo(self):
                way, _, count = cell.rpartition(" x")
                if way == NEAR:
                    row = self._near(bench, server, questions, names[: int(count)])
                else:
                    row = self._plain(bench, int(count))
                bench.add(self, cell, repeat, row)

    def _questions(self, world: World) -> Questions:
        found = {}
        for network in self.networks:
            program = world.program(network, self.micro_batch)
            batches = world.batches(0, self.micro_batch, self.samples // self.micro_batch)
            found[network] = world.question(program, program.num_stages, batches)
            found[f"{network} warm"] = world.question(program, program.num_stages, batches[:1])
        return found

    def _near(self, bench: Bench, server: Server, questions: Questions, names: Sequence[str]) -> Row:
        networks = self.networks_of(len(names))
        streams = [_stream(server, name, network) for name, network in zip(names, networks, strict=True)]
        spent = cpu_s(server.pid)
        with Watch(server.pid, every_s=WATCH_S) as watch:
            requests = ended(bench.generator.put(server, questions, streams))
        spent = cpu_s(server.pid) - spent
        through = [each.done_s for each in requests if each.outcome == OK]
        about = {"peak": watch.peaks["together"], "cpu_s": round(spent, 2)}
        return {**outcomes(requests), **_completions(through), **about}

    def _plain(self, bench: Bench, count: int) -> Row:
        """Run training processes in a group with the budget's memory.

        Without a group, each process has its share of that memory.
        """
        with memory_group("plain", self.budget_bytes) as group, contextlib.ExitStack() as stack:
            share = None if group is not None else self.budget_bytes // count
            trainers = [
                stack.enter_context(_trainer(self._spec(bench.world, network, share), group))
                for network in self.networks_of(count)
            ]
            return {**_trained(trainers), "limited_by": "share" if group is None else "group"}

    def _spec(self, world: World, network: str, data_bytes: int | None) -> dict[str, Any]:
        return {
            "network": network,
            "uri": world.uri,
            "dataset": world.dataset.digest,
            "ids": world.ids(0, self.samples),
            "core": SERVER_CORE,
            "data_bytes": data_bytes,
        }

    # ---------------------------------------------------------------------------------------- reporting

    def _lost(self, rows: Rows, way: str, count: int) -> int:
        """Return the tenants that were not served, at the median of the runs."""
        found = sorted(row["asked"] - row["right"] for row in rows.of(f"{way} x{count}"))
        return found[len(found) // 2]

    def _mean_s(self, rows: Rows, way: str, count: int) -> float | None:
        spread = rows.spread(f"{way} x{count}", "mean_s")
        return spread.median if spread.values else None

    def verdict(self, rows: Rows) -> Verdict:
        near = [row for count in self.counts for row in rows.of(f"{NEAR} x{count}")]
        near_lost, most = sum(row["asked"] - row["right"] for row in near), max(self.counts)
        lost = {count: self._lost(rows, PLAIN, count) for count in self.counts}
        ours, theirs = (self._mean_s(rows, way, most) for way in (NEAR, PLAIN))
        ahead = bool(lost[most]) or (ours is not None and theirs is not None and ours <= theirs)
        first = next((count for count in self.counts if lost[count]), None)
        runs_out = "never" if first is None else f"from {first} tenants on"
        return Verdict(
            met=not near_lost and ahead and _one_loss_each(rows),
            text=f"near the store {near_lost} of {sum(row['asked'] for row in near)} tenants were not "
            f"answered rightly; everything in the store runs out of memory {runs_out}, and of {most} "
            f"tenants {lost[most]} are lost. Mean completion at {most}: "
            f"{_text(ours)} near the store, {_text(theirs)} in it, of those that were served.",
        )

    def tables(self, rows: Rows) -> str:
        lines = []
        for count in self.counts:
            line: list[object] = [count]
            for way in (NEAR, PLAIN):
                cell = f"{way} x{count}"
                line += [rows.text(cell, name, digits=1) for name in ("makespan_s", "mean_s", "cpu_s")]
                line.append(self._lost(rows, way, count))
            peaks = rows.values(f"{NEAR} x{count}", "peak")
            lines.append([*line, mib(max(peaks))])
        columns = ("makespan, s", "mean completion, s", "CPU-seconds", "lost")
        header = ("tenants", *(f"{way}: {column}" for way in (NEAR, PLAIN) for column in columns))
        return table_of((*header, "the server's peak, MiB"), lines)

    def notes(self) -> Sequence[str]:
        return (
            f"Each tenant has one training batch of {self.samples} JPEGs, all at once; networks in turn: "
            f"{', '.join(self.networks)}. Near the store: one request up to the freeze point, in "
            f"micro-batches of {self.micro_batch}, until the client has the last byte; as in the paper, no "
            "client computes. In the store: a process a tenant with the whole training batch, to the end of "
            "its step.",
            f"Both on one core, with {self.budget_bytes // MIB} MiB: the server by its budget, which its "
            "front is not part of; the trainers by a control group around all of them, or where none can be "
            "made by a limit on each one's private memory to its share. Models are built, and programs "
            "loaded, before the clock starts. Whoever runs out of memory is lost; completion and "
            "CPU-seconds are those of the others.",
            "Answers must be right to the bit; of a trainer the loss must be the same in every run.",
        )

    def draw(self, rows: Rows, figure: Figure) -> None:
        axes = figure.subplots()
        for way, color in ((NEAR, "tab:blue"), (PLAIN, "tab:orange")):
            for name, style, what in (("makespan_s", "-o", "makespan"), ("mean_s", "--s", "mean completion")):
                spreads = [(count, rows.spread(f"{way} x{count}", name)) for count in self.counts]
                points = [(count, spread.median) for count, spread in spreads if spread.values]
                counts, seconds = [count for count, _ in points], [value for _, value in points]
                axes.plot(counts, seconds, style, color=color, label=f"{way}, {what}")
        for count in self.counts:
            lost = self._lost(rows, PLAIN, count)
            if lost:
                axes.annotate(
                    f"{lost} lost",
                    (count, 0),
                    xytext=(-4, 4),
                    textcoords="offset points",
                    color="tab:orange",
                    ha="right",
                    fontsize="small",
                )
        axes.set(xlabel="tenants at once (number)", ylabel="time (s)", ylim=(0, None))
        legend_above(axes, ncols=2)


def _text(seconds: float | None) -> str:
    return "nobody" if seconds is None else f"{seconds:.1f} s"


def _one_loss_each(rows: Rows) -> bool:
    """Return whether the trainers of a network have the same loss in every run."""
    seen: dict[str, set[float]] = {}
    for row in rows.rows:
        for network, loss in row.get("losses", []):
            seen.setdefault(network, set()).add(loss)
    return all(len(losses) == 1 for losses in seen.values())


def _stream(server: Server, name: str, question: str) -> Stream:
    return Stream(name=name, token=server.tokens[name], questions=(question,), count=1)


def _completions(through: Sequence[float]) -> dict[str, float | None]:
    """Return the seconds since the common start."""
    if not through:
        return {"makespan_s": None, "mean_s": None}
    return {"makespan_s": max(through), "mean_s": mean(through)}


# ------------------------------------------------------------------------------------------- trainers


@dataclass(frozen=True)
class _Trainer:
    network: str
    process: subprocess.Popen[bytes]
    lines: Lines

    def said(self, limit_s: float) -> dict[str, Any]:
        """Return its next answer, which is empty if the process has ended."""
        try:
            found: dict[str, Any] = json.loads(self.lines.next(limit_s))
        except ProcessLost:
            return {}
        return found


@contextlib.contextmanager
def _trainer(spec: dict[str, Any], group: MemoryGroup | None) -> Iterator[_Trainer]:
    """Run a process that builds its model."""
    argv = module_command("server.plain_trainer", json.dumps(spec))
    process = subprocess.Popen(
        pinned(CORES, argv, group=group),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
        start_new_session=True,
    )
    try:
        yield _Trainer(spec["network"], process, Lines(process))
    finally:
        end(process, limit_s=0.0)


def _trained(trainers: Sequence[_Trainer]) -> Row:
    """Make all trainers run their step at once. Return when each finished."""
    there, why = [], ""
    for trainer in trainers:
        said = trainer.said(BUILD_LIMIT_S)
        if "ready" in said:
            there.append(trainer)
        why = why or said.get("error", "" if "ready" in said else "ended")
    began = time.monotonic()
    for trainer in there:
        assert trainer.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            trainer.process.stdin.write(b"go\n")
            trainer.process.stdin.flush()
    through, losses, spent = [], [], 0.0
    for trainer, at, said in _answers(there):
        if "loss" in said:
            through.append(at - began)
            losses.append((trainer.network, said["loss"]))
            spent += said["cpu_s"]
        why = why or said.get("error", "" if "loss" in said else "ended")
    return {
        "asked": len(trainers),
        "right": len(through),
        "others": {"out of memory": len(trainers) - len(through)} if len(through) < len(trainers) else {},
        "why": why,
        "losses": losses,
        "cpu_s": round(spent, 2),
        **_completions(through),
    }


def _answers(trainers: Sequence[_Trainer]) -> Iterator[tuple[_Trainer, float, dict[str, Any]]]:
    """Yield each answer and its arrival time, in order of arrival. A killed trainer gives no answer."""
    waiting = {trainer.lines.fd: trainer for trainer in trainers}
    until = time.monotonic() + STEP_LIMIT_S
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, until - time.monotonic()))
        if not ready:
            raise Failed(f"{len(waiting)} trainers take longer than {STEP_LIMIT_S:g} s")
        for fd in ready:
            trainer = waiting.pop(fd)
            yield trainer, time.monotonic(), trainer.said(1.0)


FULL = Tenants(
    networks=("alexnet", "resnet18", "densenet121"),
    counts=(1, 2, 4, 7, 10),
    samples=48,
    micro_batch=16,
    budget_bytes=3 << 30,
    repeats=3,
)
QUICK = Tenants(networks=("tiny",), counts=(1, 2), samples=8, micro_batch=4, budget_bytes=1 << 30, repeats=1)
