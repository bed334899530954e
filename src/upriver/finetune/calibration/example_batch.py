"""Make a micro-batch to capture a model with, or to call it once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from upriver.engine.engine import Engine, OnBadSample
from upriver.engine.read import read_samples
from upriver.errors import ConfigError
from upriver.finetune.options import JobOptions
from upriver.pipeline import Dataset

MOST_TRIED = 8
"""Micro-batches that are read before their samples count as unreadable: a store may hold millions."""


def example_of(model: nn.Module, dataset: Dataset, options: JobOptions) -> torch.Tensor:
    """Return a micro-batch of a job, on the model's device."""
    device = next(model.parameters(), torch.empty(0, dtype=torch.uint8, device="cpu")).device
    return example_batch(
        dataset,
        options.rows,
        micro_batch=options.micro_batch,
        seed=options.seed,
        on_bad_sample=options.sampling.on_bad_sample,
    ).to(device)


def example_batch(
    dataset: Dataset, rows: Sequence[int], *, micro_batch: int, seed: int, on_bad_sample: OnBadSample
) -> torch.Tensor:
    """Return a micro-batch of the right shape and type, on the CPU.

    The store is read only if the stages do not determine them. A micro-batch of integers then holds real
    samples: random ones could be out of an embedding's range.

    Raises:
        BadSample: If a sample is read, cannot pass a stage, and ``on_bad_sample`` is ``fail``.
        ConfigError: If none of the first rows can be read.
    """
    spec = dataset.chain.output_spec()
    if spec is None:
        example = _real_example(dataset, rows, micro_batch, seed, on_bad_sample)
        spec = (example.dtype, tuple(example.shape[1:]))
        if not example.is_floating_point():
            return example
    dtype, shape = spec
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((micro_batch, *shape), generator=generator, dtype=torch.float32, device="cpu")
    return values.to(dtype)


def _real_example(
    dataset: Dataset, rows: Sequence[int], micro_batch: int, seed: int, on_bad_sample: OnBadSample
) -> torch.Tensor:
    """Return the first micro-batch of which any sample can be read, repeated if it has fewer samples."""
    tried = rows[: MOST_TRIED * micro_batch]
    for first in range(0, len(tried), micro_batch):
        ids = list(tried[first : first + micro_batch])
        engine = Engine(chain=dataset.chain, program=None, micro_batch=len(ids))
        data, names = read_samples(dataset, ids), [ref.object for ref in dataset.locate(ids)]
        try:
            batch = engine.begin(
                data, ids, object_names=names, stop=0, seed=seed, epoch=0, on_bad_sample=on_bad_sample
            )
        except ConfigError:
            if on_bad_sample == "fail":
                raise
            continue  # none of these can be read
        return torch.cat([batch.tensors[0]] * -(-micro_batch // len(ids)))[:micro_batch]
    raise ConfigError(
        f"none of the first {len(tried)} samples could be read, and nothing else says what shape they have"
    )
