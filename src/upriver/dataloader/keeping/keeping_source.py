"""Make samples in the training process from kept ones, and keep the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from upriver.dataloader.datasets.declared import Declared
from upriver.dataloader.keeping.kept_samples import KeptSamples
from upriver.types import DONE


class KeepingSource(Declared):
    """Samples of an `upriver.Dataset`, of which kept ones are not read.

    Samples that it returns may share memory with kept ones; batches never do.

    Args:
        plain: Makes the samples that are not kept, and all samples in other processes.
    """

    def __init__(self, plain: Declared, kept: KeptSamples) -> None:
        super().__init__(plain.dataset, plain.seed, views=plain.views)
        self.plain, self.kept = plain, kept

    def values(
        self,
        indices: Sequence[Any],
        *,
        epoch: int,
        samples: Sequence[int],
        start: int | None = None,
        stop: int = DONE,
        given: Sequence[Any] | None = None,
    ) -> list[torch.Tensor]:
        """Return samples at ``stop``; see `Declared.values`."""
        at = self.kept.position
        if given is not None or stop < at:
            return super().values(indices, epoch=epoch, samples=samples, start=start, stop=stop, given=given)
        rows = self.rows(indices)
        found = self.kept.find(list(dict.fromkeys(rows)), epoch)
        missing = [row for row in dict.fromkeys(rows) if row not in found]
        began_s = time.perf_counter()
        stored = dict(zip(missing, self.read(missing), strict=True))
        read_s = time.perf_counter() - began_s
        values, passed, seconds = self.pass_by(
            [found[row] if row in found else stored[row] for row in rows],
            samples=rows,
            epoch=epoch,
            at=at,
            stop=stop,
            there=[row in found for row in rows],
        )
        self.kept.keep(passed, epoch, seconds=read_s + seconds)
        return values

    def join(self, samples: list[Any], collate: Callable[[list[Any]], Any], *, epoch: int, batch: int) -> Any:
        """Collate samples into a batch; see `Declared.join`. PyTorch's own collating copies them."""
        if collate is not default_collate:
            samples = [(value.clone(), target) for value, target in samples]
        return super().join(samples, collate, epoch=epoch, batch=batch)
