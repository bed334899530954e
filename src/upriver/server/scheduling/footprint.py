"""Estimate a request's memory on the server before it is allocated, as an upper bound.

Also read from the request's program which micro-batch, tensor types and shapes it expects.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from upriver.errors import ProtocolError
from upriver.protocol import DEFAULT_CAPS, RunRequest
from upriver.server.ipc.messages import Weighed
from upriver.server.ipc.shared_memory import SealedFile
from upriver.server.tenants import Tenant
from upriver.types import MicroBatch

if TYPE_CHECKING:
    from upriver.pipeline import Dataset

TAIL_BYTES = 2 << 20
"""Bytes of an answer that may wait for the socket while the next micro-batch is computed. Some 20 ms at 1
Gbit/s, in which a live reader asks for more."""

COPIES = 3
"""Copies of a micro-batch's stored bytes: from the store, in the worker, and of the next micro-batch. The
worker holds its copy while it computes, and the next one is read meanwhile."""

UNSEEN = 8
"""Multiple of the stored bytes for images of unknown size, which are not resized to one size. A JPEG usually
decodes to five times its bytes. If the estimate is too low, the worker asks for the missing bytes before it
allocates them."""

DECODING_BYTES = 192 << 20
"""Memory of each worker to decode and change one image at a time, say a JPEG of 16 megapixels. The worker
asks for more before a larger image, since only the image itself tells its size."""

FLOAT = 4
"""Multiple of the bytes of pixels that they need as a tensor."""

ANSWER_BYTES = 3 << 20
"""Memory of every request: `TAIL_BYTES`, and the copies in Python, HTTP and the socket."""

GRAPH_FACTOR = 24
"""Most bytes of a graph as objects in a worker, as a multiple of its bytes as JSON."""

WEIGHED_BYTES = 1 << 20
"""Bytes of graphs as JSON that a worker keeps as objects for the next question. A client asks for some cuts
of one network in a row. These bytes count as memory of idle workers. A larger graph gets memory of its
own."""

MAX_WEIGHED = 4096
"""Stage ranges whose footprints are remembered: three numbers each."""

MAX_FORMS = MAX_WEIGHED
"""Positions of programs whose footprints are remembered, as many as stage ranges. A graph is read in the
event loop, where all other requests wait."""

MAX_FORM_TENSORS = 65_536
"""Tensors that these positions may have together: each is a type and a shape, some hundred bytes. One
position may have a thousand."""

END = -1
"""Replaces the stop of a stage range: the program's last stage, which the front does not know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRange:
    """Select stages [start, stop) of a program; `END` as ``stop`` selects all from ``start`` on."""

    key: str
    start: int
    stop: int


class Scales(Protocol):
    """Compute the footprint of a stage range. A worker does so, since a graph may come from anyone."""

    async def weigh(self, graph: SealedFile, stretch: StageRange, tenant: Tenant) -> Weighed:
        """Return its peak, and the bytes that cross at its end; runs in the tenant's turn."""


class FootprintCache:
    """Cache the footprints of stage ranges; each is computed once, for all concurrent requests."""

    def __init__(self, scales: Scales) -> None:
        self._scales = scales
        self._known: OrderedDict[StageRange, Weighed] = OrderedDict()
        self._asked: dict[StageRange, asyncio.Task[Weighed]] = {}
        self._waiting: Counter[StageRange] = Counter()

    async def of(self, graph: SealedFile, stretch: StageRange, tenant: Tenant) -> Weighed:
        """Return the footprint of a stage range of a tenant's program.

        Raises:
            Overloaded: If there is no memory to compute it.
            UpriverError: If the graph is invalid, or has no such stages.
        """
        if stretch in self._known:
            self._known.move_to_end(stretch)
            return self._known[stretch]
        task = self._asked.get(stretch) or self._ask(graph, stretch, tenant)
        self._waiting[stretch] += 1
        try:
            # Shielded: other requests may wait for the same range when this request is cancelled.
            return await asyncio.shield(task)
        finally:
            self._waiting[stretch] -= 1
            if not self._waiting[stretch]:
                self._nobody_waits(stretch, task)

    def _ask(self, graph: SealedFile, stretch: StageRange, tenant: Tenant) -> asyncio.Task[Weighed]:
        async def weigh() -> Weighed:
            return await self._scales.weigh(graph, stretch, tenant)

        task = asyncio.get_running_loop().create_task(weigh())
        self._asked[stretch] = task
        task.add_done_callback(lambda done: self._settle(stretch, done))
        return task

    def _nobody_waits(self, stretch: StageRange, task: asyncio.Task[Weighed]) -> None:
        """Cancel a computation that no request waits for."""
        del self._waiting[stretch]
        if not task.done():
            del self._asked[stretch]
            task.cancel()

    def _settle(self, stretch: StageRange, task: asyncio.Task[Weighed]) -> None:
        if self._asked.get(stretch) is task:
            del self._asked[stretch]
        if task.cancelled() or task.exception() is not None:
            return
        self._known[stretch] = task.result()
        if len(self._known) > MAX_WEIGHED:
            self._known.popitem(last=False)


class _Spec(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]


class _Value(msgspec.Struct):
    name: str
    spec: _Spec


class _Node(msgspec.Struct):
    outputs: tuple[_Value | None, ...]


class _Stage(msgspec.Struct):
    live: tuple[str, ...]


class _Head(msgspec.Struct):
    micro_batch: int
    inputs: tuple[_Value, ...]


class _Body(msgspec.Struct):
    nodes: tuple[_Node, ...]
    stages: tuple[_Stage, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionFootprint:
    """Describe the tensors that a program expects at a position.

    Attributes:
        micro_batch: Samples of a run.
        count: Number of tensors.
        tensors: Type and shape of each, up to the default of `Caps.tensors`. If an operator allows more in a
            frame, workers check the others.
    """

    micro_batch: int
    count: int
    tensors: tuple[tuple[str, tuple[int, ...]], ...]

    def check_size(self, micro_batch: int) -> None:
        """Raise `ProtocolError` unless the program was made for micro-batches of this size."""
        if self.micro_batch != micro_batch:
            raise ProtocolError(
                f"the program is made for micro-batches of {self.micro_batch}, not {micro_batch}"
            )

    def check_given(self, request: RunRequest, batches: Sequence[MicroBatch]) -> None:
        """Raise `ProtocolError`, before a run, unless a request's inputs fit the program at this position."""
        if request.dataset is not None and self.count != 1:
            raise ProtocolError(f"a dataset gives one tensor, and the program takes {self.count}")
        for index, batch in enumerate(() if request.given else batches):
            where = f"data frame {index}: the program takes"
            if len(batch.tensors) != self.count:
                raise ProtocolError(
                    f"{where} {self.count} tensors at position {request.start}, got {len(batch.tensors)}"
                )
            for tensor, (dtype, shape) in zip(batch.tensors, self.tensors, strict=False):  # see `tensors`
                got = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                if got != (dtype, shape):
                    raise ProtocolError(
                        f"{where} {dtype} of shape {shape} at position {request.start}, "
                        f"got {got[0]} of {got[1]}"
                    )


class ProgramFootprints:
    """Cache the inputs that programs expect. Their graphs are read here, after a worker validated them.

    Args:
        hold: Holds this much memory for a tenant while a graph is read.
    """

    def __init__(self, hold: Callable[[int, Tenant], AbstractContextManager[object]]) -> None:
        self._hold = hold
        self._known: OrderedDict[tuple[str, int], PositionFootprint] = OrderedDict()
        self._num_tensors = 0

    def of(self, key: str, graph: SealedFile, position: int, tenant: Tenant) -> PositionFootprint:
        """Return the inputs of a tenant's program at an existing position.

        Raises:
            Overloaded: If there is no memory now to read a graph of this size.
        """
        found = self._known.get((key, position))
        if found is None:
            with self._hold(unheld_bytes(graph), tenant):
                found = self._known[key, position] = read_form(graph.view(), position)
            self._num_tensors += len(found.tensors)
            while len(self._known) > MAX_FORMS or (
                self._num_tensors > MAX_FORM_TENSORS and len(self._known) > 1
            ):
                _, oldest = self._known.popitem(last=False)
                self._num_tensors -= len(oldest.tensors)
        self._known.move_to_end((key, position))
        return found


def read_form(graph: bytes | memoryview, position: int) -> PositionFootprint:
    """Return the inputs of a valid graph at an existing position."""
    head = msgspec.json.decode(graph, type=_Head)
    values = {value.name: value for value in head.inputs}
    live: Sequence[str] = tuple(values)
    if position > 0:
        body = msgspec.json.decode(graph, type=_Body)
        live = body.stages[position - 1].live
        made = {value.name: value for node in body.nodes for value in node.outputs if value is not None}
        values |= made
    specs = [values[name].spec for name in live[: DEFAULT_CAPS.tensors]]
    return PositionFootprint(
        micro_batch=head.micro_batch,
        count=len(live),
        tensors=tuple((spec.dtype, spec.shape) for spec in specs),
    )


def unheld_bytes(graph: SealedFile) -> int:
    """Return the bytes of a graph as objects, beyond those that count as memory of idle workers."""
    return GRAPH_FACTOR * max(0, graph.nbytes - WEIGHED_BYTES)


def program_bytes(nbytes: int, *, graph_nbytes: int, workers: int, copies: int = 1) -> int:
    """Return the bytes of a program in all workers: its files once, its graph as objects in each.

    Args:
        nbytes: Bytes of graph and weights file.
        copies: Copies of its weights: one if workers share them, one each on an accelerator.
    """
    return graph_nbytes + copies * (nbytes - graph_nbytes) + GRAPH_FACTOR * graph_nbytes * workers


def works_ahead(weighed: Weighed) -> bool:
    """Return whether one answer may be ready while the one before waits for its reader.

    It may if the answer is no larger than `TAIL_BYTES`, which may wait anyway. A tenant's weight has an
    effect only if its next turn waits when the last one ends.
    """
    return weighed.out_bytes <= TAIL_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFootprint:
    """Describe the memory of a request's largest micro-batch before model stages.

    Attributes:
        out_bytes: Bytes after the input stages, with a row for each sample that it has room for; infinite if
            only the samples tell.
        unseen_bytes: Usual bytes in that case.
        working_bytes: Bytes that a stage needs at once for one sample.
    """

    stored_bytes: int = 0
    out_bytes: float = 0.0
    unseen_bytes: int = 0
    working_bytes: int = 0

    def peak_bytes(self, joined: int, out_bytes: float) -> int:
        """Return the peak: samples as stored, finished, and joined or laid out, plus one in work."""
        return joined * self.stored_bytes + 2 * int(out_bytes) + self.working_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptRowsFootprint:
    """Describe the memory of one micro-batch that is answered from kept rows.

    Attributes:
        fetched_bytes: Bytes that reading the rows fetches from the store.
        row_bytes: Bytes of the rows in memory.
        out_bytes: Bytes of the answer, with a row for each sample that it has room for.
    """

    fetched_bytes: int
    row_bytes: int
    out_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Return the peak: rows with the bytes that they come from, then with their batch and its copy."""
        return self.row_bytes + max(self.fetched_bytes, 2 * self.out_bytes)


def kept_rows_bytes(micro_batches: Sequence[KeptRowsFootprint]) -> int:
    """Return the bytes of a request whose rows are all kept: one answer is sent while the next is made."""
    most_sent = max(each.out_bytes for each in micro_batches)
    return ANSWER_BYTES + most_sent + max(each.peak_bytes for each in micro_batches)


def request_bytes(
    request: RunRequest,
    *,
    dataset: Dataset | None,
    weighed: Mapping[int, Weighed],
    batches: Sequence[MicroBatch] = (),
) -> dict[int, int]:
    """Return the bytes of a request besides its program, by samples of one forward pass.

    Args:
        dataset: Source of its samples; None if they were sent along.
        weighed: Footprint of its model stages, by samples of a forward pass; empty if it has none.
    """
    sizes = tuple(weighed) or (request.micro_batch,)
    given = InputFootprint() if dataset is None else input_of(request, dataset, batches)
    return {size: _one_size(size // request.micro_batch, given, weighed.get(size)) for size in sorted(sizes)}


def _one_size(joined: int, given: InputFootprint, weighed: Weighed | None) -> int:
    coming = COPIES * given.stored_bytes * joined + ANSWER_BYTES
    if weighed is None:
        out = given.out_bytes if math.isfinite(given.out_bytes) else given.unseen_bytes
        return coming + max(given.peak_bytes(1, out), 2 * UNSEEN * given.stored_bytes)
    # The model's inputs are part of its peak, so they are no larger.
    before = given.peak_bytes(joined, min(joined * given.out_bytes, weighed.peak_bytes))
    # An answer laid out for the reader coexists with the memory of the run, and with the answer before.
    return coming + max(before, weighed.peak_bytes) + weighed.out_bytes * (2 if works_ahead(weighed) else 1)


def input_of(request: RunRequest, dataset: Dataset, batches: Sequence[MicroBatch] = ()) -> InputFootprint:
    """Return the memory of a request's micro-batches; each number comes from the largest one."""
    counts = [len(ids) for ids in request.micro_batches]
    if request.given:
        stored = np.array([each.nbytes for batch in batches for each in batch.tensors], dtype=np.float64)
    else:
        stored = dataset.sizes([sample for ids in request.micro_batches for sample in ids]).astype(np.float64)
    stop = min(request.stop, 0)
    out, working = dataset.chain.most_bytes(stored, stop, start=request.start)
    starts = np.cumsum([0, *counts[:-1]])
    largest = int(np.add.reduceat(stored, starts).max())
    rows = request.micro_batch * out.max() if stop == 0 else np.add.reduceat(out, starts).max()
    is_float = stop > dataset.chain.start and dataset.chain.stage_at(stop).gives == "tensor"
    return InputFootprint(
        stored_bytes=largest,
        out_bytes=float(rows),
        unseen_bytes=largest * UNSEEN * (FLOAT if is_float else 1),
        working_bytes=int(working.max()),
    )
