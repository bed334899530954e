"""Decide whether a training repays the preparation of its split, and at which priority that may run."""

from __future__ import annotations

from dataclasses import dataclass

START_S = 8.0
"""Seconds of work that a preparation takes with any model: imports, capture, and the first plan."""

FORWARDS = 12
"""Micro-batches through the frozen part that take as long as the proofs and measurements of a preparation."""

TRACED_SAMPLES, COMPARED_SAMPLES = 7, 3
"""Samples that an outline runs through the model: five in traces and two in training, and three that it
compares with the whole model unless an earlier job has done so."""

REPAID = 2
"""Times of its own work that a preparation must leave of the training: servers at best halve the rest."""

SHARE = 0.05
"""Part of the training that a preparation at the higher priority may take."""

HIGH, LOW = 5, 15  # priorities
"""Niceness of a preparing process. It gets 25 % or 3 % of a core that the training wants, and all of an idle
one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Horizon:
    """Length of a training, in seconds of its frozen part on this machine.

    Attributes:
        epoch_s: Seconds of an epoch's micro-batches through the frozen part.
        preparation_s: Seconds of work of the preparation.
        epochs: Number of epochs in which the frozen part is computed; None if unknown.
    """

    epoch_s: float
    preparation_s: float
    epochs: int | None

    @classmethod
    def of(
        cls, outline_s: float, *, compared: bool, micro_batch: int, micro_batches: int, epochs: int | None
    ) -> Horizon:
        """Estimate the horizon from the seconds that the outline of a model took.

        Args:
            compared: Whether the outline was compared with the whole model.
            micro_batch: Samples of a micro-batch.
            micro_batches: Micro-batches of an epoch.
            epochs: As the attribute.
        """
        pace_s = outline_s / (TRACED_SAMPLES + COMPARED_SAMPLES * compared) * micro_batch
        return cls(epoch_s=micro_batches * pace_s, preparation_s=START_S + FORWARDS * pace_s, epochs=epochs)

    @property
    def too_short(self) -> str:
        """Reason why the preparation cannot be repaid; empty if it can, or if the length is unknown."""
        if self.epochs is None or self.repaid_by(self.epoch_s):
            return ""
        return (
            f"preparing takes about {self.preparation_s:.0f} s of work, and the {self.epochs} "
            f"epoch{'s' * (self.epochs > 1)} of the frozen part about {self.epochs * self.epoch_s:.0f} s"
        )

    def repaid_by(self, epoch_s: float) -> bool:
        """Return whether the preparation pays if an epoch takes that long, its reads included."""
        return self.epochs is None or self.epochs * epoch_s > REPAID * self.preparation_s

    @property
    def niceness(self) -> int:
        """Niceness of the preparing process, by the length of the training, or of one epoch."""
        return HIGH if self.preparation_s <= SHARE * (self.epochs or 1) * self.epoch_s else LOW
