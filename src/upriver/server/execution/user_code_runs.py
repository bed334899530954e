"""Describe requests for the user's own code to the front: their jobs, and their memory."""

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
"""Multiple of the largest answer so far: the samples, their batch, and the layout of that."""

MAX_KINDS = 1024
"""Number of datasets whose largest answers are remembered."""


class WorkloadKind(NamedTuple):
    """Identify what determines the time and size of samples, by the names that are known.

    Attributes:
        arguments: Digest of the arguments, which may be confidential.
        collate: Empty if samples stay apart.
    """

    name: str
    arguments: str
    collate: str

    @classmethod
    def of(cls, run: RunCode) -> WorkloadKind:
        """Return the kind of a micro-batch."""
        return cls(run.name, hashlib.sha256(run.arguments).hexdigest(), run.collate)


def code_run(asked: ResolvedRequest, code: CodeRef, index: int) -> RunCode:
    """Return the work of one micro-batch of a request, without the data sent along."""
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


class LargestAnswers:
    """Remember the largest answers by kind, so that the next request holds as much from the start.

    Args:
        least_bytes: Smallest footprint of a micro-batch, and its footprint if nothing is known.
    """

    def __init__(self, least_bytes: int) -> None:
        self._least_bytes = least_bytes
        self._largest: OrderedDict[WorkloadKind, int] = OrderedDict()

    def saw(self, kind: WorkloadKind, nbytes: int) -> None:
        """Record the bytes of an answer."""
        self._largest[kind] = max(nbytes, self._largest.get(kind, 0))
        self._largest.move_to_end(kind)
        if len(self._largest) > MAX_KINDS:
            self._largest.popitem(last=False)

    def bytes_of(self, asked: ResolvedRequest, code: CodeRef, *, most_bytes: int) -> int:
        """Return the memory of a request besides its body.

        An answer that turns out larger asks for the missing bytes then. So no remembered size refuses a
        request that would fit alone.

        Args:
            most_bytes: Bytes available to all requests together.
        """
        sent = max((sum(tensor.nbytes for tensor in batch.tensors) for batch in asked.batches), default=0)
        seen = self._largest.get(WorkloadKind.of(code_run(asked, code, 0)), 0)
        learned = ANSWER_BYTES + SEEN_FACTOR * seen + COPIES * sent
        return max(ANSWER_BYTES + self._least_bytes, min(learned, most_bytes - asked.body_nbytes))
