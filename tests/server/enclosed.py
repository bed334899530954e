"""One worker, shut in as a server's would be, and this process in the front's place."""

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
"""A stored sample that hardly takes any memory."""


@contextmanager
def worker(enclosure=NOT_SHUT_IN):
    """A worker that is ready, and what it said first."""
    handle = WorkerHandle.start(threads=1, enclosure=enclosure)
    try:
        setup = Setup(threads=1, device="cpu", caps=DEFAULT_CAPS, memory_bytes=1 << 30)
        yield handle, handle.shake_hands(setup, job_timeout_s=60)
    finally:
        handle.kill()


def inner(pid):
    """The process that computes: under bubblewrap the last of those that it has started."""
    children = psutil.Process(pid).children(recursive=True)
    return children[-1].pid if children else pid


def give_back(handle, data=SMALL):
    """Have the stored bytes of a sample back from a worker."""
    return payload(handle.run(job(data, InputChain((LoadTensor("npy"),)), stop=-1)))


def job(data, chain, *, stop=0):
    """Take one sample from its stored bytes to ``stop``."""
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
    """A job that takes 7 bytes of memory for each of side x side pixels, and gives next to nothing."""
    image = encoded(Image.new("RGB", (side, side), (200, 10, 90)), "PNG")
    return job(image, InputChain((Decode(), Resize(8))))


def payload(result):
    """What a worker answered."""
    ((_, found),) = result.frames
    return bytes(found)


def status(pid, name):
    """One field of what the kernel tells of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return line.partition(":")[2].strip()
    raise LookupError(name)
