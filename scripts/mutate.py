"""Change the code in small ways, one at a time, and report each change that no test of its room notices.

Run ``python scripts/mutate.py --seed N``. The seed draws functions, and a place to change in each of them.
The script changes copies of the repository, never the working tree. `EQUIVALENT` lists changes that alter
no behaviour.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("src", "tests", "benchmarks", "scripts", "docs", "pyproject.toml", "README.md")
GOAL = 0.95
"""Share of the changes that tests must notice, equivalent ones apart."""

QUICK = ("-m", "not full", "--hypothesis-profile=quick")


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Modules to change, and the tests that must notice.

    Attributes:
        code: Files and folders below ``src/upriver``.
        tests: Files and folders below ``tests``, those that are most likely to notice first.
    """

    code: tuple[str, ...]
    tests: tuple[str, ...]


ROOMS = {
    "cost": Room(code=("cost.py",), tests=("test_cost.py", "policies")),
    "policies": Room(code=("policies",), tests=("policies",)),
    "control": Room(code=("control",), tests=("control", "server/scheduling", "finetune/prefetch")),
    "protocol": Room(
        code=("protocol",), tests=("protocol", "server/http/test_frame_fuzz.py", "rpc/test_client.py")
    ),
    "barrier": Room(
        code=("coldstart/model/weight_barrier.py", "coldstart/model/arrivals.py"),
        tests=(
            "coldstart/model/test_weight_barrier.py",
            "coldstart/test_load.py",
            "coldstart/test_devices.py",
        ),
    ),
    "split": Room(
        code=("program/split", "program/eval_mode.py", "program/freeze.py"),
        tests=(
            "program/split",
            "program/module_state",
            "program/test_functions.py",
            "program/test_gradients.py",
        ),
    ),
    "order": Room(
        code=(
            "finetune/prefetch/sampler.py",
            "finetune/prefetch/step_assembly.py",
        ),
        tests=("finetune/prefetch", "finetune/test_job_plain.py"),
    ),
    "draws": Room(code=("pipeline/draw.py", "pipeline/seeding.py"), tests=("pipeline",)),
    "direct": Room(code=("store/direct.py",), tests=("store",)),
}

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.BitOr: "&",
    ast.BitAnd: "|",
    ast.LShift: ">>",
    ast.RShift: "<<",
}
SWAPPED = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "sorted": "list",
    "floor": "ceil",
    "ceil": "floor",
}

EQUIVALENT: dict[tuple[str, str, str], str] = {}
"""By path, text and changed text of a line: why no test can notice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One changed place.

    Attributes:
        path: Of the module, below the root of the repository.
        function: Qualified name.
        line: Number of the line, from 1.
        start, end: Offsets of the replaced bytes in the file.
        text: The replacement.
        before, after: The line as it is, and as it would be.
    """

    room: str
    path: str
    function: str
    line: int
    start: int
    end: int
    text: str
    before: str
    after: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Return the key of this change in `EQUIVALENT`."""
        return self.path, self.before, self.after


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the tests made of a change: ``killed``, ``survived`` or ``equivalent``."""

    mutant: Mutant
    result: str
    seconds: float
    by: str = ""


# ------------------------------------------------------------------------------------------------ changes


def functions_of(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield each function of a module with its qualified name; nested functions belong to the outer one."""
    waiting: list[tuple[str, ast.stmt]] = [("", node) for node in tree.body]
    while waiting:
        prefix, node = waiting.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            waiting += [(f"{prefix}{node.name}.", inner) for inner in node.body]


def walked(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it but annotations, which Python does not run."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, ast.AST):
                yield from walked(inner)


def replacements(node: ast.AST, source: bytes, starts: Sequence[int]) -> Iterator[tuple[int, int, str]]:
    """Yield the changes of one node, each as offsets of bytes and their replacement."""

    def at(part: ast.expr | ast.stmt) -> tuple[int, int]:
        assert part.end_lineno is not None
        assert part.end_col_offset is not None
        return starts[part.lineno - 1] + part.col_offset, starts[part.end_lineno - 1] + part.end_col_offset

    def between(left: ast.expr, right: ast.expr, text: str) -> tuple[int, int, str] | None:
        start, end = at(left)[1], at(right)[0]
        gap = source[start:end].decode()
        word = gap.strip()
        if not word or any(sign in gap for sign in "()#\n"):
            return None
        return start, end, gap.replace(word, text)

    found: list[tuple[int, int, str] | None] = []
    match node:
        case ast.Compare(left=left, ops=ops, comparators=rights):
            for a, op, b in zip([left, *rights], ops, rights, strict=False):
                found.append(between(a, b, COMPARISONS[type(op)]))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            found.append(between(left, right, OPERATORS[type(op)]))
        case ast.BoolOp(op=op, values=values):
            other = "or" if isinstance(op, ast.And) else "and"
            found += [between(a, b, other) for a, b in itertools.pairwise(values)]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            found.append((at(node)[0], at(operand)[0], ""))
        case ast.Constant(value=bool(value)):
            found.append((*at(node), str(not value)))
        case ast.Constant(value=int() | float() as value):
            found.append((*at(node), repr(value + 1)))
        case ast.Call(func=ast.Name(id=name) as called) if name in SWAPPED:
            found.append((*at(called), SWAPPED[name]))
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            start, end = at(test)
            found.append((start, end, f"not ({source[start:end].decode()})"))
        case ast.AugAssign() | ast.Expr(value=ast.Call() | ast.Await()):
            found.append((*at(node), "pass"))
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            found.append((*at(value), "None"))
        case ast.Continue():
            found.append((*at(node), "break"))
        case ast.Break():
            found.append((*at(node), "continue"))
    yield from (one for one in found if one is not None)


def mutants_of(room: str, path: Path, root: Path = ROOT) -> list[list[Mutant]]:
    """Return the changes of a module, function by function.

    Args:
        path: Of the module.
        root: That paths are told from.
    """
    source = path.read_bytes()
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    everything = []
    for name, function in functions_of(ast.parse(source)):
        found = []
        for node in (inner for statement in function.body for inner in walked(statement)):
            for start, end, text in replacements(node, source, starts):
                changed = source[:start] + text.encode() + source[end:]
                try:
                    ast.parse(changed)
                except SyntaxError:
                    continue
                number = source.count(b"\n", 0, start)
                found.append(
                    Mutant(
                        room=room,
                        path=str(path.relative_to(root)),
                        function=name,
                        line=number + 1,
                        start=start,
                        end=end,
                        text=text,
                        before=lines[number].decode().strip(),
                        after=changed.splitlines()[number].decode().strip(),
                    )
                )
        if found:
            everything.append(found)
    return everything


def draw(seed: int, count: int, rooms: Sequence[str], root: Path = ROOT) -> list[Mutant]:
    """Draw changes by a seed: rooms in turns, in each a function, in it a place; none twice.

    Args:
        count: Of changes; fewer if the rooms have no more.
    """
    chance = random.Random(seed)
    pools = {}
    for room in rooms:
        paths = [root / "src" / "upriver" / code for code in ROOMS[room].code]
        files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
        pools[room] = [found for file in files for found in mutants_of(room, file, root)]
    drawn: list[Mutant] = []
    while len(drawn) < count and any(pools.values()):
        for room, pool in pools.items():
            if pool and len(drawn) < count:
                function = chance.choice(pool)
                drawn.append(function.pop(chance.randrange(len(function))))
                pools[room] = [left for left in pool if left]
    return drawn


# -------------------------------------------------------------------------------------------------- tests


class Copies:
    """Copies of the repository, in which changes are made and tests run.

    Args:
        folder: That they are made in.
        count: Of tests at a time.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._free: SimpleQueue[Path] = SimpleQueue()
        for number in range(count):
            copy = folder / str(number)
            copy.mkdir()
            for name in COPIED:
                source = ROOT / name
                if source.is_dir():
                    shutil.copytree(
                        source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "results")
                    )
                else:
                    shutil.copy2(source, copy / name)
            self._free.put(copy)

    def run(self, room: str, mutant: Mutant | None, limit_s: float) -> tuple[int, str]:
        """Run the tests of a room on a change, or on the code as it is.

        Returns:
            The exit code of pytest, -1 where it took longer than allowed, and the first failure.
        """
        copy = self._free.get()
        try:
            file = copy / mutant.path if mutant else None
            whole = file.read_bytes() if file else b""
            if mutant and file:
                file.write_bytes(whole[: mutant.start] + mutant.text.encode() + whole[mutant.end :])
            try:
                return self._pytest(copy, room, limit_s)
            finally:
                if file:
                    file.write_bytes(whole)
        finally:
            self._free.put(copy)

    @staticmethod
    def _pytest(copy: Path, room: str, limit_s: float) -> tuple[int, str]:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:xdist",
            "-p",
            "no:cacheprovider",
            *QUICK,
        ]
        command += [str(Path("tests") / path) for path in ROOMS[room].tests]
        environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return -1, "longer than allowed"
        first = next(
            (line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))), said[-300:]
        )
        return process.returncode, first


def judge(copies: Copies, mutant: Mutant, limit_s: float) -> Outcome:
    """Run the tests on one change."""
    if mutant.key in EQUIVALENT:
        return Outcome(mutant=mutant, result="equivalent", seconds=0.0, by=EQUIVALENT[mutant.key])
    began = time.perf_counter()
    code, by = copies.run(mutant.room, mutant, limit_s)
    result = "survived" if code == 0 else "killed"
    return Outcome(mutant=mutant, result=result, seconds=time.perf_counter() - began, by=by if code else "")


def told(outcome: Outcome) -> str:
    """Return a line about one change."""
    one = outcome.mutant
    return f"{outcome.result:10} {one.path}:{one.line} {one.function}: {one.before!r} -> {one.after!r}"


def summary(outcomes: Sequence[Outcome]) -> tuple[str, bool]:
    """Return a table by room, and whether the share of killed changes reaches `GOAL`."""
    lines = []
    for room in dict.fromkeys(one.mutant.room for one in outcomes):
        results = [one.result for one in outcomes if one.mutant.room == room]
        lines.append(
            f"{room:10} {results.count('killed')} killed, {results.count('survived')} survived, "
            f"{results.count('equivalent')} equivalent"
        )
    killed = sum(one.result == "killed" for one in outcomes)
    judged = killed + sum(one.result == "survived" for one in outcomes)
    share = killed / judged if judged else 1.0
    lines.append(f"killed {killed} of {judged} ({share:.1%}; goal {GOAL:.0%})")
    return "\n".join(lines), share >= GOAL


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw changes, run the tests on each, and print those that survived; return 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument(
        "--room", action="append", choices=list(ROOMS), help="only this room; may be given again"
    )
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1, help="tests at a time")
    parser.add_argument("--list", action="store_true", help="print the changes, and run nothing")
    parser.add_argument("--report", type=Path, help="write every outcome to this file, as JSON lines")
    options = parser.parse_args(arguments)
    rooms = options.room or list(ROOMS)
    drawn = draw(options.seed, options.count, rooms)
    if options.list:
        for mutant in drawn:
            print(told(Outcome(mutant=mutant, result=mutant.room, seconds=0.0)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        copies = Copies(Path(folder), options.at_once)
        limits = {}
        for room in dict.fromkeys(mutant.room for mutant in drawn):
            began = time.perf_counter()
            code, by = copies.run(room, None, 3600)
            if code:
                print(f"the tests of {room} fail as it is: {by}", file=sys.stderr)
                return 2
            limits[room] = 60 + 5 * (time.perf_counter() - began)
        outcomes = []
        with ThreadPoolExecutor(options.at_once) as pool:
            for outcome in pool.map(lambda one: judge(copies, one, limits[one.room]), drawn):
                outcomes.append(outcome)
                print(f"[{len(outcomes)}/{len(drawn)}] {told(outcome)}", flush=True)
                if options.report:
                    with options.report.open("a", encoding="utf-8") as report:
                        report.write(json.dumps({"seed": options.seed, **asdict(outcome)}) + "\n")
    text, reached = summary(outcomes)
    print(text)
    return int(not reached)


if __name__ == "__main__":
    sys.exit(main())
