"""One request to a server: what crosses the cut goes up, what the network gives comes down."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from upriver.client.inference.costs import crossing_bytes
from upriver.client.servers import only
from upriver.client.transport import ServerClient
from upriver.errors import ProtocolError
from upriver.program.whole import Captured
from upriver.protocol import RunRequest
from upriver.types import MicroBatch, Timings

RECEIVE = "receive"
"""The phase in which what was sent arrives: the link's time, told by the server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """An answer.

    Attributes:
        tensors: What the network gives, on the device.
        timings: What the server says that it took.
        took_s: From the question to the answer's last byte.
    """

    tensors: tuple[torch.Tensor, ...]
    timings: Timings
    took_s: float

    @property
    def server_s(self) -> float:
        """Of that, on the server: waiting there included."""
        phases = self.timings.phases
        return min(self.took_s, sum(seconds for name, seconds in phases.items() if name != RECEIVE))

    @property
    def link_s(self) -> float:
        """The rest: on the way, and packed or unpacked."""
        return self.took_s - self.server_s


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
        captured: Captured,
        cut: int,
        tensors: Sequence[torch.Tensor],
        *,
        process: str,
    ) -> None:
        program = captured.program
        ids = tuple(range(program.micro_batch))
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
        return Finished(tensors=self._checked(batch.tensors), timings=timings, took_s=took_s)

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


def _described(forms: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{dtype} {shape}" for dtype, shape in forms[:4]) or "no tensor"
