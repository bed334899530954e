"""Run stored bytes to any position of the chain, one micro-batch at a time.

A near-data server runs this loop in its workers, and local training runs it in the training process. The code
is the same, so the answer does not depend on the place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, Protocol

import torch

from upriver.engine.clock import Clock
from upriver.errors import BadSample, ConfigError
from upriver.pipeline import InputChain, SampleError, stored_tensor
from upriver.types import MicroBatch

OnBadSample = Literal["fail", "skip"]


class ModelStages(Protocol):
    """The model stages that an engine runs: a captured program, or a model as it is written."""

    micro_batch: int

    @property
    def sample_form(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of a sample of the input."""

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        start: int,
        stop: int,
        *,
        on_stage: Callable[[int, float], None] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Run stages [start, stop) on one micro-batch."""


class Engine:
    """Run any stretch of one chain: a dataset's input stages, then a program's model stages.

    An engine keeps no state between calls, so any number of threads may use it.
    """

    def __init__(self, *, chain: InputChain | None, program: ModelStages | None, micro_batch: int) -> None:
        """Join a chain and a program.

        Args:
            chain: Input stages; None where only tensors arrive.
            program: Model stages; None where no request goes beyond position 0.
            micro_batch: Rows of every tensor at positions >= 0.

        Raises:
            ConfigError: If the program was made for another micro-batch.
        """
        if micro_batch < 1:
            raise ConfigError(f"micro_batch must be at least 1, got {micro_batch}")
        if program is not None and program.micro_batch != micro_batch:
            raise ConfigError(
                f"the program is made for micro-batches of {program.micro_batch}, not {micro_batch}"
            )
        self.chain = chain
        self.program = program
        self.micro_batch = micro_batch

    def begin(
        self,
        blobs: Sequence[bytes | memoryview],
        ids: Sequence[int],
        *,
        object_names: Sequence[str],
        stop: int,
        seed: int,
        epoch: int,
        on_bad_sample: OnBadSample = "fail",
        clock: Clock | None = None,
    ) -> MicroBatch:
        """Run the input stages on stored bytes, to the earlier of ``stop`` and the model's input.

        Args:
            ids: Rows of the samples in the dataset's index.
            object_names: The samples' objects, for errors.
            seed: Seed of random input stages.
            epoch: Epoch of random input stages.
            on_bad_sample: ``fail`` raises; ``skip`` marks the sample as skipped.

        Raises:
            BadSample: If a sample cannot be read, and ``on_bad_sample`` is ``fail``.
        """
        if self.chain is None:
            raise ConfigError("stored samples need a chain of input stages")
        stored = MicroBatch(
            ids=tuple(ids),
            position=self.chain.start,
            tensors=tuple(stored_tensor(blob) for blob in blobs),
        )
        return self.resume(
            stored,
            object_names=object_names,
            stop=min(stop, 0),
            seed=seed,
            epoch=epoch,
            on_bad_sample=on_bad_sample,
            clock=clock,
        )

    def resume(
        self,
        batch: MicroBatch,
        *,
        object_names: Sequence[str],
        stop: int,
        seed: int,
        epoch: int,
        on_bad_sample: OnBadSample = "fail",
        clock: Clock | None = None,
    ) -> MicroBatch:
        """Continue a micro-batch from its position, input stages included, to ``stop``.

        Raises:
            BadSample: As :meth:`begin`.
        """
        clock = clock or Clock()
        if batch.position < 0:
            batch = self._input(batch, object_names, min(stop, 0), seed, epoch, on_bad_sample, clock)
        return self.advance(batch, stop, clock) if stop > batch.position else batch

    def advance(self, batch: MicroBatch, stop: int, clock: Clock | None = None) -> MicroBatch:
        """Run model stages from the micro-batch's position (at least 0) to ``stop``."""
        clock = clock or Clock()
        if stop == batch.position:
            return batch
        if self.program is None:
            raise ConfigError(f"model stages up to {stop} need a program")
        with clock.phase("forward"):
            tensors = self.program.run(batch.tensors, batch.position, stop, on_stage=clock.stage)
        return replace(batch, position=stop, tensors=tensors)

    def _input(
        self,
        batch: MicroBatch,
        object_names: Sequence[str],
        stop: int,
        seed: int,
        epoch: int,
        on_bad_sample: OnBadSample,
        clock: Clock,
    ) -> MicroBatch:
        if self.chain is None:
            raise ConfigError("positions below 0 need a chain of input stages")
        values: list[torch.Tensor | None] = []
        form = self._sample_form()
        with clock.phase("input"):
            for sample, name, value in zip(batch.ids, object_names, batch.tensors, strict=True):
                if sample in batch.skipped:
                    values.append(None)
                    continue
                try:
                    done = self.chain.run(
                        value,
                        sample=sample,
                        epoch=epoch,
                        seed=seed,
                        start=batch.position,
                        stop=stop,
                        seconds=clock.stages,
                    )
                    if stop == 0:
                        form = form or (tuple(done.shape), done.dtype)
                        _check_form(done, form)
                    values.append(done)
                except SampleError as error:
                    if on_bad_sample == "fail":
                        raise BadSample(sample=sample, object_name=name, reason=str(error)) from None
                    values.append(None)
            tensors = (
                (self._collate(values, form),) if stop == 0 else tuple(_or_nothing(value) for value in values)
            )
        skipped = tuple(sample for sample, value in zip(batch.ids, values, strict=True) if value is None)
        return MicroBatch(ids=batch.ids, position=stop, tensors=tensors, skipped=skipped)

    def _sample_form(self) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Return shape and type of a finished sample, where the program or the chain declares them."""
        if self.program is not None:
            return self.program.sample_form
        declared = self.chain.output_spec() if self.chain is not None else None
        return None if declared is None else (tuple(declared[1]), declared[0])

    def _collate(
        self, values: Sequence[torch.Tensor | None], form: tuple[tuple[int, ...], torch.dtype] | None
    ) -> torch.Tensor:
        """Stack samples into rows of one tensor; missing and padding rows are zero."""
        if form is None:
            raise ConfigError(
                "no sample of a micro-batch could be read, and nothing else says what shape it has"
            )
        shape, dtype = form
        rows = torch.zeros((self.micro_batch, *shape), dtype=dtype, device="cpu")
        for row, value in zip(rows, values, strict=False):
            if value is not None:
                row.copy_(value)
        return rows


def _check_form(value: torch.Tensor, form: tuple[tuple[int, ...], torch.dtype]) -> None:
    if (tuple(value.shape), value.dtype) != form:
        got = f"{tuple(value.shape)} of {value.dtype}"
        raise SampleError(f"its tensor is {got}; {form[0]} of {form[1]} is needed")


def _or_nothing(value: torch.Tensor | None) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu") if value is None else value
