"""One request to a server: what crosses the cut goes up, what the network gives comes down."""

from __future__ import annotations

import io
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from upriver.errors import ProtocolError
from upriver.inference.costs import crossing_bytes
from upriver.program.capture.whole_model import CapturedModel
from upriver.protocol import RunRequest, encode, read_frame
from upriver.rpc.client import ServerClient
from upriver.rpc.server_verification import only
from upriver.types import MicroBatch, Timings

RECEIVE = "receive"
"""The phase in which what was sent arrives: the link's time, told by the server."""

QUEUE = "queue"
"""The phase in which others' work is waited for."""

ID_BITS = 32
"""Samples are named by numbers that hardly any other request has: whatever the reason that its answer comes
here, it is not taken."""

PACKED_BYTES = 4 << 20
"""Packed and unpacked to see what a byte takes: some milliseconds on a slow device."""

PACKINGS = 3
"""Of which the quickest counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """An answer.

    Attributes:
        tensors: What the network gives, on the device.
        timings: What the server says that it took.
        took_s: From the question to the answer's last byte.
        down_s: Of that, from the answer's first byte to its last.
        down_bytes: Of the answer, all that is not a tensor among them.
    """

    tensors: tuple[torch.Tensor, ...]
    timings: Timings
    took_s: float
    down_s: float = 0.0
    down_bytes: int = 0

    @property
    def server_s(self) -> float:
        """Of that, on the server: waiting there included."""
        phases = self.timings.phases
        return min(self.took_s, sum(seconds for name, seconds in phases.items() if name != RECEIVE))

    @property
    def link_s(self) -> float:
        """The rest: on the way, and packed or unpacked."""
        return self.took_s - self.server_s

    @property
    def up_s(self) -> float:
        """On the way until the answer begins to arrive."""
        return max(0.0, self.link_s - self.down_s)

    @property
    def beside_s(self) -> float:
        """On the server, beside its stages and the wait for others."""
        phases = self.timings.phases
        there = sum(seconds for name, seconds in phases.items() if name not in (RECEIVE, QUEUE))
        return min(self.took_s, max(0.0, there - sum(self.timings.stages.values())))


class Exchange:
    """A question; it is sent when its answer is waited for.

    Args:
        client: The server.
        captured: The network.
        cut: Where the device has stopped.
        tensors: What crosses there.
        process: That is to answer: the one that was let in.

    Attributes:
        sent_bytes: Of these.
    """

    def __init__(
        self,
        client: ServerClient,
        captured: CapturedModel,
        cut: int,
        tensors: Sequence[torch.Tensor],
        *,
        process: str,
    ) -> None:
        program = captured.program
        first = secrets.randbits(ID_BITS)
        ids = tuple(range(first, first + program.micro_batch))
        request = RunRequest(
            micro_batches=(ids,),
            start=cut,
            stop=program.num_stages,
            micro_batch=program.micro_batch,
            program=program.digest,
        )
        sent = MicroBatch(ids=ids, position=cut, tensors=tuple(tensor.cpu() for tensor in tensors))
        self.sent_bytes = crossing_bytes(program, cut)
        self._program, self._url = program, client.url
        self._answer = client.run(request, [sent], process=process)

    def finish(self, seconds: float) -> Finished:
        """Send it and wait for the answer.

        Raises:
            ServerUnavailable: If it is not there after so many seconds, or another process answers.
            ProtocolError: If it is not of the form that the network gives.
            UpriverError: Whatever else went wrong.
        """
        began = time.perf_counter()
        batch, timings = only(self._answer, seconds, url=self._url)
        took_s = time.perf_counter() - began
        down_bytes, down_s = self._answer.arrived
        return Finished(
            tensors=self._checked(batch.tensors),
            timings=timings,
            took_s=took_s,
            down_s=down_s,
            down_bytes=down_bytes,
        )

    def close(self) -> None:
        """Nobody wants the answer any more; from any thread."""
        self._answer.close()

    def _checked(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        got = [(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in tensors]
        given = self._program.live(self._program.num_stages)
        wanted = [(value.spec.dtype, tuple(value.spec.shape)) for value in given]
        if got != wanted:
            raise ProtocolError(
                f"{self._url}: the network gives {_described(wanted)}, and its answer has {_described(got)}"
            )
        return tuple(tensor.to(self._program.device) for tensor in tensors)


@cache
def packing() -> tuple[float, float]:
    """Seconds that a byte takes here to be packed for the way, and to be unpacked behind it.

    What a frame takes by itself is no part of them.
    """
    (encode_small_s, decode_small_s), (encode_s, decode_s) = (_packing_s(each) for each in (64, PACKED_BYTES))
    return (
        max(0.0, encode_s - encode_small_s) / PACKED_BYTES,
        max(0.0, decode_s - decode_small_s) / PACKED_BYTES,
    )


def _packing_s(num_bytes: int) -> tuple[float, float]:
    batch = MicroBatch(
        ids=(0,), position=0, tensors=(torch.zeros(1, num_bytes, dtype=torch.uint8, device="cpu"),)
    )
    packed, unpacked = [], []
    for _ in range(PACKINGS):
        began = time.perf_counter()
        parts = encode(batch)
        packed.append(time.perf_counter() - began)
        body = io.BytesIO(b"".join(parts))
        began = time.perf_counter()
        read_frame(body)
        unpacked.append(time.perf_counter() - began)
    return min(packed), min(unpacked)


def _described(forms: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{dtype} {shape}" for dtype, shape in forms[:4]) or "no tensor"
