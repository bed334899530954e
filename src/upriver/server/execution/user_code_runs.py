"""Requests for the user's own code, as the front sees them: what workers do for them, and what they take."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import NamedTuple

import msgspec

from upriver.protocol import CodeRef
from upriver.server.execution.run_context import ResolvedRequest
from upriver.server.ipc.messages import RunCode
from upriver.server.scheduling.footprint import ANSWER_BYTES, COPIES

SEEN_FACTOR = 3
"""Over the largest answer so far: samples, the batch that is made of them, and what is laid out of that."""

MAX_KINDS = 1024
"""Datasets whose largest answers are remembered."""


class WorkloadKind(NamedTuple):
    """What decides, as far as names tell, how long samples take and how large they are.

    Attributes:
        arguments: Their digest: they may hold what is nobody's business.
        collate: Empty where samples stay apart.
    """

    name: str
    arguments: str
    collate: str

    @classmethod
    def of(cls, run: RunCode) -> WorkloadKind:
        """That of a micro-batch."""
        return cls(run.name, hashlib.sha256(run.arguments).hexdigest(), run.collate)


def code_run(asked: ResolvedRequest, code: CodeRef, index: int) -> RunCode:
    """The work of one micro-batch of a request, without what was sent along."""
    request, collate = asked.request, code.collate
    return RunCode(
        name=code.name,
        arguments=msgspec.json.encode(code.arguments),
        start=request.start,
        ids=request.micro_batches[index],
        slot=0,
        seed=request.seed,
        epoch=request.epoch,
        collate="" if collate is None else collate.name,
        batch=0 if collate is None else collate.batches[index],
    )


class Answers:
    """The largest answers by kind, so that the next request holds as much from the start.

    Args:
        least_bytes: What a micro-batch takes where nothing is known, and at least.
    """

    def __init__(self, least_bytes: int) -> None:
        self._least_bytes = least_bytes
        self._largest: OrderedDict[WorkloadKind, int] = OrderedDict()

    def saw(self, kind: WorkloadKind, nbytes: int) -> None:
        """An answer had so many bytes."""
        self._largest[kind] = max(nbytes, self._largest.get(kind, 0))
        self._largest.move_to_end(kind)
        if len(self._largest) > MAX_KINDS:
            self._largest.popitem(last=False)

    def bytes_of(self, asked: ResolvedRequest, code: CodeRef, *, most_bytes: int) -> int:
        """What a request takes beside its body.

        A larger answer asks for what is missing when it is there, so what was learned turns none away that
        would fit if it were the only one.

        Args:
            asked: The request.
            code: What it names.
            most_bytes: What requests can have together.
        """
        sent = max((sum(tensor.nbytes for tensor in batch.tensors) for batch in asked.batches), default=0)
        seen = self._largest.get(WorkloadKind.of(code_run(asked, code, 0)), 0)
        learned = ANSWER_BYTES + SEEN_FACTOR * seen + COPIES * sent
        return max(ANSWER_BYTES + self._least_bytes, min(learned, most_bytes - asked.body_nbytes))
