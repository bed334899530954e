"""Change the code in small ways, one at a time, and report each change that no test of its room notices.

Run ``python scripts/mutate.py --seed N``. The seed draws functions, and a place to change in each of them.
The script changes copies of the repository, never the working tree. The test file that mirrors the changed
module runs first, and the others of its room only if it passes. `EQUIVALENT` lists changes that alter no
behaviour.

With ``--report FILE`` every outcome is written at once. The same command then judges what the file lacks, and
again what survived, so that a new test shows its effect. With ``--full`` the tests that take long run, too:
a change that only these notice counts as noticed with ``--full`` alone.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

import psutil

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("src", "tests", "benchmarks", "scripts", "docs", "pyproject.toml", "README.md")
GOAL = 0.95
"""Share of the changes that tests must notice, equivalent ones apart."""

TEST_LIMIT_S = 120
"""Seconds after which a test hangs: tests of the rooms take at most a tenth, and machines are shared."""

PYTEST = ["-m", "pytest", "-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--fork"]
QUICK = ["-m", "not full", "--hypothesis-profile=unshrunk", f"--timeout={TEST_LIMIT_S}"]
NO_TESTS = 5
"""Exit code of pytest where a file has no quick test."""


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
            "coldstart/model/test_arrivals.py",
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
        tests=(
            "finetune/prefetch/test_step_assembly.py",
            "finetune/test_job_plain.py",
            "finetune/prefetch",
        ),
    ),
    "draws": Room(code=("pipeline/draw.py", "pipeline/seeding.py"), tests=("pipeline",)),
    "direct": Room(code=("store/direct.py",), tests=("store",)),
    "features": Room(code=("features",), tests=("features",)),
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

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "src/upriver/coldstart/model/arrivals.py",
        "self._all_waited += 1",
        "self._all_waited += 2",
    ): "The count is compared with 0 only, and one that stays above wakes waiting threads, which look again.",
    (
        "src/upriver/coldstart/model/weight_barrier.py",
        "super().__init__()  # type: ignore[no-untyped-call]",
        "pass  # type: ignore[no-untyped-call]",
    ): "TorchDispatchMode.__init__ makes lists for its `with` alone, which `pushed` avoids.",
    (
        "src/upriver/finetune/prefetch/step_assembly.py",
        "pending = [done for done in pending if done.stop > stop]",
        "pending = [done for done in pending if done.stop >= stop]",
    ): "`rows` of a micro-batch that ends with a step are empty for all later steps.",
    (
        "src/upriver/protocol/tree.py",
        "return [stride for size, stride in zip(tensor.shape, strides, strict=True) "
        "if size > 1 and tensor.numel()]",
        "return [stride for size, stride in zip(tensor.shape, strides, strict=False) "
        "if size > 1 and tensor.numel()]",
    ): "A tensor has as many strides as sizes.",
    (
        "src/upriver/store/direct.py",
        "self._paused = False",
        "self._paused = True",
    ): "`_paused` guards `resume_reading` alone, which does nothing to a transport that reads.",
    (
        "src/upriver/store/direct.py",
        "if self._paused and self._transport is not None:",
        "if self._paused or self._transport is not None:",
    ): "There is a transport by then, and `resume_reading` does nothing to one that reads.",
    (
        "src/upriver/store/direct.py",
        "self._start = self._left = self._pending = self._piece_bytes = 0",
        "self._start = self._left = self._pending = self._piece_bytes = 1",
    ): "`ask` and `more` set all of them; before the first `more` one byte wakes as none does.",
}
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
    """What the tests made of a change: ``killed``, ``timeout``, ``survived`` or ``equivalent``.

    Attributes:
        by: The first failure, or why no test can notice.
        full: Whether the tests that take long ran, too.
    """

    mutant: Mutant
    result: str
    seconds: float
    by: str = ""
    full: bool = False


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
        first, last = starts[function.lineno - 1], starts[function.end_lineno or 0]
        found = []
        for node in (inner for statement in function.body for inner in walked(statement)):
            for start, end, text in replacements(node, source, starts):
                changed = source[:start] + text.encode() + source[end:]
                try:
                    ast.parse(b"if True:\n " + source[first:start] + text.encode() + source[end:last])
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


def judged(report: Path) -> list[Outcome]:
    """Return the outcomes that a report holds."""
    if not report.exists():
        return []
    lines = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
    return [Outcome(**{**line, "mutant": Mutant(**line["mutant"])}) for line in lines]


def draw(seed: int, count: int, rooms: Sequence[str], root: Path = ROOT) -> list[Mutant]:
    """Draw changes by a seed: rooms in turns, in each a function, in it a place; none twice.

    Each room has a generator of its own. Its changes are the same whichever other rooms are drawn from.

    Args:
        count: Of changes; fewer if the rooms have no more.
    """
    chances = {room: random.Random(f"{seed} {room}") for room in rooms}
    pools = {}
    for room in rooms:
        paths = [root / "src" / "upriver" / code for code in ROOMS[room].code]
        files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
        pools[room] = [found for file in files for found in mutants_of(room, file, root)]
    drawn: list[Mutant] = []
    while len(drawn) < count and any(pools.values()):
        for room, pool in pools.items():
            if pool and len(drawn) < count:
                function = chances[room].choice(pool)
                drawn.append(function.pop(chances[room].randrange(len(function))))
                pools[room] = [left for left in pool if left]
    return drawn


# -------------------------------------------------------------------------------------------------- tests


def mirror_of(module: str) -> str:
    """Return the path below ``tests`` at which the test file of a module lies, if it has one."""
    inner = Path(module).relative_to("src/upriver")
    return str(inner.with_name(f"test_{inner.name}"))


class Copies:
    """Copies of the repository, in which changes are made and tests run.

    Args:
        folder: That they are made in.
        count: Of tests at a time.
        full: Run the tests that take long, too.
    """

    def __init__(self, folder: Path, count: int, *, full: bool = False) -> None:
        self.full = full
        self._free: SimpleQueue[Path] = SimpleQueue()
        self._seconds = itertools.count()
        self._running: set[subprocess.Popen[bytes]] = set()
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

        Args:
            limit_s: For all tests of the room; each test has `TEST_LIMIT_S`.

        Returns:
            The exit code of pytest, -1 where it took longer than allowed, and the first failure.
        """
        copy = self._free.get()
        try:
            if mutant is None:
                return self._pytest(copy, ROOMS[room].tests, limit_s)
            file = copy / mutant.path
            whole, times = file.read_bytes(), file.stat()
            file.write_bytes(whole[: mutant.start] + mutant.text.encode() + whole[mutant.end :])
            # Python compares the size of a source and whole seconds of its time with those of its bytecode.
            second = next(self._seconds)
            os.utime(file, (second, second))
            try:
                mirror = mirror_of(mutant.path)
                code, by = NO_TESTS, ""
                if (copy / "tests" / mirror).exists():
                    code, by = self._pytest(copy, [mirror], limit_s)
                others = [path for path in ROOMS[room].tests if path != mirror]
                if code in (0, NO_TESTS) and others:
                    code, by = self._pytest(copy, others, limit_s, "--ignore", f"tests/{mirror}")
                return (0, "") if code == NO_TESTS else (code, by)
            finally:
                file.write_bytes(whole)
                os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        finally:
            self._free.put(copy)

    def stop(self) -> None:
        """Kill the tests that run."""
        for process in list(self._running):
            _kill(process)

    def _pytest(self, copy: Path, tests: Sequence[str], limit_s: float, *more: str) -> tuple[int, str]:
        environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # each run would compile everything
        # A file, as a server that outlives its test would keep a pipe open.
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            process = subprocess.Popen(
                [
                    sys.executable,
                    *PYTEST,
                    *([] if self.full else QUICK),
                    *(f"tests/{path}" for path in tests),
                    *more,
                ],
                cwd=copy,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running.add(process)
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                _kill(process)
                return -1, "longer than allowed"
            finally:
                self._running.discard(process)
            output.seek(0)
            said = output.read()
        first = next(
            (line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))), said[-300:]
        )
        hung = process.returncode and "from pytest-timeout" in said
        return -1 if hung else process.returncode, first


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill tests and all that they started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()


def judge(copies: Copies, mutant: Mutant, limit_s: float) -> Outcome:
    """Run the tests on one change."""
    if mutant.key in EQUIVALENT:
        return Outcome(mutant=mutant, result="equivalent", seconds=0.0, by=EQUIVALENT[mutant.key])
    began = time.perf_counter()
    code, by = copies.run(mutant.room, mutant, limit_s)
    result = {0: "survived", -1: "timeout"}.get(code, "killed")
    seconds = time.perf_counter() - began
    return Outcome(mutant=mutant, result=result, seconds=seconds, by=by if code else "", full=copies.full)


def told(outcome: Outcome) -> str:
    """Return a line about one change."""
    one = outcome.mutant
    return f"{outcome.result:10} {one.path}:{one.line} {one.function}: {one.before!r} -> {one.after!r}"


def summary(outcomes: Sequence[Outcome]) -> tuple[str, bool]:
    """Return a table by room, and whether the share of killed changes reaches `GOAL`."""
    rooms = dict.fromkeys(one.mutant.room for one in outcomes)
    counts = {room: Counter(one.result for one in outcomes if one.mutant.room == room) for room in rooms}
    lines = [
        f"{room:10} {count['killed'] + count['timeout']} killed ({count['timeout']} by a test that hung), "
        f"{count['survived']} survived, {count['equivalent']} equivalent"
        for room, count in counts.items()
    ]
    total = Counter(one.result for one in outcomes)
    killed = total["killed"] + total["timeout"]
    tested = killed + total["survived"]
    share = killed / tested if tested else 1.0
    lines.append(f"killed {killed} of {tested} ({share:.1%}; goal {GOAL:.0%})")
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
    parser.add_argument("--full", action="store_true", help="run the tests that `make test` leaves out, too")
    parser.add_argument("--list", action="store_true", help="print the changes, and run nothing")
    parser.add_argument(
        "--report",
        type=Path,
        help="write every outcome to this file, as JSON lines; judge no kill in it again",
    )
    options = parser.parse_args(arguments)
    rooms = options.room or list(ROOMS)
    drawn = draw(options.seed, options.count, rooms, ROOT)
    if options.list:
        for mutant in drawn:
            print(told(Outcome(mutant=mutant, result=mutant.room, seconds=0.0)))
        return 0
    reported = (
        [one for one in judged(options.report) if options.full or not one.full] if options.report else []
    )
    killed = {one.mutant: one for one in reported if one.result in ("killed", "timeout")}
    outcomes = [killed[one] for one in drawn if one in killed]
    left = [one for one in drawn if one not in killed]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        copies = Copies(Path(folder), options.at_once, full=options.full)
        limits = {}
        for room in dict.fromkeys(one.room for one in left if one.key not in EQUIVALENT):
            began = time.perf_counter()
            code, by = copies.run(room, None, 3600)
            if code:
                print(f"the tests of {room} fail as it is: {by}", file=sys.stderr)
                return 2
            limits[room] = 60 + 5 * (time.perf_counter() - began)
        try:
            running = [pool.submit(judge, copies, one, limits.get(one.room, 0.0)) for one in left]
            for number, done in enumerate(as_completed(running), len(outcomes) + 1):
                outcome = done.result()
                outcomes.append(outcome)
                print(f"[{number}/{len(drawn)}] {told(outcome)}", flush=True)
                if options.report:
                    with options.report.open("a", encoding="utf-8") as report:
                        report.write(json.dumps(asdict(outcome)) + "\n")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            copies.stop()
    text, reached = summary(outcomes)
    print(text)
    return int(not reached)


if __name__ == "__main__":
    sys.exit(main())
