"""Feature tensors over loopback, checksums on, beside a raw socket in the same run.

Run with ``python benchmarks/wire.py``; ``--write`` writes ``benchmarks/results/wire.md``. Rows:

* ``raw socket``: one process sends the same bytes with ``sendall``, the other receives into one buffer.
* ``frames``: the front's streaming code in uvicorn sends micro-batches out of shared memory; the client's
  transport reads them into fresh tensors and checks the checksum.
* ``server``: a real server reads ready tensors from a file store, its worker lays them out and computes the
  checksum.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from upriver.client.transport import ServerClient
from upriver.engine.fingerprint import fingerprint
from upriver.pipeline import LoadTensor, index
from upriver.protocol import DatasetRef, RunRequest

RESULT = Path(__file__).parent / "results" / "wire.md"
SHAPE = (64, 56, 56)
"""ResNet-18 after its first stage: 0.8 MB a sample, 12.8 MB a micro-batch of 16."""
MICRO_BATCH = 16
FRAME_BYTES = MICRO_BATCH * int(np.prod(SHAPE)) * 4
GOAL = 0.4


# ------------------------------------------------------------------------------- the sending sides


def send_raw() -> None:
    """Send as many frames of zeros as asked for (one byte), again and again."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(json.dumps({"listening": listener.getsockname()[1]}), flush=True)
    payload = memoryview(bytes(FRAME_BYTES))
    connection, _ = listener.accept()
    while asked := connection.recv(1):
        for _ in range(asked[0]):
            connection.sendall(payload)


def send_frames() -> None:
    """The front's streaming code, fed from a slot as a worker would have left it."""
    import asyncio
    import math
    from collections.abc import AsyncGenerator
    from contextlib import AsyncExitStack

    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from upriver.protocol import DEFAULT_CAPS, End, data_head, encode, lay_out
    from upriver.server.body import read_body
    from upriver.server.memory import SlotPool
    from upriver.server.service import bind
    from upriver.server.stream import FrameStream
    from upriver.types import MicroBatch, Timings

    pool = SlotPool()
    tensor = torch.randn(MICRO_BATCH, *SHAPE)

    async def answer(request: RunRequest) -> AsyncGenerator[bytes | memoryview]:
        for ids in request.micro_batches:
            batch = MicroBatch(ids=ids, position=request.stop, tensors=(tensor,))
            layout = lay_out(batch.tensors)
            slot = pool.take(layout.nbytes)
            view = pool.lend(slot, layout.nbytes)
            if slot.id not in written:  # in a server the worker does this, on its own core
                layout.write_into(view)
                written.add(slot.id)
            yield data_head(batch, layout, layout.checksum())
            yield view
            del view
            for buffer in encode(Timings()):
                yield buffer
        for buffer in encode(End()):
            yield buffer

    async def run(request: Request) -> Response:
        asked, _ = await read_body(request.stream(), DEFAULT_CAPS)
        return FrameStream(
            answer(asked),
            stack=AsyncExitStack(),
            stall_timeout_s=60,
            deadline=math.inf,
            on_sent=lambda _: None,
            on_end=lambda _: None,
        )

    written: set[int] = set()
    listener = bind("127.0.0.1", 0)
    app = Starlette(routes=[Route("/v1/run", run, methods=["POST"])])
    config = uvicorn.Config(
        app, loop="asyncio", http="httptools", log_config=None, access_log=False, lifespan="off"
    )
    print(json.dumps({"listening": f"http://127.0.0.1:{listener.getsockname()[1]}"}), flush=True)
    asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


def send_server(uri: str) -> None:
    """The whole server."""
    from upriver.server import ServerConfig, serve

    config = ServerConfig(stores={"default": uri}, port=0, threads=1)
    serve(config, on_listening=lambda found: print(json.dumps(dict(found)), flush=True))


# ------------------------------------------------------------------------------ the receiving sides


@contextmanager
def started(*arguments: str) -> Iterator[Any]:
    """This file in another process; gives what it says it listens on."""
    process = subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["listening"]
    finally:
        process.kill()
        process.wait()


def raw_receiver(port: int, frames: int) -> Callable[[], float]:
    """Seconds for ``frames`` frames over one raw socket."""
    connection = socket.create_connection(("127.0.0.1", port))
    buffer = memoryview(bytearray(FRAME_BYTES))

    def receive() -> float:
        began = time.perf_counter()
        connection.sendall(bytes([frames]))
        for _ in range(frames):
            done = 0
            while done < FRAME_BYTES:
                got = connection.recv_into(buffer[done:])
                if not got:
                    raise ConnectionError("the sender is gone")
                done += got
        return time.perf_counter() - began

    return receive


def frame_receiver(client: ServerClient, request: RunRequest) -> Callable[[], float]:
    """Seconds for one answer, read by the client's transport."""

    def receive() -> float:
        began = time.perf_counter()
        nbytes = sum(tensor.nbytes for batch, _ in client.run(request) for tensor in batch.tensors)
        seconds = time.perf_counter() - began
        if nbytes != FRAME_BYTES * len(request.micro_batches):
            raise ValueError(f"{nbytes} bytes came")
        return seconds

    return receive


def make_dataset(root: Path) -> tuple[str, str]:
    """Ready feature tensors as class folders; URI and digest."""
    (root / "features").mkdir()
    for row in range(MICRO_BATCH):
        values = np.random.default_rng(row).standard_normal(SHAPE, dtype=np.float32)
        np.save(root / "features" / f"{row:02d}.npy", values)
    dataset = index(root.as_uri(), stages=[LoadTensor("npy")])
    dataset.publish()
    return root.as_uri(), dataset.digest


def measure(repeats: int, frames: int) -> dict[str, list[float]]:
    """Bytes per second of each row, interleaved."""
    every = tuple(range(MICRO_BATCH))
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        uri, digest = make_dataset(root)
        clients = [
            ServerClient(stack.enter_context(started("send-frames"))),
            ServerClient(stack.enter_context(started("send-server", uri))),
        ]
        while not clients[1].ready():
            time.sleep(0.1)
        sent = RunRequest(
            micro_batches=(every,) * frames,
            start=-1,
            stop=0,
            micro_batch=MICRO_BATCH,
            dataset=DatasetRef(store="default", digest=digest),
        )
        rows = {
            "raw socket": raw_receiver(stack.enter_context(started("send-raw")), frames),
            "frames": frame_receiver(clients[0], sent),
            "server": frame_receiver(clients[1], sent),
        }
        for receive in rows.values():
            receive()  # warm
        rates: dict[str, list[float]] = {name: [] for name in rows}
        for _ in range(repeats):
            for name, receive in rows.items():
                rates[name].append(frames * FRAME_BYTES / receive())
        for client in clients:
            client.close()
        return rates


def report(rates: dict[str, list[float]], frames: int) -> str:
    """The rows as a table in Markdown."""
    raw = rates["raw socket"]
    lines = [
        "| row | MB/s, median | MB/s, range | of the raw socket, median | range |",
        "|---|---|---|---|---|",
    ]
    for name, each in rates.items():
        shares = [one / other for one, other in zip(each, raw, strict=True)]
        lines.append(f"| {name} | {spread([rate / 1e6 for rate in each], 0)} | {spread(shares, 2)} |")
    lines.append("")
    lines.append(
        f"{len(raw)} interleaved repeats after one to warm up, "
        f"{frames} frames of {FRAME_BYTES / 1e6:.1f} MB each;\n"
        "shares are of the raw socket's rate in the same repeat."
    )
    return "\n".join(lines)


def spread(values: list[float], digits: int) -> str:
    """Median and range, as two cells."""
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} | {least:.{digits}f} to {most:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("send", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--frames", type=int, default=24)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    match options.send:
        case ["send-raw"]:
            return send_raw()
        case ["send-frames"]:
            return send_frames()
        case ["send-server", uri]:
            return send_server(uri)
    torch.set_num_threads(1)
    table = report(measure(options.repeats, options.frames), options.frames)
    print(table)
    if options.write:
        RESULT.write_text(document(table), encoding="utf-8")


def document(table: str) -> str:
    """The whole report."""
    here = fingerprint()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()
    return TEMPLATE.format(
        table=table,
        goal=GOAL,
        commit=commit or "unknown",
        machine=f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {here['cpu_capability']}",
        load=f"{os.getloadavg()[0]:.1f}",
        versions=f"Python {platform.python_version()}, torch {here['torch']}, Linux",
    )


TEMPLATE = """# The wire: feature tensors over loopback

**Claim.** Micro-batches through the front's streaming code and the client's frame reader, checksums on, reach
at least {goal} of a raw socket's rate in the same run.

{table}

- Commit {commit}; {machine}; {versions}.
- A shared machine, load average {load} at the end of the run (the run itself makes about 2): the ranges are
  its noise, and the share within a repeat says more than the rates.
- `raw socket`: `sendall` of 12.8 MB, received into one buffer that is used again. No checksum, no HTTP.
- `frames`: uvicorn (asyncio, httptools) with the server's own `FrameStream`, chunks of 256 KiB, out of a
  shared-memory slot; the client's transport over `http.client`, read into fresh tensors, `xxh3_64` checked
  piece by piece. The sender computes the checksum of every frame, too; in a server the worker does, on its
  own core.
- `server`: all of `upriver serve` with one worker. The front reads 16 `.npy` files of 0.8 MB for each
  micro-batch and copies them to the worker; the worker parses, stacks and lays them out and computes the
  checksum. Three busy processes on two cores: this row shows the whole way, not the wire.

Where bytes are copied on the way of `frames`: once by uvicorn (which joins a chunk with its length) and twice
by the kernel, as for the raw socket; never by the client. What it does not show: a real network, TLS, several
clients at once.

Run it again: `python benchmarks/wire.py --write`.
"""

if __name__ == "__main__":
    main()
