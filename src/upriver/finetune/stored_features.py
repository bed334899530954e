"""Use the rows that servers keep in the store: which samples have one, and whether they are right."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from upriver.errors import UpriverError
from upriver.features import Row
from upriver.features.kept import same_row
from upriver.finetune.calibration.server_gate import JobRequirements
from upriver.protocol import DEFAULT_CAPS, KEPT
from upriver.types import MicroBatch

if TYPE_CHECKING:
    from upriver.rpc.client import ServerClient
    from upriver.rpc.server_pool import ServerPool

log = logging.getLogger("upriver")


class StoredFeatures:
    """Ask servers for the rows of a stretch, [start of the chain, cut).

    A server that fails costs rows, and raises nothing.

    Attributes:
        found: Samples that had a row at the last question; None before the first one.
        why_not: Reason why servers keep no more rows; empty while they do.
        lost: Error of the last question; empty if it was answered.
    """

    def __init__(self) -> None:
        self.found: int | None = None
        self.why_not = self.lost = ""
        self._trusted: set[tuple[str, int, int | None]] = set()

    @property
    def remark(self) -> str:
        """Return in words what servers keep, for the plan; empty before the first question."""
        if self.lost:
            return f"features near the data are not used in this pass: {self.lost}"
        full = f"; no more are kept: {self.why_not}" if self.why_not else ""
        there = f"features kept near the data when this pass began: of {self.found} samples"
        return "" if self.found is None else there + full

    def find(
        self, pool: ServerPool, question: JobRequirements, ids: Sequence[int], *, cut: int, epoch: int
    ) -> frozenset[int]:
        """Return the samples whose rows a server has."""
        size = question.program.micro_batch
        most = size * min(DEFAULT_CAPS.micro_batches, DEFAULT_CAPS.samples // size)
        found = set[int]()
        for client in _clients(pool)[:1]:  # the others see the same store
            try:
                for at in range(0, len(ids), most):
                    some = _packed(ids[at : at + most], size)
                    answer = client.find_features(question.request(some, stop=cut, epoch=epoch, keep=True))
                    found.update(answer.ids)
                    self.why_not = answer.why_not
            except UpriverError as error:
                self.found, self.lost = 0, str(error)
                log.info("%s", self.remark)
                return frozenset()
            self.found, self.lost = len(found), ""
        return frozenset(found)

    def is_trusted(self, question: JobRequirements, *, cut: int, epoch: int) -> bool:
        """Return whether rows of the stretch were compared with rows computed here."""
        return _stretch(question, cut, epoch) in self._trusted

    def fetch(
        self, pool: ServerPool, question: JobRequirements, ids: Sequence[int], *, cut: int, epoch: int
    ) -> list[MicroBatch]:
        """Return micro-batches that a server answers from kept rows; none if no server answers.

        Raises:
            UpriverError: If a server fails.
        """
        request = question.request(
            _packed(ids, question.program.micro_batch), stop=cut, epoch=epoch, keep=True
        )
        answers = [answer for client in _clients(pool)[:1] for answer in client.run(request)]
        return [batch for batch, timings in answers if KEPT in timings.phases]

    def compare(
        self,
        pool: ServerPool,
        question: JobRequirements,
        *,
        kept: Mapping[int, Row],
        again: Mapping[int, Row],
        cut: int,
        epoch: int,
    ) -> bool:
        """Compare kept rows with the same rows computed here, and have all removed if any differs.

        Args:
            kept: Rows that came; some may be gone since they were found.

        Returns:
            Whether all came and are equal, so that they may be used.
        """
        if all(same_row(again[each], row) for each, row in kept.items()):
            if kept.keys() == again.keys():
                self._trusted.add(_stretch(question, cut, epoch))
            return kept.keys() == again.keys()
        log.warning("features near the data differ from those that are computed now: all of them are dropped")
        some = _packed(list(again), question.program.micro_batch)
        request = question.request(some, stop=cut, epoch=epoch, keep=True)
        for client in _clients(pool)[:1]:
            client.remove_features(request)
        self.found = 0
        return False


def _stretch(question: JobRequirements, cut: int, epoch: int) -> tuple[str, int, int | None]:
    """Return what tells stretches of a job apart: the view only if an input stage before the cut draws."""
    first_draw = question.dataset.chain.first_draw
    draws = first_draw is not None and first_draw < cut
    return question.dataset.digest, cut, epoch if draws else None


def _clients(pool: ServerPool) -> list[ServerClient]:
    return [cast("ServerClient", client) for client in pool.up]


def _packed(ids: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(ids[at : at + size]) for at in range(0, len(ids), size)]
