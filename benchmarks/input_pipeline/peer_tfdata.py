"""Run tf.data service with a local and a remote worker, as one of the peers of `input_pipeline`.

The setup is that of FastFlow's TF-DSLR (PVLDB 16(5), section 7.1): dispatcher and one worker on the worker's
host, another worker in the trainer's process, elements assigned one by one on request (``DYNAMIC``),
everything autotuned. The code of all ways makes the samples, through ``tf.numpy_function``. It names a Python
function by its number in the process. Both hosts build the same dataset, so that a number means the same.

The script runs in an environment with tensorflow-cpu; `bed.BORROW` adds PyTorch and the rest from the
trainer's.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf
import torch

from benchmarks.input_pipeline.model import EPOCHS, train_apart
from benchmarks.input_pipeline.workloads import Samples

PORT, WORKER_PORT, READY_PORT = 7400, 7401, 7402
LIMIT_S = 300.0
"""Most seconds until the other host is ready."""


def dataset(spec: Mapping[str, Any]) -> Any:
    """Return the batches of all epochs. A process that builds the dataset knows the functions in it."""
    samples = Samples(spec["root"], spec["workload"], spec["samples"])
    shape = samples[0][0].shape

    def make(index: Any) -> Any:
        value, target = samples[int(index)]
        return value.numpy(), target

    def made(index: Any) -> Any:
        value, target = tf.numpy_function(make, [index], (tf.float32, tf.int64))
        return tf.ensure_shape(value, shape), tf.ensure_shape(target, ())

    found = tf.data.Dataset.range(EPOCHS * spec["samples"])
    found = found.map(lambda number: number % spec["samples"])
    found = found.map(made, num_parallel_calls=tf.data.AUTOTUNE)
    return found.batch(spec["batch_size"]).prefetch(tf.data.AUTOTUNE)


def served(spec: Mapping[str, Any], dispatcher: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batches as the trainer reads them."""
    service = tf.data.experimental.service
    distribute = service.distribute(
        processing_mode=service.ShardingPolicy.DYNAMIC, service=dispatcher, compression=None
    )
    for values, targets in dataset(spec).apply(distribute).prefetch(tf.data.AUTOTUNE):
        yield torch.from_numpy(values.numpy()), torch.from_numpy(targets.numpy())


def worker(spec: Mapping[str, Any]) -> None:
    """Run the worker's host with dispatcher and worker, until it is ended."""
    service, address = tf.data.experimental.service, spec["addresses"]["storage"]
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=PORT))
    known = dataset(spec)
    remote = service.WorkerServer(_worker_config(f"{address}:{PORT}", address))
    with socket.create_server((address, READY_PORT)):  # the open port tells the trainer
        remote.join()
    del dispatcher, known


def trainer(spec: Mapping[str, Any]) -> None:
    """Run the trainer's host, and print the result as one JSON line."""
    torch.set_num_threads(1)
    address = spec["addresses"]["storage"]
    _wait_for((address, READY_PORT))
    dispatcher = f"{address}:{PORT}"
    local = tf.data.experimental.service.WorkerServer(
        _worker_config(dispatcher, spec["addresses"]["compute"])
    )
    found = train_apart(served(spec, f"grpc://{dispatcher}"), spec)
    print(json.dumps({**found, "version_of": f"tensorflow-cpu {tf.__version__}"}), flush=True)
    del local
    os._exit(0)  # its threads would wait for a dispatcher that lives on


def _worker_config(dispatcher: str, own: str) -> Any:
    return tf.data.experimental.service.WorkerConfig(
        dispatcher_address=dispatcher, worker_address=f"{own}:{WORKER_PORT}", port=WORKER_PORT
    )


def _wait_for(address: tuple[str, int]) -> None:
    until = time.monotonic() + LIMIT_S
    while True:
        try:
            socket.create_connection(address, timeout=1).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


if __name__ == "__main__":
    {"worker": worker, "trainer": trainer}[sys.argv[1]](json.loads(sys.argv[2]))
