"""Time a round of adaptive admission with 1,000 waiting requests, and measure how full the memory gets.

Run with ``python -m benchmarks.admission_time``; it writes ``benchmarks/results/admission_time.md``.
Each repeat uses other requests, so that no result is cached.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.harness.code_version import commit
from benchmarks.harness.measuring import Spread, machine, versions
from benchmarks.harness.records import Output, command_line
from benchmarks.harness.reports import table
from upriver.control.batch_adaptation import Ask, Grant, adaptive, static

REQUESTS = 1000
REPEATS = 51
GOAL_MS = 1.0
SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True, slots=True)
class Queue:
    """Waiting requests, and the memory for them.

    Attributes:
        most: Requests that may be admitted; no limit if None.
    """

    asks: Sequence[Ask]
    free_bytes: int
    most: int | None = None


def ask(key: int, per_sample: int, *sizes: int) -> Ask:
    """Return a request for one of twenty programs, with two sizes as a range or more sizes as a list."""
    return Ask(
        key=key,
        fixed_bytes=1 << 20,
        bytes_per_sample=per_sample,
        program=key % 20,
        program_bytes=100 << 20,
        least=sizes[0],
        most=sizes[-1],
        sizes=sizes if len(sizes) > 2 else (),
    )


def least_bytes(asks: Sequence[Ask]) -> int:
    """Return the bytes of all requests at their smallest batches."""
    programs = {each.program: each.program_bytes for each in asks}
    requests = sum(each.fixed_bytes + each.smallest * each.bytes_per_sample for each in asks)
    return requests + sum(programs.values())


def paper(draw: random.Random, memory: float) -> Queue:
    """Return batches of 25 to 1000 samples, as in HAPI.

    Memory is a multiple of the smallest batches' need.
    """
    asks = [ask(key, draw.randrange(10**6, 10**8), 25, 1000) for key in range(REQUESTS)]
    return Queue(asks=asks, free_bytes=int(memory * least_bytes(asks)))


def sizes_on_offer(draw: random.Random) -> Queue:
    """Return requests with four sizes for each of twenty networks."""
    networks = [draw.randrange(10**6, 10**8) for _ in range(20)]
    asks = [ask(key, networks[key % 20], *SIZES) for key in range(REQUESTS)]
    return Queue(asks=asks, free_bytes=int(2 * least_bytes(asks)))


def alike(draw: random.Random) -> Queue:
    """Return requests of one network with four sizes."""
    per_sample = draw.randrange(10**6, 10**8)
    asks = [ask(key, per_sample, *SIZES) for key in range(REQUESTS)]
    return Queue(asks=asks, free_bytes=int(draw.uniform(1.0, 1.2) * least_bytes(asks)))


def coarse(draw: random.Random) -> Queue:
    """Return requests of one sample or two, with room for about two more.

    Few requests decide the result, and a greedy choice does not help.
    """
    asks = [ask(key, draw.randrange(10**7, 10**8), 1, 2) for key in range(REQUESTS)]
    return Queue(asks=asks, free_bytes=least_bytes(asks) + int(draw.uniform(1, 3) * 10**8))


def nearly_alike(draw: random.Random) -> Queue:
    """Return requests with a small batch or one a thousand times as large, all slightly different.

    Two to five large batches fit.
    """
    asks = [ask(key, 10**6 + draw.randrange(10**4), 1, 999, 1000) for key in range(REQUESTS)]
    return Queue(asks=asks, free_bytes=least_bytes(asks) + int(draw.uniform(2, 6) * 10**9))


def no_two_alike(draw: random.Random) -> Queue:
    """Return slightly different requests from one to fifty times as large: the hardest queue found."""
    asks = [ask(key, int(10 ** draw.uniform(5, 6.7)), 1, 999, 1000) for key in range(REQUESTS)]
    return Queue(asks=asks, free_bytes=least_bytes(asks) + int(draw.uniform(2, 6) * 10**9))


def capped(draw: random.Random) -> Queue:
    """Return a thousand waiting requests of which eight may be admitted."""
    queue = sizes_on_offer(draw)
    free_bytes = int(draw.uniform(1, 4) * least_bytes(queue.asks[:8]))
    return Queue(asks=queue.asks, free_bytes=free_bytes, most=8)


QUEUES: dict[str, Callable[[random.Random], Queue]] = {
    "batches of 25 to 1000, memory for all and as much again": lambda draw: paper(draw, 2.0),
    "the same, memory for a fifth of them": lambda draw: paper(draw, 0.2),
    "four sizes, twenty networks, memory for twice the smallest": sizes_on_offer,
    "four sizes, one network": alike,
    "one sample or two, room for few": coarse,
    "1, 999 or 1000 samples, nearly alike": nearly_alike,
    "1, 999 or 1000 samples, no two alike": no_two_alike,
    "four sizes, at most 8 admitted": capped,
}


def share(queue: Queue, grants: Sequence[Grant]) -> float:
    """Return the granted bytes over a bound: all of the memory, or the largest batches."""
    granted = queue.asks[: len(grants)]
    pairs = list(zip(granted, grants, strict=True))
    got = sum(grant.batch * each.bytes_per_sample for each, grant in pairs)
    most = sum((each.smallest + each.span) * each.bytes_per_sample for each in granted)
    other = sum(grant.nbytes - grant.batch * each.bytes_per_sample for each, grant in pairs)
    return got / min(most, queue.free_bytes - other)


def main() -> None:
    """Measure and report."""
    options = command_line(__doc__).parse_args()
    repeats = 1 if options.quick else REPEATS
    taken: dict[str, list[float]] = {name: [] for name in QUEUES}
    static_ms: dict[str, list[float]] = {name: [] for name in QUEUES}
    shares: dict[str, list[float]] = {name: [] for name in QUEUES}
    admitted: dict[str, list[int]] = {name: [] for name in QUEUES}
    for repeat in range(repeats + 1):
        for name, make in QUEUES.items():
            queue = make(random.Random(f"{name} {repeat}"))
            began = time.perf_counter()
            grants = adaptive(queue.asks, queue.free_bytes, most=queue.most)
            between = time.perf_counter()
            static(queue.asks, queue.free_bytes, most=queue.most)
            ended = time.perf_counter()
            if repeat:  # the first warms up
                taken[name].append(1e3 * (between - began))
                static_ms[name].append(1e3 * (ended - between))
                shares[name].append(share(queue, grants))
                admitted[name].append(len(grants))
    rows = []
    for name, times in taken.items():
        spread = Spread.of(times)
        rows.append(
            (
                name,
                spread.text(),
                Spread.of(static_ms[name]).text(),
                Spread.of(admitted[name]).text(0),
                f"{100 * min(shares[name]):.2f} %",
                "met" if spread.median < GOAL_MS else "missed",
            )
        )
    header = (
        "requests",
        "ms a round",
        "`static`, ms",
        "admitted",
        "memory used, at least",
        f"< {GOAL_MS:g} ms",
    )
    text = f"""# Adaptive admission of {REQUESTS:,} requests

**Claim.** Problem (1) of HAPI (2022) is solved to within 1 % in less than {GOAL_MS:g} ms for {REQUESTS:,}
requests. The paper reports 25 ms a run.

{table(header, rows)}

- {repeats} random queues of each kind, kinds in turn, after one to warm up; the whole call, from the
  requests to the grants. They are for twenty programs of 100 MB. An `Ask` is made when a request comes, and
  not in this time.
- "Memory used" is bytes of samples over what is left for them, or over all that the largest batches would
  take, whichever is less: a bound, which need not be reachable where few large requests decide. The 1 % is
  proven in `src/upriver/control/batch_adaptation.py`, and held against brute force and a solver in
  `tests/control/test_batch_adaptation.py`.
- Commit {commit()}; {machine()}; {versions("numpy")}.

Run it again: `python -m benchmarks.admission_time`.
"""
    Output.of(options, "admission_time").write(text)


if __name__ == "__main__":
    main()
