"""Send feature tensors over loopback with checksums, and compare them with a raw socket in the same run.

Run with ``python -m benchmarks.wire``. Each turn starts all processes anew and becomes a line of
``results/wire.jsonl``. The next start resumes there, and repeats turns of other code. ``--quick`` is a small
form that shows little, ``--report`` only writes ``results/wire.md`` from the existing turns. Rows:

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
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness.children import module_command, paths
from benchmarks.harness.code_version import code, commit
from benchmarks.harness.measuring import Spread, cpu_seconds, interleave, machine, versions
from benchmarks.harness.records import Deadline, Output, command_line, until_time_is_up
from benchmarks.harness.reports import table
from upriver.pipeline import LoadTensor, index
from upriver.protocol import DatasetRef, RunRequest
from upriver.rpc.client import ServerClient

RAW, FRAMES, SERVER = "raw socket", "frames", "server"
SHAPE = (64, 56, 56)
"""ResNet-18 after its first stage: 0.8 MB a sample, 12.8 MB a micro-batch of 16."""
MICRO_BATCH = 16
FRAME_BYTES = MICRO_BATCH * int(np.prod(SHAPE)) * 4
GOAL = 0.4


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The amount of measurement.

    Attributes:
        turns: Number of starts of all processes.
        repeats: Repeats of each row in a turn, interleaved.
        frames: Micro-batches of a repeat.
    """

    turns: int
    repeats: int
    frames: int


FULL = Setting(turns=5, repeats=9, frames=24)
QUICK = Setting(turns=1, repeats=2, frames=2)


# ------------------------------------------------------------------------------- the sending sides


def send_raw() -> None:
    """Send the requested number (one byte) of frames of zeros, again and again."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(json.dumps({"listening": listener.getsockname()[1]}), flush=True)
    payload = memoryview(bytes(FRAME_BYTES))
    connection, _ = listener.accept()
    while asked := connection.recv(1):
        for _ in range(asked[0]):
            connection.sendall(payload)


def send_frames() -> None:
    """Run the front's streaming code, fed from a slot as a worker would have left it."""
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
    from upriver.server.http.request_body import read_body
    from upriver.server.http.response_stream import FrameStream
    from upriver.server.ipc.shared_memory import SlotPool
    from upriver.server.service import bind
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
    """Run the whole server."""
    from upriver.server import ServerConfig, serve

    config = ServerConfig(stores={"default": uri}, port=0, threads=1)
    serve(config, on_listening=lambda found: print(json.dumps(dict(found)), flush=True))


# ------------------------------------------------------------------------------ the receiving sides


@contextmanager
def started(*arguments: str) -> Iterator[Any]:
    """Run this file in another process, and yield the reported address."""
    argv = [*map(str, module_command("wire", *arguments))]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, env=os.environ | paths())
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["listening"]
    finally:
        process.kill()
        process.wait()


def raw_receiver(port: int, frames: int) -> Callable[[], float]:
    """Return a function that times ``frames`` frames over one raw socket, in seconds."""
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
    """Return a function that times one answer, read by the client's transport, in seconds."""

    def receive() -> float:
        began = time.perf_counter()
        nbytes = sum(tensor.nbytes for batch, _ in client.run(request) for tensor in batch.tensors)
        seconds = time.perf_counter() - began
        if nbytes != FRAME_BYTES * len(request.micro_batches):
            raise ValueError(f"{nbytes} bytes came")
        return seconds

    return receive


def make_dataset(root: Path) -> tuple[str, str]:
    """Write ready feature tensors as class folders. Return URI and digest."""
    (root / "features").mkdir()
    for row in range(MICRO_BATCH):
        values = np.random.default_rng(row).standard_normal(SHAPE, dtype=np.float32)
        np.save(root / "features" / f"{row:02d}.npy", values)
    dataset = index(root.as_uri(), stages=[LoadTensor("npy")])
    dataset.publish()
    return root.as_uri(), dataset.digest


def measure(setting: Setting) -> dict[str, dict[str, list[float]]]:
    """Make one turn, interleaved.

    Returns:
        For each row bytes per second (``rates``), and processor seconds of both sides (``cpu_s``), which
        other work on the machine changes less.
    """
    every = tuple(range(MICRO_BATCH))
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        uri, digest = make_dataset(root)
        clients = [
            ServerClient(stack.enter_context(started("send-frames"))),
            ServerClient(stack.enter_context(started("send-server", uri))),
        ]
        for client in clients:
            stack.callback(client.close)
        while not clients[1].ready():
            time.sleep(0.1)
        sent = RunRequest(
            micro_batches=(every,) * setting.frames,
            start=-1,
            stop=0,
            micro_batch=MICRO_BATCH,
            dataset=DatasetRef(store="default", digest=digest),
        )
        receivers = {
            RAW: raw_receiver(stack.enter_context(started("send-raw")), setting.frames),
            FRAMES: frame_receiver(clients[0], sent),
            SERVER: frame_receiver(clients[1], sent),
        }

        def run(name: str) -> tuple[float, float]:
            before = cpu_seconds()
            rate = setting.frames * FRAME_BYTES / receivers[name]()
            return round(rate), round(cpu_seconds() - before, 3)

        runs = {name: lambda _, name=name: run(name) for name in receivers}
        found = {
            name: pairs[1:] for name, pairs in interleave(runs, setting.repeats + 1).items()
        }  # one repeat warms up
        return {
            kind: {name: [pair[at] for pair in pairs] for name, pairs in found.items()}
            for at, kind in enumerate(("rates", "cpu_s"))
        }


# --------------------------------------------------------------------------------------- the report


def shares(turn: Mapping[str, Any], row: str) -> list[float]:
    """Return a row's part of the raw socket's rate, repeat by repeat."""
    rates = turn["rates"]
    return [one / raw for one, raw in zip(rates[row], rates[RAW], strict=True)]


def verdict(turns: Sequence[Mapping[str, Any]]) -> str:
    """Judge the frames by the median of all repeats."""
    median = Spread.of(share for turn in turns for share in shares(turn, FRAMES)).median
    return f"**{'met' if median >= GOAL else 'missed'}** ({median:.2f})"


def report(turns: Sequence[Mapping[str, Any]], setting: Setting) -> str:
    """Return the report as Markdown.

    Args:
        turns: Records, at least one.
        setting: The planned measurement.
    """
    rows = []
    for row in (RAW, FRAMES, SERVER):
        rates = Spread.of(rate / 1e6 for turn in turns for rate in turn["rates"][row])
        of_raw = Spread.of(share for turn in turns for share in shares(turn, row))
        medians = (f"{Spread.of(shares(turn, row)).median:.2f}" for turn in turns)
        cpu_ms = Spread.of(1e3 * each / setting.frames for turn in turns for each in turn["cpu_s"][row])
        rows.append((row, rates.text(0), of_raw.text(), ", ".join(medians), cpu_ms.text(1)))
    left = setting.turns - len(turns)
    return TEMPLATE.format(
        goal=GOAL,
        verdict=verdict(turns) + (f", with {left} of {setting.turns} turns to come" if left else ""),
        table=table(
            (
                "row",
                "MB/s, median (lowest to highest)",
                "of the raw socket, median (lowest to highest)",
                "medians of the turns",
                "processor ms a frame, both sides",
            ),
            rows,
        ),
        turns=len(turns),
        repeats=setting.repeats,
        frames=setting.frames,
        megabytes=f"{FRAME_BYTES / 1e6:.1f}",
        commits=", ".join(dict.fromkeys(turn["commit"] for turn in turns)),
        machine=machine(),
        versions=versions("torch", "uvicorn", "xxhash"),
        loads=", ".join(f"{turn['load']:.1f}" for turn in turns),
    )


TEMPLATE = """# The wire: feature tensors over loopback

**Goal.** Micro-batches through the front's streaming code and the client's frame reader, checksums on, reach
at least {goal} of a raw socket's rate in the same repeat, by the median: {verdict}.

{table}

Turns: {turns}, each with processes of its own; {repeats} interleaved repeats after one to warm up, {frames}
frames of {megabytes} MB each. Shares are of the raw socket's rate in the same repeat.

- Commit {commits}; {machine}; {versions}.
- A shared machine: its load average was {loads} when the turns
  began (a turn itself makes about 2). The ranges are its noise, and the share within a repeat says more than
  the rates.
- `raw socket`: `sendall` of {megabytes} MB, received into one buffer that is used again. No checksum, no
  HTTP.
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

Run it again: `python -m benchmarks.wire`.
"""


def main() -> None:
    """Make the missing turns, and report all records."""
    parser = command_line(__doc__, resumable=True)
    parser.add_argument("send", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    match options.send:
        case ["send-raw"]:
            return send_raw()
        case ["send-frames"]:
            return send_frames()
        case ["send-server", uri]:
            return send_server(uri)
        case [other, *_]:
            parser.error(f"unknown argument {other!r}")
    torch.set_num_threads(1)
    setting, output = QUICK if options.quick else FULL, Output.of(options, "wire")
    records, deadline = output.records(), Deadline(options.minutes)
    with until_time_is_up():
        for key in (f"turn{number}" for number in range(setting.turns)):
            if options.report or records.rows.get(key, {}).get("code") == code():
                continue
            deadline.check()
            load = round(os.getloadavg()[0], 2)
            records.add(key, {"commit": commit(), "code": code(), "load": load, **measure(setting)})
            print(f"{key}: {verdict([records.rows[key]])}", file=sys.stderr, flush=True)
    turns = [records.rows[f"turn{number}"] for number in range(setting.turns) if f"turn{number}" in records]
    if not turns:
        sys.exit(f"error: no turn is recorded in {records.path}; run without --report first")
    output.write(report(turns, setting))


if __name__ == "__main__":
    main()
