"""Begin with rows that other jobs kept after an earlier freeze point, and compute only the rest."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from upriver.features import Row
from upriver.features.kept import KeptFeatures, PartName, RowsLost, same_row
from upriver.finetune.row_check import RowsOf
from upriver.pipeline import Dataset
from upriver.program.split.eager_prefix import EagerPrefix
from upriver.program.split.frozen_name import known_name
from upriver.program.split.split import Split
from upriver.program.split.tail import Tail
from upriver.text import error_text

log = logging.getLogger("upriver")


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierPoint:
    """The freeze point of another job, before this job's own.

    Attributes:
        boundary: Last module before it.
        name: Name of that job's frozen part.
        tail: Tail of this job's model after that point.
        prefix: Frozen part of this job.
    """

    boundary: str
    name: PartName
    tail: Tail
    prefix: EagerPrefix


def earlier_points(split: Split, digest: Callable[[Split], str]) -> Iterator[EarlierPoint]:
    """Yield the earlier freeze points of an outline after which jobs have kept rows.

    Args:
        digest: Returns the digest of an outline, as :func:`outline_digest`.
    """
    for other in split.earlier:
        name = known_name(digest(other))
        if name is not None and split.eager is not None and isinstance(other.tail, Tail):
            yield EarlierPoint(boundary=other.boundary, name=name, tail=other.tail, prefix=split.eager)


class EarlierRows:
    """Rows of some dataset and view that were kept after earlier freeze points.

    Args:
        points: Earlier freeze points, the last of them first.
        rows_of: Returns the rows of values at the job's own freeze point.
    """

    def __init__(
        self,
        kept: KeptFeatures,
        points: Sequence[EarlierPoint],
        dataset: Dataset,
        *,
        view: int | None,
        rows_of: RowsOf,
    ) -> None:
        self._kept, self._dataset, self._rows_of = kept, dataset, rows_of
        self._stretches = {
            point.boundary: (point, kept.stretch(dataset, position=None, view=view, part=point.name))
            for point in points
        }
        self._begins: dict[int, str] = {}

    def find(
        self, ids: Sequence[int], *, anew: Callable[[Sequence[frozenset[int]]], Mapping[int, Row]]
    ) -> frozenset[int]:
        """Return the samples that begin with such a row, after rows of some gave the right features.

        Args:
            anew: Computes features from samples themselves, of one sample at least in each of some groups.

        Raises:
            UpriverError: If those samples cannot be computed.
        """
        self._begins, missing = {}, list(ids)
        for boundary, (_, stretch) in self._stretches.items():
            found = stretch.find(self._dataset, missing)
            shards = stretch.unproven(self._dataset, list(found))
            if found and (not shards or self._is_right(boundary, anew(shards))):
                self._kept.proven = True  # those samples had other places, too
                self._begins |= dict.fromkeys(found, boundary)
                missing = [sample for sample in missing if sample not in found]
        if self._begins:
            log.info("%s", self.remark)
        return frozenset(self._begins)

    @property
    def remark(self) -> str:
        """Return in words how many samples begin with rows of other jobs, for the plan."""
        begun = Counter(self._begins.values())
        return "; ".join(
            f"{count} samples began with features that another job kept after {boundary!r}"
            for boundary, count in begun.items()
        )

    def compute(self, ids: Sequence[int]) -> dict[int, Row]:
        """Return the rows of samples at the job's own freeze point, from those that :meth:`find` named.

        Raises:
            RowsLost: If one of those cannot be read any more.
        """
        done: dict[int, Row] = {}
        for boundary in self._stretches:
            some = [sample for sample in dict.fromkeys(ids) if self._begins.get(sample) == boundary]
            done |= self._from(boundary, some)
        return done

    def _from(self, boundary: str, ids: Sequence[int]) -> dict[int, Row]:
        point, stretch = self._stretches[boundary]
        size, done = self._kept.micro_batch, dict[int, Row]()
        for at in range(0, len(ids), size):
            some = tuple(ids[at : at + size])
            rows = stretch.read(self._dataset, some)
            padding = [rows[0]] * (size - len(rows))  # every micro-batch has the same size
            values = point.prefix.run_rest(point.tail, point.tail.values.concatenate([*rows, *padding]))
            done |= self._rows_of(some, values)
        return done

    def _is_right(self, boundary: str, right: Mapping[int, Row]) -> bool:
        """Return whether kept rows give the features that were computed from the samples themselves."""
        try:
            got = self._from(boundary, list(right))
        except RowsLost:
            return False
        except Exception as error:  # the user's forward, on rows that may be wrong
            log.info("features kept after %r are not used: %s", boundary, error_text(error))
            return False
        if right and all(same_row(got[sample], row) for sample, row in right.items()):
            self._stretches[boundary][1].prove(self._dataset, list(right))
            return True
        log.warning("features kept after %r give others than are computed now: they are not used", boundary)
        return False
