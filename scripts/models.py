"""Cut the models that people fine-tune, prove every cut, and write the results: docs/models.md.

Each model is built from its configuration at a published size, frozen as ``model_list.py`` says, and split in
training mode as a job would split it. It runs in a process of its own: its memory is freed, and a crash is a
row of the table. Finished rows are kept in a JSON file, so a stopped run resumes.

Usage: python scripts/models.py [--only NAME...] [--again] [--json] [--check]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from model_list import ENTRIES, PART, Entry
from models_page import page

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "models.md"
ROWS = ROOT / "benchmarks" / "results" / "models.json"

THREADS = 1
"""Threads of a model's process: bits are compared, and the machine may have other work."""

LARGE = 50_000_000
"""Number of parameters from which on a model is captured for a micro-batch of 2, not 4."""

MEMORY_BYTES = 20 << 30
TIMEOUT_S = 1200

COMPARED = ("frozen_through", "captured", "cuts", "tensors", "proof")
"""Fields that must agree for every run of the table. Seconds may differ."""

Row = dict[str, Any]


def main() -> int:
    """Make the table, or check a part of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cut these models, finished or not")
    parser.add_argument("--again", action="store_true", help="also cut models whose row is not a proven one")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON document")
    parser.add_argument("--check", action="store_true", help="cut a few again and compare with the table")
    options = parser.parse_args()
    unknown = set(options.only or ()) - {entry.name for entry in ENTRIES}
    if unknown:
        parser.error(f"no model of the table: {', '.join(sorted(unknown))}; see scripts/model_list.py")
    with tempfile.TemporaryDirectory() as empty:
        os.environ["UPRIVER_CACHE"] = empty  # proofs are made, not read from the cache
        return _check(options.only or PART) if options.check else _make(options)


def _make(options: argparse.Namespace) -> int:
    """Cut the requested models and write the page."""
    known = _kept_rows()
    for name in _wanted(known, options.only, again=options.again):
        known[name] = _in_a_child(name)
        _tell(known[name])
        ROWS.parent.mkdir(parents=True, exist_ok=True)
        ROWS.write_text(json.dumps([known[e.name] for e in ENTRIES if e.name in known], indent=1) + "\n")
    rows = [known[entry.name] | {"family": entry.family} for entry in ENTRIES if entry.name in known]
    PAGE.write_text(page(rows))
    if options.json:
        print(json.dumps(rows))
    return 0


def _kept_rows() -> dict[str, Row]:
    return {row["name"]: row for row in json.loads(ROWS.read_text())} if ROWS.is_file() else {}


def _wanted(known: Mapping[str, Row], only: Sequence[str] | None, *, again: bool) -> list[str]:
    if only is not None:
        return list(only)
    names = [entry.name for entry in ENTRIES]
    return [n for n in names if n not in known or (again and known[n]["proof"] != "passed")]


def _check(names: Sequence[str]) -> int:
    """Cut these models again. Return 0 if the results agree with the table."""
    known = _kept_rows()
    differing = 0
    for name in names:
        row, kept = _in_a_child(name), known.get(name, {})
        _tell(row)
        for key in COMPARED:
            if row[key] != kept.get(key):
                differing += 1
                print(f"{name}: {key} is {row[key]!r}, the table says {kept.get(key)!r}")
    print(f"{len(names)} models cut again, {differing} differences from {PAGE.name}")
    return 1 if differing else 0


def _in_a_child(name: str) -> Row:
    """Return the row of one model, made in a process that starts with everything imported."""
    _import_all_for(name)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        _answer(name, theirs)
    os.close(theirs)
    with open(ours, "rb", buffering=0) as answer:
        data, in_time = _read(answer, TIMEOUT_S)
    if not in_time:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not in_time:
        return _empty_row(_entry(name), f"took more than {TIMEOUT_S} s")
    if not data:
        return _empty_row(_entry(name), f"the process ended with {os.waitstatus_to_exitcode(status)}")
    row: Row = json.loads(data)
    return row


def _import_all_for(name: str) -> None:
    from upriver._torchvision import ensure_torchvision

    ensure_torchvision()
    library = {name.partition(":")[0]} & {"timm", "transformers"}
    for module in ("torch._dynamo", "torch.export", *library, "upriver.program.split.split"):
        importlib.import_module(module)


def _answer(name: str, pipe: int) -> NoReturn:
    """Make the row in the child, and never return."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    try:
        with open(pipe, "wb") as answer:
            answer.write(json.dumps(make_row(_entry(name))).encode())
    finally:
        os._exit(0)


def _read(stream: IO[bytes], timeout_s: float) -> tuple[bytes, bool]:
    """Return the data until the other end is closed, and whether it arrived in time."""
    deadline = time.monotonic() + timeout_s
    data = b""
    while select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = stream.read(1 << 16)
        if not part:
            return data, True
        data += part
    return data, False


def _tell(row: Row) -> None:
    how = f"{row['cuts']} cuts, {row['captured']}" if row["proof"] == "passed" else row["proof"]
    seconds = row["capture_s"] + row["prove_s"]
    print(f"{row['name']}: {how} ({seconds:.0f} s, {row['peak_gb']:.1f} GB)", file=sys.stderr, flush=True)


def _entry(name: str) -> Entry:
    return next(entry for entry in ENTRIES if entry.name == name)


# ------------------------------------------------------------------------------------------ one model


def make_row(entry: Entry) -> Row:
    """Return the row of one model, made in this process."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    warnings.simplefilter("ignore")
    try:
        row = cut(entry)
    except Exception as error:  # any failure is a row of the table
        row = _empty_row(entry, f"{type(error).__name__}: {error}".strip().splitlines()[0])
    return row | {"peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1)}


def _empty_row(entry: Entry, reason: str) -> Row:
    return {
        "name": entry.name,
        "family": entry.family,
        "parameters": 0,
        "inputs": "",
        "frozen_through": "",
        "captured": "unsplit",
        "boundary": "",
        "cuts": 0,
        "tensors": 0,
        "capture_s": 0.0,
        "prove_s": 0.0,
        "proof": reason,
        "attempts": [],
        "peak_gb": 0.0,
    }


def cut(entry: Entry) -> Row:
    """Split one model and describe the result."""
    import torch

    from upriver.program.example_inputs import Example
    from upriver.program.models.registry import load_model
    from upriver.program.split.split import split

    torch.set_num_threads(THREADS)
    model, inputs = load_model(entry.name)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    example = Example.of(inputs.example(2 if parameters > LARGE else 4))
    row = _empty_row(entry, "") | {
        "parameters": parameters,
        "inputs": example.describe(),
        "frozen_through": entry.freeze(model),
    }
    clock = Clock()
    result = split(model.train(), example, on_progress=clock)
    row |= {"capture_s": clock.capturing_s, "prove_s": clock.proving_s}
    row["attempts"] = [str(attempt) for attempt in result.attempts]
    if result.program is None:
        return row | {"proof": result.why_not}
    program = result.program
    return row | {
        "captured": _how(result),
        "boundary": result.boundary,
        "cuts": program.num_stages - 1,
        "tensors": len(program.live(program.num_stages)),
        "proof": "passed",
    }


def _how(result: Any) -> str:
    """Return the way of cutting that passed its proof, and why the freeze point is no later one."""
    _, _, level = result.attempts[-1].step.rpartition(", ")
    return f"{level}; {result.note}" if result.note else level


class Clock:
    """Sum up the seconds between the progress messages of ``split``."""

    def __init__(self) -> None:
        self._spent = {"proving": 0.0, "": 0.0}
        self._now, self._since = "", time.perf_counter()

    def __call__(self, text: str) -> None:
        """Record that ``text`` begins."""
        self._stop()
        self._now = "proving" if text.startswith("proving") else ""

    def _stop(self) -> None:
        now = time.perf_counter()
        self._spent[self._now] += now - self._since
        self._since = now

    @property
    def proving_s(self) -> float:
        """Return the seconds of proofs."""
        self._stop()
        return round(self._spent["proving"], 1)

    @property
    def capturing_s(self) -> float:
        """Return the seconds of tracing and capturing."""
        self._stop()
        return round(self._spent[""], 1)


if __name__ == "__main__":
    sys.exit(main())
