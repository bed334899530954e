"""Run the demo: fine-tune over a slow link, plainly and near the data, and compare all results.

The trainer has one core and the server another. One token bucket emulates the link between trainer and
storage. Responses of the server and direct reads of the store share it, and it counts both.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from upriver.demo.bench import Bench, same_state
from upriver.demo.data import DemoData, demo_data
from upriver.demo.model import build_model, calibrate, freeze
from upriver.demo.result import DemoResult, TrainingRun
from upriver.demo.settings import DemoSettings, Watcher
from upriver.errors import StoreError
from upriver.pipeline import (
    Dataset,
    Decode,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    imagenet_eval,
    index,
)
from upriver.report.demo_plot import Curve, plot_demo
from upriver.rpc.local_server import EmbeddedServer
from upriver.store import Store
from upriver.types import DEFAULT_POLICY

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run_demo(settings: DemoSettings, watch: Watcher) -> DemoResult:
    """Run both trainings.

    Raises:
        UpriverError: If a prerequisite of the demo is missing or fails.
    """
    cores = _cores()
    with images_of(settings, watch) as data, _tiers(data.root, cores) as server:
        train, heldout = datasets(data.root)
        model, origin = build_model(len(data.classes), seed=settings.seed, weights=settings.weights)
        if origin == "random":
            calibrate(model, train, seed=settings.seed)
        freeze(model)
        _explain(watch, settings, train, origin, cores)
        bench = Bench(settings, watch, model, train, heldout, server)
        trials = bench.try_workers()
        workers = min(trials, key=lambda number: trials[number])
        watch.say(f"plain way: {workers} loader threads were fastest ({_listed(trials)})")
        plain, plain_model, plain_losses = bench.run("plain", policy="nosplit", num_workers=workers)
        near, near_model, near_losses = bench.run("near-data", policy=DEFAULT_POLICY, num_workers=workers)
    conditions = {
        "link_mbit": settings.link_mbit,
        "cores": cores,
        "weights": origin,
        "images": len(train),
        "heldout": len(heldout),
        "batch_size": settings.batch_size,
        "seed": settings.seed,
    }
    return DemoResult(
        plain=plain,
        near_data=near,
        identical=torch.equal(plain_losses, near_losses) and same_state(plain_model, near_model),
        num_classes=len(data.classes),
        conditions=conditions,
        worker_trials=trials,
    )


@contextlib.contextmanager
def images_of(settings: DemoSettings, watch: Watcher) -> Iterator[DemoData]:
    """Provide the images from the cache; if it cannot be written, from a temporary folder."""

    def made(cache: Path | None) -> DemoData:
        return demo_data(
            num_train=settings.images,
            num_heldout=settings.heldout,
            cache=cache,
            on_progress=lambda done, total: watch.advance("making images", done, total),
        )

    with contextlib.ExitStack() as stack:
        try:
            data = made(settings.cache)
        except StoreError as error:
            watch.say(f"data: {error}, so they are made for this run alone")
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="upriver-demo-"))
            data = made(Path(folder))
        yield data


def datasets(root: Path) -> tuple[Dataset, Dataset]:
    """Return training and held-out samples, indexed in place."""
    store = Store.open(root.as_uri())
    # At least half the area: a crop is already part of a photograph, and three epochs are few.
    augment = (Decode(), RandomResizedCrop(224, scale=(0.5, 1.0)), RandomHorizontalFlip(), Normalize())
    train = index(store, "train", stages=augment)
    heldout = index(store, "heldout", stages=imagenet_eval())
    return train, heldout


@contextlib.contextmanager
def _tiers(root: Path, cores: Mapping[str, int]) -> Iterator[EmbeddedServer]:
    """Run a server on its core and this process on the other one, and undo this afterwards.

    The server starts first, since a process confined to one core cannot give another one away.
    """
    threads, allowed = torch.get_num_threads(), _allowed()
    server_cores = {cores["server"]} if cores else None
    with EmbeddedServer.start({"default": root.as_uri()}, threads=1, workers=1, cpu=server_cores) as server:
        torch.set_num_threads(1)
        if cores:
            os.sched_setaffinity(0, {cores["trainer"]})
        try:
            yield server
        finally:
            torch.set_num_threads(threads)
            if cores:
                os.sched_setaffinity(0, allowed)


def _cores() -> dict[str, int]:
    """Return one core for each tier; empty with a single core, or without a way to pin."""
    allowed = sorted(_allowed())
    return {"trainer": allowed[0], "server": allowed[1]} if len(allowed) > 1 else {}


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _explain(
    watch: Watcher,
    settings: DemoSettings,
    train: Dataset,
    origin: str,
    cores: Mapping[str, int],
) -> None:
    """Report the real and the emulated parts."""
    watch.say(
        f"data: {len(train)} real photographs' crops, {train.stored_bytes / 1e3:.0f} kB each, "
        f"{len(train.classes)} scenes"
    )
    if origin == "random":
        watch.say(
            "weights: none at hand, so random ones (seeded), with batch statistics of a few training images; "
            "of what follows only the accuracy depends on it"
        )
    else:
        watch.say(f"weights: {origin}")
    if cores:
        watch.say(
            f"cores: trainer pinned to core {cores['trainer']}, server to core {cores['server']}, "
            "one compute thread each"
        )
    else:
        watch.say("cores: trainer and server share what there is (one core, or no way to pin)")
    watch.say(f"link: emulated, {settings.link_mbit:g} Mbit/s from storage to trainer, in this process")


def _listed(trials: Mapping[int, float]) -> str:
    return ", ".join(f"{workers}: {seconds:.1f} s" for workers, seconds in trials.items())


def picture(result: DemoResult) -> Figure:
    """Draw both runs, and their second epoch over time: the first one includes the start."""

    def curve(label: str, run: TrainingRun) -> Curve:
        drawn = min(2, len(run.busy))
        return Curve(
            label=label,
            epoch_s=run.epoch_s,
            epoch_bytes=run.epoch_bytes,
            losses=run.losses,
            busy=run.busy[drawn - 1],
            busy_epoch=drawn,
        )

    title = (
        f"Fine-tuning ResNet-18 over {result.conditions['link_mbit']:g} Mbit/s: plain, with images as stored "
        f"over the link, and near-data, with cut {result.near_data.cuts}"
    )
    return plot_demo(curve("plain", result.plain), curve("near-data", result.near_data), title=title)
