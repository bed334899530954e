"""Feed broken programs to the readers: a typed error, or a program that runs, and nothing else.

A valid program is changed behind its header (fields, arguments, shapes, names, stages, weights), with
corrected digests so that the deep checks are reached, or its bytes are scrambled. The readers run in a child
process under a memory limit. Failures are: any exception but ProgramError, also from a run of an accepted
program; tensors that differ from the file's declaration; more memory than the caps allow; a crash; a hang.
Failing inputs are saved, and ``--only`` makes one input again.

Usage: python scripts/fuzz_program.py [--inputs N] [--seed S] [--json] [--save DIR] [--only INDEX]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import json
import logging
import multiprocessing
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz_mutations import CHANGES, Files, Input, make, seeds
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from upriver.errors import ProgramError
from upriver.program.graph.caps import GraphCaps
from upriver.program.graph.executor import Program
from upriver.program.graph.schema import DTYPES, TensorSpec

CAPS = GraphCaps(
    tensor_bytes=16 << 20, live_bytes=48 << 20, flops=1e8, weights_bytes=8 << 20, header_bytes=1 << 20
)
"""Small, so that a breach of them shows. The changed programs need far less."""

SLACK_BYTES = 192 << 20
"""Memory in addition to the caps: the interpreter's, copies of a file, the working memory of a kernel."""

GUARD_BYTES = 4096
"""Bytes before and behind each input."""

M_PERTURB = -6
"""The C library's option that fills allocated and freed memory with this byte."""

KINDS = (*CHANGES, "weights header", "weights body", "weights bytes", "graph bytes", "random bytes")
OUTCOMES = ("not reached", "accepted", "refused", "failed", "crashed", "hung")
PARTS = (
    "",
    "executor",
    "parser",
    "operators",
    "call_validator",
    "kernel_validator",
    "validator",
    "schedule",
    "weights_file",
    "schema",
    "autocast",
)
"""Modules that refuse inputs. The deeper ones come last."""

Reader = Callable[[Files], None]


def read(files: Files) -> None:
    """Check a program as a server does, and run it twice. The runs must agree.

    Between the runs, the bytes around the inputs and in allocated memory change. So a kernel that reads
    beyond a tensor, or leaves a result unwritten, gives two answers.
    """
    program = Program.from_bytes(files.graph, files.weights, caps=CAPS)
    again = Program(program.graph, files.weights, caps=CAPS)
    first, second = (_run(each, surroundings) for each, surroundings in ((program, 0x55), (again, 0xAA)))
    for value, one, other in zip(program.live(program.num_stages), first, second, strict=True):
        if not _is_as_declared(value.spec, one):
            form = f"{one.dtype} {tuple(one.shape)} {one.stride()}"
            raise ValueError(f"{value.name} is {form}, declared is {value.spec}")
        if not torch.equal(_bits(one), _bits(other)):
            raise ValueError(f"{value.name} depends on memory that is nobody's")


def _run(program: Program, surroundings: int) -> tuple[torch.Tensor, ...]:
    allocator = ctypes.CDLL(None)
    perturb = getattr(allocator, "mallopt", lambda _option, _value: 0)
    perturb(M_PERTURB, surroundings)
    try:
        generator = torch.Generator().manual_seed(0)
        given = [_filled(value.spec, generator, surroundings) for value in program.live(0)]
        return program.run(given, 0, program.num_stages)
    finally:
        perturb(M_PERTURB, 0)


def _filled(spec: TensorSpec, generator: torch.Generator, surroundings: int) -> torch.Tensor:
    """Return an input in the middle of other bytes."""
    room = GUARD_BYTES // spec.itemsize
    around = torch.full((spec.nbytes + 2 * GUARD_BYTES,), surroundings, dtype=torch.uint8)
    if spec.dtype == "bool":
        around.zero_()
    inside = around.view(DTYPES[spec.dtype])[room : room + spec.span]
    if inside.is_floating_point():
        inside.copy_(torch.randn(spec.span, generator=generator))
    else:
        inside.zero_()
    return inside.as_strided(spec.shape, spec.stride)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _is_as_declared(spec: TensorSpec, made: torch.Tensor) -> bool:
    steps = zip(spec.shape, spec.stride, made.stride(), strict=True)
    return (list(made.shape), made.dtype) == (spec.shape, DTYPES[spec.dtype]) and (
        not spec.numel or all(size == 1 or wanted == step for size, wanted, step in steps)
    )


# ------------------------------------------------------------------------------------------ a child


@dataclass(frozen=True, kw_only=True)
class Task:
    """The inputs [start, stop) of a child, with its progress in a shared file."""

    seed: int
    start: int
    stop: int
    programs: Sequence[Files]
    notes: str
    save: str
    reader: Reader


NOTE = np.dtype([("outcome", "u1"), ("kind", "u1"), ("part", "u1"), ("deep", "u1")])


def work(task: Task, ready: Event) -> None:
    """Read one input after another in a child process, which signals that it is ready."""
    faulthandler.enable()
    torch.set_num_threads(1)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(
        logging.CRITICAL
    )  # avoids a page of log for each refusal
    notes = np.memmap(task.notes, dtype=NOTE, mode="r+")
    for files in task.programs:  # loads torch's late imports before memory is measured
        with contextlib.suppress(ProgramError):
            task.reader(files)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
    guard = Guard()
    ready.set()
    for index in range(task.start, task.stop):
        given = make(task.seed, index, task.programs)
        note = notes[index]
        note["kind"], note["deep"] = KINDS.index(given.kind), given.deep
        outcome, part, problem = judge(given, task.reader, guard)
        note["part"] = PARTS.index(part)
        note["outcome"] = OUTCOMES.index(outcome)  # written last: an input with an outcome is done
        if problem:
            save(Path(task.save), task.seed, index, given, problem)


class Guard:
    """Watch the memory of this process."""

    def __init__(self) -> None:
        """Limit the memory from here on to the caps, and some slack."""
        allowed = CAPS.live_bytes + CAPS.weights_bytes + SLACK_BYTES
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        # More than the check below allows, and enough that the limit is never reached in practice.
        resource.setrlimit(resource.RLIMIT_AS, (mapped + 4 * allowed, resource.RLIM_INFINITY))
        self._most = _peak() + allowed

    def broken(self) -> bool:
        """Return whether memory exceeded the limit, once for each time."""
        peak = _peak()
        over = peak > self._most
        self._most = max(self._most, peak)
        return over


def _peak() -> int:
    # Not from getrusage: a child process begins with the peak of its parent.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def judge(given: Input, reader: Reader, guard: Guard) -> tuple[str, str, str]:
    """Return the outcome, the refusing part of the reader, and the problem, if any."""
    try:
        reader(given.files)
        outcome, part, problem = "accepted", "", ""
    except ProgramError as error:
        outcome, part, problem = "refused", _part(error), ""
        if any(_is_about_memory(each) for each in _chain(error)):
            outcome, problem = "failed", "memory ran out:\n" + traceback.format_exc()
    except Exception:
        outcome, part, problem = "failed", "", traceback.format_exc()
    if guard.broken():
        outcome, problem = "failed", "took more memory than the caps allow"
    return outcome, part, problem


def _part(error: BaseException) -> str:
    first = [each for each in _chain(error) if isinstance(each, ProgramError)][-1]
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(first.__traceback__)]
    ours = [name.rpartition(".")[2] for name in frames if name.startswith("upriver.program.")]
    return ours[-1] if ours and ours[-1] in PARTS else ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_about_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def save(directory: Path, seed: int, index: int, given: Input, problem: str) -> None:
    """Save a failing input."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"seed{seed}-input{index}"
    (directory / f"{stem}.graph.json").write_bytes(given.files.graph)
    (directory / f"{stem}.safetensors").write_bytes(given.files.weights)
    (directory / f"{stem}.txt").write_text(f"{given.kind}\n{problem}\n", encoding="utf-8")


# ----------------------------------------------------------------------------------------- the parent


@dataclass(kw_only=True)
class Summary:
    """The results of a fuzzing run.

    Attributes:
        deep: Inputs that are well-formed JSON of the schema, changed behind the header.
        failures: Numbers of the inputs that failed, crashed or hung.
    """

    inputs: int
    seed: int
    seconds: float
    deep: int
    deep_share: float
    outcomes: dict[str, int]
    refused_by: dict[str, int]
    kinds: dict[str, dict[str, int]]
    failures: list[int] = field(default_factory=list)


def fuzz(
    inputs: int,
    *,
    seed: int = 0,
    save_to: Path,
    reader: Reader = read,
    patience_s: float = 60.0,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Summary:
    """Read broken programs, in one child process at a time.

    Args:
        reader: Called with each input; may raise only ProgramError.
        patience_s: Seconds without progress after which a child counts as hanging.
        on_progress: Called with the number of finished inputs.
    """
    began = time.monotonic()
    programs = seeds()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "notes")
        path.write_bytes(bytes(inputs * NOTE.itemsize))
        notes = np.memmap(path, dtype=NOTE, mode="r+")
        start = 0
        while start < inputs:
            task = Task(
                seed=seed,
                start=start,
                stop=inputs,
                programs=programs,
                notes=str(path),
                save=str(save_to),
                reader=reader,
            )
            end = _run_child(task, notes, patience_s, on_progress)
            if end is not None:
                stuck = start + int(np.argmin(notes["outcome"][start:] != 0))
                notes["outcome"][stuck] = OUTCOMES.index(end)
                save(save_to, seed, stuck, make(seed, stuck, programs), end)
                start = stuck + 1
            else:
                start = inputs
        return _summary(notes, seed, time.monotonic() - began)


def _run_child(
    task: Task, notes: np.ndarray[Any, Any], patience_s: float, on_progress: Callable[[int], None]
) -> str | None:
    """Run a child. Return None after a complete run, else how the child ended."""
    spawning = multiprocessing.get_context("spawn")
    ready = spawning.Event()
    child = spawning.Process(target=work, args=(task, ready), daemon=True)
    child.start()
    while child.is_alive() and not ready.wait(0.2):
        pass
    done, since = task.start, time.monotonic()
    while child.is_alive():
        child.join(0.2)
        reached = task.start + int(np.count_nonzero(notes["outcome"][task.start :]))
        if reached > done:
            done, since = reached, time.monotonic()
            on_progress(done)
        elif time.monotonic() - since > patience_s:
            _end(child)
            return "hung"
    return None if child.exitcode == 0 else "crashed"


def _end(child: BaseProcess) -> None:
    child.kill()
    child.join()


def _summary(notes: np.ndarray[Any, Any], seed: int, seconds: float) -> Summary:
    outcome = [OUTCOMES[code] for code in notes["outcome"]]
    kind = [KINDS[code] for code in notes["kind"]]
    kinds: dict[str, Counter[str]] = {}
    for what, result in zip(kind, outcome, strict=True):
        kinds.setdefault(what, Counter())[result] += 1
    refused = [PARTS[note["part"]] for note in notes if OUTCOMES[note["outcome"]] == "refused"]
    deep = int(notes["deep"].sum())
    return Summary(
        inputs=len(notes),
        seed=seed,
        seconds=round(seconds, 1),
        deep=deep,
        deep_share=round(deep / len(notes), 4),
        outcomes=dict(Counter(outcome).most_common()),
        refused_by=dict(Counter(part or "elsewhere" for part in refused).most_common()),
        kinds={what: dict(counts) for what, counts in sorted(kinds.items())},
        failures=[index for index, what in enumerate(outcome) if what in ("failed", "crashed", "hung")],
    )


def main() -> int:
    """Fuzz, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--inputs", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON document")
    parser.add_argument("--save", type=Path, default=Path("fuzz-failures"), help="where failing inputs go")
    parser.add_argument("--only", type=int, metavar="INDEX", help="read this one input, and say how it went")
    options = parser.parse_args()
    if options.only is not None:
        return _only(options.seed, options.only)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("broken programs", total=options.inputs)
        summary = fuzz(
            options.inputs,
            seed=options.seed,
            save_to=options.save,
            on_progress=lambda done: progress.update(bar, completed=done),
        )
    print(json.dumps(vars(summary), indent=None if options.json else 2))
    if summary.failures:
        console.print(f"{len(summary.failures)} inputs failed; they are in {options.save}")
    return 1 if summary.failures else 0


def _only(seed: int, index: int) -> int:
    given = make(seed, index, seeds())
    print(f"{given.kind}, {'deep' if given.deep else 'shallow'}")
    try:
        read(given.files)
    except ProgramError as error:
        print(f"refused: {error}")
    else:
        print("accepted")
    return 0


if __name__ == "__main__":
    sys.exit(main())
