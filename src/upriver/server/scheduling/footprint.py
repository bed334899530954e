"""What a request takes of the server's memory: known before any of it is taken, and over-estimated.

And what the program that it names takes of a request: a number of samples, tensors of a type and shape.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from upriver.errors import ProtocolError
from upriver.pipeline import Dataset
from upriver.protocol import DEFAULT_CAPS, RunRequest
from upriver.server.ipc.messages import Weighed
from upriver.server.ipc.shared_memory import SealedFile
from upriver.server.tenants import Tenant
from upriver.types import MicroBatch

TAIL_BYTES = 2 << 20
"""Of an answer: while they wait for the socket the next micro-batch is computed. Some 20 ms at 1 Gbit/s, in
which its reader asks for more if it reads at all."""

COPIES = 3
"""Of a micro-batch's stored bytes: as the store gave them and as the worker reads them, while it computes,
and those of the next one, which are read meanwhile."""

UNSEEN = 8
"""Over stored bytes: images that are not brought to one size, since what these take is known only when they
are there. A JPEG is decoded to five times its bytes as a rule; should that not do, what is missing is asked
for before it is taken."""

DECODING_BYTES = 192 << 20
"""Each worker's own, for one image at a time while it is decoded and changed: a JPEG of 16 megapixels, say.
For a larger one it asks first, as only the image itself tells."""

FLOAT = 4
"""Pixels as a tensor, over their bytes."""

ANSWER_BYTES = 3 << 20
"""Of every request: the end of an answer that may wait for its reader (`TAIL_BYTES`), and what Python, HTTP
and the socket hold of it."""

GRAPH_FACTOR = 24
"""A graph in a worker's memory, as objects, over its bytes as JSON, at most."""

WEIGHED_BYTES = 1 << 20
"""Of graphs as JSON that a worker keeps as objects for the next question: of one network a client asks for
some cuts in a row. They count among what idle workers hold, so a larger graph is held for by itself."""

MAX_WEIGHED = 4096
"""Stretches whose weight is remembered: three numbers each."""

MAX_FORMS = MAX_WEIGHED
"""Positions of programs of which it is remembered what they take, as many as stretches: a graph that is read
for a request is read in the event loop, where all others wait."""

MAX_FORM_TENSORS = 65_536
"""Tensors that these take together: each is a type and a shape, some hundred bytes. One position may take a
thousand."""

END = -1
"""In place of a stretch's stop: the program's last stage, which the front does not know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRange:
    """Stages [start, stop) of a program; `END` as ``stop`` means all from there on."""

    key: str
    start: int
    stop: int


class Scales(Protocol):
    """Works out what a stretch takes: a worker does, for a graph is a stranger's."""

    async def weigh(self, graph: SealedFile, stretch: StageRange, tenant: Tenant) -> Weighed:
        """Its peak, and what crosses at its end; in the tenant's turn."""


class Weights:
    """What stretches of programs take; each is worked out once, however many ask.

    Args:
        scales: Works it out.
    """

    def __init__(self, scales: Scales) -> None:
        self._scales = scales
        self._known: OrderedDict[StageRange, Weighed] = OrderedDict()
        self._asked: dict[StageRange, asyncio.Task[Weighed]] = {}
        self._waiting: Counter[StageRange] = Counter()

    async def of(self, graph: SealedFile, stretch: StageRange, tenant: Tenant) -> Weighed:
        """What the stretch of a tenant's program takes.

        Raises:
            Overloaded: If there is no memory to work it out.
            UpriverError: If the graph is not sound, or has no such stages.
        """
        if stretch in self._known:
            self._known.move_to_end(stretch)
            return self._known[stretch]
        task = self._asked.get(stretch) or self._ask(graph, stretch, tenant)
        self._waiting[stretch] += 1
        try:
            # Shielded: others may wait for the same when this request is given up.
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
        """Then it need not be worked out any more."""
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
    """What a program takes at a position.

    Attributes:
        micro_batch: Samples of a run.
        count: How many tensors.
        tensors: Type and shape of each, up to the default of `Caps.tensors`: where an operator allows more in
            a frame, workers look at the others.
    """

    micro_batch: int
    count: int
    tensors: tuple[tuple[str, tuple[int, ...]], ...]

    def check_size(self, micro_batch: int) -> None:
        """Whether it was made for micro-batches of this size.

        Raises:
            ProtocolError: If it was not.
        """
        if self.micro_batch != micro_batch:
            raise ProtocolError(
                f"the program is made for micro-batches of {self.micro_batch}, not {micro_batch}"
            )

    def check_given(self, request: RunRequest, batches: Sequence[MicroBatch]) -> None:
        """Whether what a request comes with is what it takes there, as far as that is known before it runs.

        Raises:
            ProtocolError: If it is not.
        """
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
    """What programs take, as their graphs say: read here, once a worker has found them sound.

    Args:
        hold: Keeps so much memory for a tenant while a graph is read.
    """

    def __init__(self, hold: Callable[[int, Tenant], AbstractContextManager[object]]) -> None:
        self._hold = hold
        self._known: OrderedDict[tuple[str, int], PositionFootprint] = OrderedDict()
        self._num_tensors = 0

    def of(self, key: str, graph: SealedFile, position: int, tenant: Tenant) -> PositionFootprint:
        """What a tenant's program takes at a position that it has.

        Raises:
            Overloaded: If there is no memory to read so large a graph now.
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
    """What a sound graph takes at a position that it has."""
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
    """What a graph takes as objects, beyond what counts among what idle workers hold."""
    return GRAPH_FACTOR * max(0, graph.nbytes - WEIGHED_BYTES)


def program_bytes(nbytes: int, *, graph_nbytes: int, workers: int, copies: int = 1) -> int:
    """What a program takes that every worker has: its files once, its graph as objects in each.

    Args:
        nbytes: Of graph and weights file.
        graph_nbytes: Of the graph alone.
        workers: That may load it.
        copies: Of its weights: one where workers share it, one each on an accelerator.
    """
    return graph_nbytes + copies * (nbytes - graph_nbytes) + GRAPH_FACTOR * graph_nbytes * workers


def works_ahead(weighed: Weighed) -> bool:
    """Whether a request may have one answer ready while the one before it waits for its reader.

    Where an answer is no more than may wait anyway. A tenant's weight tells only if its next turn waits when
    its last one ends.
    """
    return weighed.out_bytes <= TAIL_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """What the largest micro-batch of a request takes before model stages.

    Attributes:
        stored_bytes: As it is stored.
        out_bytes: Where input stages leave it, with a row for each sample that it has room for; infinite
            where only the samples tell.
        unseen_bytes: The same as a rule, for those.
        working_bytes: What a stage has at once for one sample.
    """

    stored_bytes: int = 0
    out_bytes: float = 0.0
    unseen_bytes: int = 0
    working_bytes: int = 0

    def peak_bytes(self, joined: int, out_bytes: float) -> int:
        """At once: samples as they came, as they are done, these in one tensor or laid out, one in work."""
        return joined * self.stored_bytes + 2 * int(out_bytes) + self.working_bytes


def request_bytes(
    request: RunRequest,
    *,
    dataset: Dataset | None,
    weighed: Mapping[int, Weighed],
    batches: Sequence[MicroBatch] = (),
) -> dict[int, int]:
    """What a request takes beside its program, by the samples of one forward pass.

    Args:
        request: What is asked for.
        dataset: Where its samples come from; None where they came along.
        weighed: By samples of a forward pass, what its model stages take; empty where it asks for none.
        batches: What came along.
    """
    sizes = tuple(weighed) or (request.micro_batch,)
    given = Input() if dataset is None else input_of(request, dataset, batches)
    return {size: _one_size(size // request.micro_batch, given, weighed.get(size)) for size in sorted(sizes)}


def _one_size(joined: int, given: Input, weighed: Weighed | None) -> int:
    coming = COPIES * given.stored_bytes * joined + ANSWER_BYTES
    if weighed is None:
        out = given.out_bytes if math.isfinite(given.out_bytes) else given.unseen_bytes
        return coming + max(given.peak_bytes(1, out), 2 * UNSEEN * given.stored_bytes)
    # What goes into the model is part of its peak, so there is no more of it than that.
    before = given.peak_bytes(joined, min(joined * given.out_bytes, weighed.peak_bytes))
    # What was laid out for the reader lies beside what the run still holds, and beside the answer before it.
    return coming + max(before, weighed.peak_bytes) + weighed.out_bytes * (2 if works_ahead(weighed) else 1)


def input_of(request: RunRequest, dataset: Dataset, batches: Sequence[MicroBatch] = ()) -> Input:
    """What a request's micro-batches take; each number is that of the one where it is largest."""
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
    return Input(
        stored_bytes=largest,
        out_bytes=float(rows),
        unseen_bytes=largest * UNSEEN * (FLOAT if is_float else 1),
        working_bytes=int(working.max()),
    )
