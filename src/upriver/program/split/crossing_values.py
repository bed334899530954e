"""Check, select and concatenate the tensors that cross the freeze point."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from upriver.errors import CaptureError, ConfigError
from upriver.program.split.freeze_point import CrossingTensor


class CrossingValues:
    """Handle the tensors that cross a freeze point, as tuples in a fixed order.

    Samples are in the model's own sample dimension. A sample has several rows if the model split it (the
    windows of an image). A tensor that is the same for all samples has no sample dimension.
    """

    def __init__(self, ships: Sequence[CrossingTensor]) -> None:
        """Store the ships of a freeze point.

        Raises:
            CaptureError: If a tensor does not hold its samples in one dimension, or no tensor holds samples.
        """
        self.ships = tuple(ships)
        self._dims = [ship.shape.dim if ship.shape.batched else None for ship in ships]
        self._rows = [
            1 if dim is None else ship.shape.slope[dim] for dim, ship in zip(self._dims, ships, strict=True)
        ]
        counted = [number for number, dim in enumerate(self._dims) if dim is not None]
        if not counted:
            raise CaptureError("nothing that crosses the cut depends on the number of samples")
        self._counted = counted[0]

    def __len__(self) -> int:
        return len(self.ships)

    def check(self, features: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return the caller's features as a tuple.

        Raises:
            ConfigError: If they do not match this cut, such as the model's own input.
        """
        values = (features,) if isinstance(features, torch.Tensor) else features
        if isinstance(values, tuple) and len(values) == len(self.ships):
            first = values[self._counted]
            form = self.ships[self._counted].shape
            if isinstance(first, torch.Tensor) and first.dim() == len(form.base):
                samples = form.samples_of(first.shape)
                wanted = [ship.shape.at(samples) for ship in self.ships]
                if [tuple(value.shape) for value in values] == wanted:
                    self._check_types(values)
                    return values
        shapes = " and ".join(str(ship.shape) for ship in self.ships)
        raise ConfigError(
            f"call the job with the features it yields, of shape {shapes}, got {_given(features)}"
        )

    def _check_types(self, values: tuple[torch.Tensor, ...]) -> None:
        """Raise if a type differs: a tail that promotes types would silently compute something else."""
        for number, (value, ship) in enumerate(zip(values, self.ships, strict=True)):
            if value.dtype != ship.shape.dtype:
                name = "features" if len(values) == 1 else f"features[{number}]"
                raise ConfigError(
                    f"call the job with the features it yields: {name} ('{ship.source}') must be "
                    f"{ship.shape.dtype}, got {value.dtype}"
                )

    def samples_of(self, values: Sequence[torch.Tensor]) -> int:
        """Return the number of samples in these values."""
        return self.ships[self._counted].shape.samples_of(values[self._counted].shape)

    def select(self, values: Sequence[torch.Tensor], rows: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Return the values of some samples, in the order of ``rows``."""
        if not rows:
            raise ConfigError("no samples were chosen")
        run = list(rows) == list(range(rows[0], rows[0] + len(rows)))
        return tuple(
            value if dim is None else _choose(value, dim, count, rows, run)
            for value, dim, count in zip(values, self._dims, self._rows, strict=True)
        )

    def concatenate(self, parts: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        """Return the values of several parts, concatenated along the samples."""
        return tuple(
            parts[0][index] if dim is None else torch.cat([part[index] for part in parts], dim)
            for index, dim in enumerate(self._dims)
        )

    def as_read(self, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the values with those that came in bfloat16 in the type in which the tail reads them."""
        if len(values) != len(self.ships):
            return tuple(values)  # the tail refuses them
        low, high = torch.bfloat16, torch.float32
        return tuple(
            value.to(high) if (value.dtype, ship.shape.dtype) == (low, high) else value
            for value, ship in zip(values, self.ships, strict=True)
        )

    def unshared(self, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the values, with copies of the tensors that the tail writes into."""
        return tuple(
            value.clone() if ship.overwritten else value
            for value, ship in zip(values, self.ships, strict=True)
        )

    def one_or_all(self, values: Sequence[torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return the only tensor if one crosses, else a tuple."""
        return values[0] if len(self.ships) == 1 else tuple(values)


def _choose(value: torch.Tensor, dim: int, count: int, rows: Sequence[int], run: bool) -> torch.Tensor:
    if run:
        return value.narrow(dim, rows[0] * count, len(rows) * count)
    index = torch.tensor([row * count + part for row in rows for part in range(count)], device=value.device)
    return value.index_select(dim, index)


def _given(features: object) -> str:
    if isinstance(features, torch.Tensor):
        return str(tuple(features.shape))
    if isinstance(features, tuple) and all(isinstance(value, torch.Tensor) for value in features):
        return " and ".join(str(tuple(value.shape)) for value in features)
    return type(features).__name__
