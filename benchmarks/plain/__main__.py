"""Check that the plain way is at least as fast as an ordinary PyTorch loop at its best.

Run ``python -m benchmarks.plain``; it writes ``results/plain.md`` and ``results/plain.png``. With ``--quick``
it only shows that it works.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness.code_version import commit
from benchmarks.harness.measuring import confine, interleave, let_threads_sleep, machine, versions
from benchmarks.harness.records import Output, command_line
from benchmarks.plain.report import OURS, THEIRS, Row, plot, report
from benchmarks.plain.sides import Photos, Plain, SharedLink, Side, Task, Vanilla, say
from upriver.demo.data import demo_data
from upriver.demo.model import build_model, calibrate, freeze
from upriver.engine.engine import Engine
from upriver.engine.read import read_samples
from upriver.finetune.prefetch.local_source import LocalSource
from upriver.pipeline import Dataset, Decode, Normalize, RandomHorizontalFlip, RandomResizedCrop, index
from upriver.store import Store
from upriver.types import DEFAULT_MICRO_BATCH

MEASURED, SWEPT = 0, 1
"""Seeds of the photographs, the order and the random input stages."""

LINK_MBIT = 20.0
"""Rate of the demo's link."""


class Bench:
    """Make sides, and keep ours for the next setting, because its capture and proof take seconds."""

    def __init__(self, task: Task, options: argparse.Namespace, stack: contextlib.ExitStack) -> None:
        self._task, self._options, self._stack = task, options, stack
        self._kept: dict[tuple[float | None, int, int], Plain] = {}

    def measure(self, rate_mbit: float | None, cores: Sequence[int]) -> Row:
        """Sweep both sides on one seed, then let them take turns on the other, each at its best."""
        say(f"{rate_mbit or 'no'} Mbit/s, {len(cores)} cores")
        confine(cores)
        torch.set_num_threads(len(cores))
        candidates = self._candidates(rate_mbit * 1e6 / 8 if rate_mbit else None)
        sweep = {
            name: {label: self._once(make, label) for label, make in made.items()}
            for name, made in candidates.items()
        }
        best = {name: min(tried, key=tried.__getitem__) for name, tried in sweep.items()}
        ours, theirs = (candidates[name][best[name]](seed=MEASURED) for name in (OURS, THEIRS))
        turns = {
            OURS: partial(self._task.train, ours, OURS),
            THEIRS: partial(self._task.train, theirs, THEIRS),
        }
        epochs = interleave(turns, self._options.repeats)
        theirs.close()
        return Row(rate_mbit=rate_mbit, cores=len(cores), sweep=sweep, best=best, epochs=epochs)

    def _candidates(self, rate: float | None) -> dict[str, dict[str, Callable[..., Side]]]:
        options, steps = self._options, self._task.order(SWEPT, 0).num_steps
        ours = {f"{number} threads": partial(self._plain, rate, workers=number) for number in options.threads}
        theirs = {
            f"{number} workers" + (f", prefetch {ahead}" if number else ""): partial(
                Vanilla, self._task, rate, workers=number, prefetch=ahead
            )
            for number, ahead in grid(options.workers, options.prefetch, steps)
        }
        return {OURS: dict(ours), THEIRS: dict(theirs)}

    def _plain(self, rate: float | None, *, seed: int, workers: int) -> Plain:
        key = (rate, seed, workers)
        if key not in self._kept:
            side = Plain(self._task, rate, seed=seed, workers=workers)
            self._kept[key] = self._stack.enter_context(contextlib.closing(side))
        return self._kept[key]

    def _once(self, make: Callable[..., Side], label: str) -> float:
        side = make(seed=SWEPT)
        seconds = self._task.train(side, label, 0).wall_s
        if isinstance(side, Vanilla):
            side.close()
        return seconds


def grid(workers: Sequence[int], prefetch: Sequence[int], steps: int) -> list[tuple[int, int]]:
    """Return workers and prefetch factors, each with a different effect.

    Pairs that differ only in batches past the end of the epoch are left out.
    """
    distinct: dict[tuple[int, int], tuple[int, int]] = {}
    for number in workers:
        for ahead in prefetch:
            distinct.setdefault((number, min(number * ahead, steps)), (number, ahead))
    return list(distinct.values())


def photos(number: int, seed: int) -> Dataset:
    """Return the demo's photographs and input stages, after one read that puts them into memory."""
    data = demo_data(num_train=number, num_heldout=10, seed=seed)
    stages = (Decode(), RandomResizedCrop(224, scale=(0.5, 1.0)), RandomHorizontalFlip(), Normalize())
    found = index(Store.open(data.root.as_uri()), "train", stages=stages)
    read_samples(found, range(len(found)))
    return found


def same_pixels(data: Dataset) -> bool:
    """Return whether both sides give the network the same input, bit for bit."""
    ids = tuple(range(DEFAULT_MICRO_BATCH))
    engine = Engine(chain=data.chain, program=None, micro_batch=len(ids))
    batch, _ = LocalSource(dataset=data, engine=engine, seed=MEASURED, epoch=1)(ids)
    theirs = Photos(data, SharedLink(None), seed=MEASURED).__getitems__([(1, sample) for sample in ids])
    return torch.equal(batch.tensors[0], torch.stack([pixels for pixels, _, _ in theirs]))


def run(options: argparse.Namespace, picture: Path) -> str:
    """Measure every setting, and return the report."""
    began, load = time.perf_counter(), os.getloadavg()[0]
    cores = sorted(os.sched_getaffinity(0))[:2]
    facts = {"commit": commit(), "machine": machine(), "load": f"{load:.1f}", "rate": f"{LINK_MBIT:g}"}
    facts["versions"] = versions("torch", "numpy", "pillow", "obstore")
    data = {MEASURED: photos(options.images, MEASURED), SWEPT: photos(options.images, SWEPT)}
    if not same_pixels(data[MEASURED]):
        raise SystemExit("the two sides decode other pixels: nothing to compare")
    model, origin = build_model(len(data[MEASURED].classes), seed=MEASURED)
    calibrate(model, data[MEASURED], seed=MEASURED)
    freeze(model)
    task = Task(model=model, data=data, batch_size=options.batch_size)
    with contextlib.ExitStack() as stack:
        bench = Bench(task, options, stack)
        choices = [cores, cores[:1]] if len(cores) > 1 else [cores]
        settings = [(rate, chosen) for rate in (None, LINK_MBIT) for chosen in choices]
        rows = [bench.measure(*each) for each in (settings[-1:] if options.quick else settings)]
    num_bytes = len(data[MEASURED]) * data[MEASURED].stored_bytes
    work_s = min(row.spread(side, "cpu_s").median for row in rows for side in (OURS, THEIRS))
    facts |= {"weights": origin, "minutes": f"{(time.perf_counter() - began) / 60:.1f}"}
    plot(rows, work_s, num_bytes, picture)
    return report(rows, work_s, num_bytes, facts, options)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--images", type=int, default=96, help="images of an epoch, at least 16")
    parser.add_argument("--batch-size", type=int, default=32, help="samples of a training step")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 3], help="DataLoader's, to try")
    parser.add_argument("--prefetch", type=int, nargs="+", default=[2, 4], help="DataLoader's, to try")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 3], help="the plain way's, to try")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(images=16, batch_size=8, repeats=1, workers=[1], prefetch=[2], threads=[1])
    let_threads_sleep()
    # The sweep includes more workers than cores.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    output = Output.of(options, "plain")
    output.write(run(options, output.path(".png")))


if __name__ == "__main__":
    main()
