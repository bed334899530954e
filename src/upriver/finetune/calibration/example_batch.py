"""Make a micro-batch to capture a model with."""

from __future__ import annotations

import torch
from torch import nn

from upriver.engine.engine import Engine
from upriver.engine.read import read_samples
from upriver.finetune.options import JobOptions
from upriver.pipeline import Dataset


def example_of(model: nn.Module, dataset: Dataset, options: JobOptions) -> torch.Tensor:
    """Return a micro-batch of the right shape and type, on the model's device.

    A micro-batch of integers holds real samples: random ones could be out of an embedding's range.
    """
    device = next(model.parameters(), torch.empty(0, dtype=torch.uint8, device="cpu")).device
    spec = dataset.chain.output_spec()
    if spec is None:
        example = _real_example(dataset, options)
        spec = (example.dtype, tuple(example.shape[1:]))
        if not example.is_floating_point():
            return example.to(device)
    dtype, shape = spec
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn((options.micro_batch, *shape), generator=generator, dtype=torch.float32, device="cpu")
        .to(dtype)
        .to(device)
    )


def _real_example(dataset: Dataset, options: JobOptions) -> torch.Tensor:
    """Return the first samples of the job, repeated if they are fewer than a micro-batch."""
    ids = list(options.rows[: options.micro_batch])
    engine = Engine(chain=dataset.chain, program=None, micro_batch=len(ids))
    names = [ref.object for ref in dataset.locate(ids)]
    batch = engine.begin(
        read_samples(dataset, ids),
        ids,
        object_names=names,
        stop=0,
        seed=options.seed,
        epoch=0,
        on_bad_sample=options.sampling.on_bad_sample,
    )
    rows = batch.tensors[0]
    return torch.cat([rows] * -(-options.micro_batch // len(ids)))[: options.micro_batch]
