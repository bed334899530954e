"""Run one process of `cold_start`: execute one action by a specification, report times, and end.

The process prints ``answered`` in a line of its own as soon as it has its first answer, by which the parent
stops its own clock. Everything else follows in one line of JSON. Times are of the monotonic clock, which all
processes of a machine share.

Actions
    run        a first answer, by one of `ways`
    baseline   the same up to the imports, without a model
    publish    a model into the store, in every form, and its right answers
    tensors    the same in tensorizer's format, in the peers' environment
    parts      times of download, load and execute alone; see `bound`
    after      forward passes of a loaded model and of two plain ones, in turns
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cold_start.models import MODELS, Inputs, answer, made_up
from benchmarks.cold_start.ways import STORED_PART_BYTES, downloaded, loader_of, pieces, removed, serialized

if TYPE_CHECKING:
    import torch
    from torch import nn

Spec = Mapping[str, Any]
Say = Callable[[str], None]

FORWARDS_S, FEWEST_FORWARDS, MOST_FORWARDS = 20.0, 10, 60
"""Seconds in which a loaded model's forward passes are timed, and the least and greatest number of them."""


def run(spec: Spec, say: Say) -> dict[str, Any]:
    """Compute a first answer, and return its times."""
    loader, inputs = _ready(spec)
    imported = time.monotonic()
    network = loader()
    callable_at = time.monotonic()
    found = answer(network, inputs)
    answered = time.monotonic()
    cpu = os.times()
    say("answered")
    loader.finish()
    whole = time.monotonic()
    return {
        **memory(),
        "imported": imported,
        "callable": callable_at,
        "answered": answered,
        "whole": whole,
        "cpu_s": round(cpu.user + cpu.system + cpu.children_user + cpu.children_system, 3),
        "equal": _is_right(spec, found),
    }


def baseline(spec: Spec, _: Say) -> dict[str, Any]:
    """Return the memory of the same process without a model: its peak, and its use after the imports."""
    _ready(spec)
    return {**memory(), "rss_bytes": _status("VmRSS")}


def _ready(spec: Spec) -> tuple[Any, Inputs]:
    """Import everything, and return the model and its inputs."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = MODELS[spec["model"]]
    model.prepare()
    return loader_of(spec, model.build), model.inputs(spec["batch"])


def memory() -> dict[str, int]:
    """Return the peak memory of this process so far."""
    return {"hwm_bytes": _status("VmHWM")}


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"no {field} in /proc/self/status")


def right_key(batch: int, threads: int) -> str:
    """Return the key of the right answer to a call. It holds the thread count, which may change low bits."""
    return f"b{batch}-t{threads}"


def _is_right(spec: Spec, found: torch.Tensor) -> bool:
    import torch
    from safetensors.torch import load_file

    right = load_file(Path(spec["references"]) / f"{spec['model']}.safetensors")
    wanted = right[right_key(spec["batch"], torch.get_num_threads())]
    return found.dtype == wanted.dtype and torch.equal(found, wanted)


# ---------------------------------------------------------------------------------------------- publishing


def publish(spec: Spec, _: Say) -> dict[str, Any]:
    """Publish a model to the store, and compute its right answers here for each batch size."""
    import torch
    from safetensors.torch import save_file, save_model

    from upriver.coldstart.format.access_order import publish_model
    from upriver.store import Store

    _in_large_parts()
    model = MODELS[spec["model"]]
    model.prepare()
    network = made_up(model)
    store, folder = Store.open(spec["uri"], options=spec["options"]), spec["folder"]
    if "upriver.safetensors" in spec["forms"]:
        publish_model(network, store, f"{folder}/upriver.safetensors", (), model.inputs(1))
    for form in spec["forms"]:
        path = Path(spec["scratch"]) / form
        if form == "plain.safetensors":
            save_model(network, str(path))
        elif form == "model.pt":
            torch.save(network.state_dict(), path)
        else:
            continue
        _put_file(store, f"{folder}/{form}", path)
    right = {}
    for batch, threads in spec["calls"]:
        torch.set_num_threads(threads)
        right[right_key(batch, threads)] = answer(network, model.inputs(batch)).contiguous()
    save_file(right, Path(spec["references"]) / f"{spec['model']}.safetensors")
    nbytes = sum(value.nbytes for value in _stored(network).values())
    return {"nbytes": nbytes, "tensors": len(_stored(network))}


def _in_large_parts() -> None:
    """Store large parts, so that the start of a read hardly matters: see `ways.STORED_PART_BYTES`."""
    from upriver.store import store

    store.STREAM_PART_BYTES = STORED_PART_BYTES


def _stored(network: nn.Module) -> dict[int, torch.Tensor]:
    """Return each tensor of the state dict once."""
    return {value.data_ptr(): value for value in network.state_dict().values()}


def _put_file(store: Any, key: str, path: Path) -> None:
    if store.uri.startswith("s3:"):
        store.put_stream(key, pieces(path))
    else:
        store.put(key, path.read_bytes())
    removed(path)


def tensors(spec: Spec, _: Say) -> dict[str, Any]:
    """Store a model in tensorizer's format."""
    from upriver.store import Store

    _in_large_parts()
    model = MODELS[spec["model"]]
    model.prepare()
    path = Path(spec["scratch"]) / "model.tensors"
    serialized(made_up(model), path)
    _put_file(Store.open(spec["uri"], options=spec["options"]), f"{spec['folder']}/model.tensors", path)
    return {}


# -------------------------------------------------------------------------------------- parts of the bound


def parts(spec: Spec, _: Say) -> dict[str, Any]:
    """Return the times of each stage alone, in this process and on its cores; see `bound`."""
    import torch
    from crc32c import crc32c

    from upriver.coldstart.format.checkpoint import find
    from upriver.coldstart.model.arrivals import Arrivals
    from upriver.coldstart.model.assignment import held, match
    from upriver.coldstart.model.weight_barrier import WeightBarrier
    from upriver.store import Store

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = MODELS[spec["model"]]
    model.prepare()
    network, inputs = model.build().eval(), model.inputs(spec["batch"])
    path = f"{spec['folder']}/upriver.safetensors"
    store = Store.open(f"s3://{spec['bucket']}", options=spec["options"])
    source = find(store, path)
    nbytes = max(placed.stop for placed in source.tensors)
    fresh = Store.open(f"s3://{spec['bucket']}", options=spec["options"])  # has no connection yet
    began = time.perf_counter()
    fresh.get_range(path, 0, 1)
    first_byte_s = time.perf_counter() - began
    began = time.perf_counter()
    data = downloaded(store, path, nbytes, spec["knob"])
    download_s = time.perf_counter() - began

    matched = match(network, source)
    view = memoryview(data.numpy().data)
    loaded = [torch.empty(targets[0].shape, dtype=targets[0].dtype) for targets in matched.targets]
    began = time.perf_counter()
    for placed, tensor in zip(matched.source.tensors, loaded, strict=True):
        piece = view[placed.start : placed.stop]
        for start in range(0, len(piece), source.chunk_bytes):
            crc32c(piece[start : start + source.chunk_bytes])
        if tensor.numel():
            memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)[:] = piece
    load_s = time.perf_counter() - began
    with torch.no_grad():
        for targets, tensor in zip(matched.targets, loaded, strict=True):
            for target in targets:
                target.copy_(tensor)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
    before_bytes = _status("VmRSS")
    began = time.perf_counter()
    found = answer(network, inputs)
    execute_s = time.perf_counter() - began
    call_bytes = _status("VmHWM") - before_bytes

    arrivals = Arrivals(len(loaded))
    for number in range(len(loaded)):
        arrivals.filled(number)
    gate = WeightBarrier(arrivals, lambda _: None)
    for number, tensor in held(matched):
        gate.hold(tensor, number)
    with gate.guarded():
        answer(network, inputs)
    ended = time.monotonic()
    first, last = min(gate.touched), max(gate.touched)
    sizes = [placed.stop - placed.start for placed in matched.source.tensors]
    return {
        "first_byte_s": first_byte_s,
        "download_s": max(0.0, download_s - first_byte_s),
        "load_s": load_s,
        "execute_s": execute_s,
        "call_bytes": call_bytes,
        "last_execute_s": ended - gate.touched[last],
        "needed_bytes": sum(sizes[: last + 1]),
        "object_bytes": nbytes,
        "first_bytes": sizes[first],
        "last_bytes": sizes[last],
        "equal": _is_right(spec, found),
    }


# ---------------------------------------------------------------------------------------------- afterwards


def after(spec: Spec, _: Say) -> dict[str, Any]:
    """Time forward passes in turns: of a model that arrived, and of two with copied weights."""
    import torch

    loader, inputs = _ready(spec)
    arrived = loader()
    equal = _is_right(spec, answer(arrived, inputs))
    loader.finish()
    state = arrived.state_dict()
    networks = {"arrived": arrived}
    for name in ("plain", "control"):
        networks[name] = MODELS[spec["model"]].build().eval()
        networks[name].load_state_dict(state)
        equal &= torch.equal(answer(networks[name], inputs), answer(arrived, inputs))
    began = time.perf_counter()
    answer(arrived, inputs)
    once_s = time.perf_counter() - began
    most = FEWEST_FORWARDS if spec["quick"] else MOST_FORWARDS
    count = int(min(most, max(FEWEST_FORWARDS, FORWARDS_S / len(networks) / once_s)))
    seconds: dict[str, list[float]] = {name: [] for name in networks}
    names = list(networks)
    for number in range(count):
        for name in names[number % 3 :] + names[: number % 3]:
            began = time.perf_counter()
            answer(networks[name], inputs)
            seconds[name].append(time.perf_counter() - began)
    return {"seconds": seconds, "equal": equal, "kind": type(arrived).__name__}


DOES: Mapping[str, Callable[[Spec, Say], dict[str, Any]]] = {
    "run": run,
    "baseline": baseline,
    "publish": publish,
    "tensors": tensors,
    "parts": parts,
    "after": after,
}


def main() -> None:
    """Execute the action of the only argument."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers

    def say(line: str) -> None:
        answers.write(line + "\n")
        answers.flush()

    spec = json.loads(sys.argv[1])
    say(json.dumps(DOES[spec["do"]](spec, say)))


if __name__ == "__main__":
    main()
