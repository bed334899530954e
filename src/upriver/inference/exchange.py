"""Exchange one request with a server: send what crosses the cut, receive the network's output."""

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
"""Phase in which the sent bytes arrive: the link's time, reported by the server."""

QUEUE = "queue"
"""Phase in which the request waits for other requests."""

ID_BITS = 32
"""Random bits of sample numbers, which hardly any other request shares: a stray answer is not accepted."""

PACKED_BYTES = 4 << 20
"""Bytes packed and unpacked to measure the time per byte: some milliseconds on a slow device."""

PACKINGS = 3
"""Repetitions; the quickest counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeResult:
    """The answer to a request.

    Attributes:
        tensors: Output of the network, on the device.
        timings: Times that the server reports.
        took_s: From the request to the answer's last byte.
        down_s: From the answer's first byte to its last, within ``took_s``.
        down_bytes: Size of the answer, including all that is not a tensor.
    """

    tensors: tuple[torch.Tensor, ...]
    timings: Timings
    took_s: float
    down_s: float = 0.0
    down_bytes: int = 0

    @property
    def server_s(self) -> float:
        """Seconds of the request on the server, including the wait in its queue."""
        phases = self.timings.phases
        return min(self.took_s, sum(seconds for name, seconds in phases.items() if name != RECEIVE))

    @property
    def link_s(self) -> float:
        """Remaining seconds: transfer, packing and unpacking."""
        return self.took_s - self.server_s

    @property
    def up_s(self) -> float:
        """Seconds of transfer until the answer begins to arrive."""
        return max(0.0, self.link_s - self.down_s)

    @property
    def beside_s(self) -> float:
        """Seconds on the server apart from its stages and its queue."""
        phases = self.timings.phases
        there = sum(seconds for name, seconds in phases.items() if name not in (RECEIVE, QUEUE))
        return min(self.took_s, max(0.0, there - sum(self.timings.stages.values())))


class Exchange:
    """A request to a server; `finish` sends it.

    Args:
        tensors: Tensors that cross the cut.
        process: Server process that must answer: the one that passed the check.

    Attributes:
        sent_bytes: Size of the crossing tensors.
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

    def finish(self, seconds: float) -> ExchangeResult:
        """Send the request and wait for the answer.

        Raises:
            ServerUnavailable: If no answer arrives within ``seconds``, or another process answers.
            ProtocolError: If the answer does not have the form of the network's output.
            UpriverError: For any other failure.
        """
        began = time.perf_counter()
        batch, timings = only(self._answer, seconds, url=self._url)
        took_s = time.perf_counter() - began
        down_bytes, down_s = self._answer.arrived
        return ExchangeResult(
            tensors=self._checked(batch.tensors),
            timings=timings,
            took_s=took_s,
            down_s=down_s,
            down_bytes=down_bytes,
        )

    def close(self) -> None:
        """Cancel the request. May be called from any thread."""
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
    """Return the seconds per byte to pack and to unpack on this machine.

    The fixed cost of a frame is excluded.
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
