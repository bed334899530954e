"""Reuse measurements of ``auto`` from an earlier job with the same model, pipeline and machines."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from upriver.dataloader.autotune.offload_tuner import TunerMeasurements
from upriver.dataloader.remote.provisioning import ProvisionedWorkers
from upriver.profile.throughput import Candidate
from upriver.profile.throughput_cache import (
    KnownThroughput,
    LocalResources,
    MetricsStore,
    StoreKey,
    model_key,
)

MAX_AGE_S = 30 * 86_400.0
"""Maximum age: like profiles, measurements are repeated after a month."""


class ThroughputRecall:
    """Load known measurements before the first batch, and save those that a job makes.

    If the number of workers was left open, each job measures their throughput, as it determines the number.

    Args:
        measured: Measurements to fill and to save.
        batch_size: Number of samples in a batch; None for single samples.

    Raises:
        ConfigError: If the model is neither a name nor a module, or the name is empty or too long.
    """

    def __init__(
        self,
        model: str | nn.Module,
        hired: ProvisionedWorkers,
        measured: TunerMeasurements,
        *,
        batch_size: int | None,
        num_workers: int,
    ) -> None:
        self._model, self._hired, self._measured = model_key(model), hired, measured
        self._batch_size, self._num_workers = batch_size, num_workers
        self._store, self._known = MetricsStore(), KnownThroughput()
        self._key: StoreKey | None = None
        self._quarters = 0

    def begin(self) -> None:
        """Load known measurements, once for each share of kept samples; workers have a task by now."""
        quarters = round(4 * self._measured.kept)
        if self._key is not None and quarters == self._quarters:
            return
        self._quarters = quarters
        kept = f" with {quarters}/4 kept" if quarters else ""
        self._key = StoreKey(
            model=self._model,
            pipeline=self._hired.pipeline + kept,
            batch_size=self._batch_size,
            local=LocalResources.here(self._num_workers),
            remote=None if self._hired.grows else self._hired.resources,
            sample=self._hired.form,
        )
        found, known = self._measured, self._store.load(self._key, max_age_s=MAX_AGE_S)
        found.gthp, found.lthp = known.gthp or found.gthp, known.lthp or found.lthp
        found.pcycle, found.pseconds = known.pcycle or found.pcycle, known.pseconds or found.pseconds
        for candidate in known.candidates:
            found.rthp[candidate.name], found.ocycles[candidate.name] = candidate.rthp, candidate.ocycle
        self._known = known

    def keep(self) -> None:
        """Save the measurements for later jobs.

        A candidate is left out if it delivered nothing, if some workers could not be asked for it, or if the
        training node made a part itself.
        """
        if self._key is None:
            return
        found = self._measured
        candidates = tuple(
            Candidate(name=name, rthp=rthp, ocycle=found.ocycles[name])
            for name, rthp in found.rthp.items()
            if rthp > 0 and (name not in found.timed or found.timed[name].exact)
        )
        known = KnownThroughput(
            gthp=found.gthp or None,
            lthp=found.lthp or None,
            pcycle=found.pcycle or None,
            pseconds=found.pseconds or None,
            candidates=() if self._hired.why_not or self._hired.grows else candidates,
        )
        self._store.save(self._key, known.beyond(self._known))
        self._known = replace(known, candidates=known.candidates or self._known.candidates)
