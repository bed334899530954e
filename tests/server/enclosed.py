"""Run one worker in a sandbox as a server does, with this process in the place of the front."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
from PIL import Image

from tests.pipeline.making import encoded, npy, pixels
from upriver.pipeline import Decode, InputChain, LoadTensor, Resize
from upriver.protocol import DEFAULT_CAPS
from upriver.server.execution.worker_process import Job, WorkerHandle
from upriver.server.ipc.messages import Run, Setup
from upriver.server.sandbox.bubblewrap import NOT_SHUT_IN

SMALL = npy(pixels(8, 8))
"""Stored sample that needs hardly any memory."""


@contextmanager
def worker(enclosure=NOT_SHUT_IN):
    """Start a worker; yield it with its first message."""
    handle = WorkerHandle.start(threads=1, enclosure=enclosure)
    try:
        setup = Setup(threads=1, device="cpu", caps=DEFAULT_CAPS, memory_bytes=1 << 30)
        yield handle, handle.shake_hands(setup, job_timeout_s=60)
    finally:
        handle.kill()


def inner(pid):
    """Return the process that computes: under bubblewrap, the last of its descendants."""
    children = psutil.Process(pid).children(recursive=True)
    return children[-1].pid if children else pid


def give_back(handle, data=SMALL):
    """Read the stored bytes of a sample back from a worker."""
    return payload(handle.run(job(data, InputChain((LoadTensor("npy"),)), stop=-1)))


def job(data, chain, *, stop=0):
    """Describe a job that runs one sample from its stored bytes to ``stop``."""
    run = Run(
        program=None,
        micro_batch=1,
        rows=1,
        start=-len(chain.stages),
        stop=stop,
        ids=(0,),
        slot=0,
        chain=msgspec.json.encode(chain.to_json()),
        object_names=("a/0",),
    )
    return Job(run=run, program=None, parts=[memoryview(data)])


def large(side):
    """Describe a job that needs 7 bytes of memory for each of side x side pixels, with a tiny answer."""
    image = encoded(Image.new("RGB", (side, side), (200, 10, 90)), "PNG")
    return job(image, InputChain((Decode(), Resize(8))))


def payload(result):
    """Return the payload of a worker's answer."""
    ((_, found),) = result.frames
    return bytes(found)


def status(pid, name):
    """Return one field of the kernel's status of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return line.partition(":")[2].strip()
    raise LookupError(name)
