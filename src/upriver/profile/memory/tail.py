"""Estimate the memory of training the tail of a split model, for a profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from upriver.profile.memory.estimator import MemoryEstimate, tail_peak
from upriver.program.split.crossing_values import CrossingValues
from upriver.program.split.split import Split


def tail_memory(
    model: nn.Module, split: Split, features: Sequence[torch.Tensor], *, samples: int, batch_size: int
) -> MemoryEstimate:
    """Estimate the peak of one training iteration on ``batch_size`` samples, weights excluded.

    Args:
        features: All tensors that cross the freeze point, of ``samples`` samples.

    Raises:
        ModelError: If the tail cannot run on tensors without data.
    """
    values = split.tail.values
    form = tuple(tensor.to("meta") for tensor in features)

    def features_of(number: int) -> tuple[torch.Tensor, ...]:
        return _first_of(values, _repeated(values, form, -(-number // samples)), number)

    return tail_peak(
        model, features_of(batch_size), samples=batch_size, run=split.tail, features_of=features_of
    )


def tail_weights(model: nn.Module, split: Split) -> int:
    """Return the bytes of parameters and buffers that no stage of the frozen prefix has."""
    prefix = {id(tensor) for path in split.prefix_units for tensor in _state(model.get_submodule(path))}
    return sum(tensor.nbytes for tensor in _state(model) if id(tensor) not in prefix)


def _repeated(values: CrossingValues, form: Sequence[torch.Tensor], times: int) -> tuple[torch.Tensor, ...]:
    """Repeat these values a number of times, by doubling, as training batches may be huge."""
    if times == 1:
        return values.concatenate([form])
    half = _repeated(values, form, times // 2)
    return values.concatenate([half, half, form] if times % 2 else [half, half])


def _first_of(values: CrossingValues, given: Sequence[torch.Tensor], number: int) -> tuple[torch.Tensor, ...]:
    """Return the values of the first samples, like ``values.select``, without naming each sample."""
    return tuple(
        tensor.narrow(ship.shape.dim, 0, ship.shape.at(number)[ship.shape.dim])
        if ship.shape.batched
        else tensor
        for tensor, ship in zip(given, values.ships, strict=True)
    )


def _state(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()
