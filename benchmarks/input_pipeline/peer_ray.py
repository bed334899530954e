"""Run Ray Data on a cluster of two nodes, as one of the peers of `input_pipeline`.

Each host is a node with one CPU, and the trainer's is the head. One actor on each node makes batches by the
same code as all ways. The free actor makes the next batch, and the trainer iterates over them. The declared
CPU of a node is for these actors: training and Ray's own processes share the core with them, as the trainer's
loader processes do elsewhere.

The script runs in an environment with Ray Data; `bed.BORROW` adds PyTorch and the rest from the
trainer's.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.input_pipeline.model import EPOCHS, train_apart

PORT = 7500
LIMIT_S = 300.0
STORE_BYTES = 2**30
"""Bytes of each node's object store: more than four epochs' batches in flight are not needed."""

QUIET = {
    "RAY_AUTH_MODE": "disabled",  # these namespaces have no other users
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_DEDUP_LOGS": "0",
}


class Make:
    """Make the batches with the given numbers.

    Args:
        spec: The benchmark's.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        sys.path += spec["packages"]
        import torch

        from benchmarks.input_pipeline.workloads import Samples

        torch.set_num_threads(1)
        self._samples, self._count = Samples(spec["root"], spec["workload"], spec["samples"]), spec["samples"]

    def __call__(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values and targets of the indices."""
        made = [self._samples[int(index) % self._count] for index in rows["item"]]
        return {
            "values": np.stack([value.numpy() for value, _ in made]),
            "targets": np.array([target for _, target in made]),
        }


def start(spec: Mapping[str, Any], side: str, folder: str) -> subprocess.Popen[bytes]:
    """Start a node."""
    head = f"{spec['addresses']['compute']}:{PORT}"
    role = (
        ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}"]
        if side == "compute"
        else [f"--address={head}"]
    )
    return subprocess.Popen(
        [
            str(Path(sys.executable).with_name("ray")),
            "start",
            *role,
            f"--node-ip-address={spec['addresses'][side]}",
            "--num-cpus=1",
            f"--object-store-memory={STORE_BYTES}",
            "--block",
        ],
        env={**os.environ, **QUIET},
        stdout=sys.stderr,
    )


def worker(spec: Mapping[str, Any]) -> None:
    """Run the worker's host: a node that joins as soon as a head exists."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        start(spec, "storage", "").wait()
        time.sleep(1)


def batches(spec: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batches of the two nodes, as the trainer reads them."""
    import ray

    size, count = spec["batch_size"], EPOCHS * spec["samples"]
    indices = ray.data.from_items(list(range(count)), override_num_blocks=count // size)  # with no task
    made = indices.map_batches(
        Make,
        fn_constructor_args=(dict(spec),),
        batch_size=size,
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=1,
    )
    for rows in made.iter_batches(batch_size=size, prefetch_batches=2):
        yield torch.as_tensor(rows["values"]), torch.as_tensor(rows["targets"])


def trainer(spec: Mapping[str, Any]) -> None:
    """Run the trainer's host with the head and the training. Print the result as one JSON line."""
    os.environ.update(QUIET)
    import ray

    torch.set_num_threads(1)
    warnings.filterwarnings(
        "ignore", message="The given NumPy array is not writable"
    )  # nothing writes the array
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    head = start(spec, "compute", folder)
    try:
        _join(spec)
        found = train_apart(batches(spec), spec)
    finally:
        ray.shutdown()  # before its head ends, or it would end this process
        head.terminate()
        head.wait()
        _remove(folder)
    print(json.dumps({**found, "version_of": f"ray {ray.__version__}"}), flush=True)


def _remove(folder: str) -> None:
    """Remove the folder once the other host's node no longer writes its logs there."""
    until = time.monotonic() + LIMIT_S
    while True:
        try:
            return shutil.rmtree(folder)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def _join(spec: Mapping[str, Any]) -> None:
    """Wait until both nodes have joined."""
    import ray

    until, address = time.monotonic() + LIMIT_S, f"{spec['addresses']['compute']}:{PORT}"
    while not ray.is_initialized():
        try:
            ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
        except ConnectionError:
            if time.monotonic() > until:
                raise
            time.sleep(1)
    while sum(node["Alive"] for node in ray.nodes()) < 2:
        if time.monotonic() > until:
            raise TimeoutError("the other host's node has not joined")
        time.sleep(0.2)
    ray.data.DataContext.get_current().enable_progress_bars = False


if __name__ == "__main__":
    {"worker": worker, "trainer": trainer}[sys.argv[1]](json.loads(sys.argv[2]))
