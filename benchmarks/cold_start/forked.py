"""Load a model in a fork of a process that has imported it, where the end of its imports is the start."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cold_start import job, ways
from benchmarks.cold_start.bed import Local, for_amazon
from benchmarks.cold_start.models import MODELS, answer, made_up
from benchmarks.cold_start.settings import FORMS
from benchmarks.harness.children import Failed

if TYPE_CHECKING:
    import torch

Do = Callable[[Mapping[str, Any]], dict[str, Any]]

BATCH = 1
LIMIT_S, END_S = 120.0, 10.0


def publish(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Publish a model to the store in every form, and its right answer."""
    from safetensors.torch import save_file

    forms = sorted({FORMS[way] for way in spec["ways"]})
    writes = {**spec, **spec["writing"], "forms": forms, "calls": []}
    found = job.publish(writes, _nobody)
    if "model.tensors" in forms:
        job.tensors(writes, _nobody)
    model = MODELS[spec["model"]]
    right = answer(made_up(model).to(spec["device"]), _there(spec, model.inputs(BATCH)))
    save_file({"right": right.cpu().contiguous()}, _right_of(spec))
    return found


def _nobody(_: str) -> None:
    """Ignore a message."""


def _right_of(spec: Mapping[str, Any]) -> Path:
    """Return the path of the right answer."""
    return Path(spec["references"]) / f"{spec['model']}.right"


def run(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Run until the first answer. Return the times from the end of the imports on."""
    import torch
    from safetensors.torch import load_file

    model = MODELS[spec["model"]]
    model.prepare()
    loader, inputs = ways.loader_of(spec, model.build), model.inputs(BATCH)
    if spec["started"]:
        layer = torch.nn.Linear(8, 8, device=spec["device"])
        answer(layer, {"input": torch.ones(8, 8, device=spec["device"])}).cpu()
    began = time.perf_counter()
    network = loader()
    callable_at = time.perf_counter()
    found = answer(network, _there(spec, inputs)).cpu()
    answered = time.perf_counter()
    loader.finish()
    whole = time.perf_counter()
    right = load_file(_right_of(spec))["right"]
    return {
        "callable_s": callable_at - began,
        "answered_s": answered - began,
        "whole_s": whole - began,
        "device_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0,
        "equal": found.dtype == right.dtype and torch.equal(found, right),
    }


def _there(spec: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(spec["device"]) for name, value in inputs.items()}


def child(do: Do, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Execute `do` in a fork of this process, which has imported models and not touched a device.

    Raises:
        Failed: If the fork fails.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as scratch:
        process = context.Process(target=_forked, args=(do, {**spec, "scratch": scratch}, theirs))
        process.start()
        theirs.close()
        try:
            found: dict[str, Any] = ours.recv() if ours.poll(LIMIT_S) else {"failed": "no answer"}
        except EOFError:
            found = {"failed": "it ended"}
        finally:
            process.join(END_S)
            process.kill()
            process.join()
    if "failed" in found:
        raise Failed(found["failed"])
    return found


def _forked(do: Do, spec: Mapping[str, Any], answers: Connection) -> None:
    os.environ["UPRIVER_CACHE"] = spec["cache"]
    os.environ.update(for_amazon(spec["options"]))
    try:
        answers.send(do(spec))
    except Exception as error:
        answers.send({"failed": f"{type(error).__name__}: {error}".splitlines()[0]})


def spec_of(
    model: str, place: Local, scratch: str, ways: Sequence[str], *, device: str = "cpu"
) -> dict[str, Any]:
    """Return the specification for `publish`, or, with the way, its knob and ``started``, for `run`."""
    uri, options = place.writing
    return {
        "model": model,
        "folder": model,
        "references": scratch,
        "cache": f"{scratch}/{model}",
        "bucket": place.bucket,
        "options": dict(place.options),
        "writing": {"uri": uri, "options": options},
        "ways": list(ways),
        "assign": True,
        "device": device,
    }
