"""Make random inputs of the right shape and type for a model or a program."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from upriver.errors import ConfigError
from upriver.program.example_inputs import Example
from upriver.program.graph.caps import DEFAULT_CAPS
from upriver.program.graph.schema import DTYPES, Value

_SPECIAL = 8
"""Random text leaves out token ids below this: models give them meanings (padding, begin, mask)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSpec:
    """One input of a model, for one sample.

    Attributes:
        shape: Without the batch dimension.
        dtype: Floating point for pixels and sound, int64 for tokens.
        below: Integers are drawn from [0, below).
        pad: Tokens: the id that follows the end of a sample's text. None for inputs that are always full.
        end: Tokens: the last id of a sample's text, where a model looks for it.
        mask: True if this input marks text tokens (1) and padding (0).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    below: int = 2
    pad: int | None = None
    end: int | None = None
    mask: bool = False

    def example(self, batch: int, *, seed: int = 0, lengths: torch.Tensor | None = None) -> torch.Tensor:
        """Return random values: normal numbers, integers below the bound, or a mask.

        Args:
            lengths: Tokens of each sample's text. None for full length.
        """
        generator = torch.Generator().manual_seed(seed)
        shape = (batch, *self.shape)
        if self.dtype.is_floating_point:
            return torch.randn(shape, generator=generator, dtype=self.dtype, device="cpu")
        text = self._text(batch, lengths)
        if self.mask:
            return text.to(self.dtype)
        if self.pad is None:
            return torch.randint(0, self.below, shape, generator=generator, dtype=self.dtype, device="cpu")
        return self._tokens(shape, text, generator)

    def _text(self, batch: int, lengths: torch.Tensor | None) -> torch.Tensor:
        """Return a tensor that is True where a sample has text."""
        positions = (
            torch.arange(self.shape[-1], device="cpu")
            if self.shape
            else torch.zeros((), dtype=torch.int64, device="cpu")
        )
        ends = torch.full((batch,), positions.numel(), device="cpu") if lengths is None else lengths
        return (positions < ends.view(batch, *[1] * len(self.shape))).expand(batch, *self.shape)

    def _tokens(self, shape: tuple[int, ...], text: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        special = {self.pad, self.end}
        usual = torch.tensor(
            [t for t in range(min(_SPECIAL, self.below), self.below) if t not in special], device="cpu"
        )
        drawn = usual[torch.randint(0, len(usual), shape, generator=generator, device="cpu")]
        if self.end is not None:
            last = text.sum(-1, keepdim=True) - 1
            drawn = drawn.scatter(-1, last, self.end)
        return drawn.masked_fill(~text, self.pad or 0).to(self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInputs:
    """All inputs of a model: positional and keyword inputs, or an example that came with the model.

    Attributes:
        given: An example that supplies the values. If set, the other fields are ignored.
    """

    positional: tuple[InputSpec, ...] = ()
    named: Mapping[str, InputSpec] = field(default_factory=dict)
    given: Example | None = None

    def example(self, batch: int, *, seed: int = 0) -> torch.Tensor | Example:
        """Return one call with `batch` samples. A single positional input is returned as a tensor.

        Texts have different lengths, padded as a tokenizer would do it. Values of a given example are
        repeated.

        Raises:
            ConfigError: If no program accepts that many samples, or an input of that size.
        """
        self._check(batch)
        if self.given is not None:
            return self.given.resized(batch)
        lengths = self._lengths(batch, seed)
        args = tuple(spec.example(batch, seed=seed, lengths=lengths) for spec in self.positional)
        if len(args) == 1 and not self.named:
            return args[0]
        # A new seed for each input: with equal seeds, two towers of a model would get the same picture.
        kwargs = {
            name: spec.example(batch, seed=seed + number, lengths=lengths)
            for number, (name, spec) in enumerate(self.named.items(), start=len(args))
        }
        return Example(args=args, kwargs=kwargs)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of one sample of the first input. None for a given example."""
        if self.given is not None:
            return None
        return next(iter((*self.positional, *self.named.values()))).shape

    def reshaped(self, shape: tuple[int, ...]) -> ModelInputs:
        """Return the inputs with another shape of one sample, also for inputs that share the shape (a mask).

        Raises:
            ConfigError: If the inputs are a given example.
        """
        if self.given is not None:
            raise ConfigError("the model comes with an example of its input: its shape cannot be changed")
        first = next(iter((*self.positional, *self.named.values()))).shape

        def change(spec: InputSpec) -> InputSpec:
            return replace(spec, shape=shape) if spec.shape == first else spec

        return ModelInputs(
            positional=tuple(change(spec) for spec in self.positional),
            named={name: change(spec) for name, spec in self.named.items()},
        )

    def _check(self, batch: int) -> None:
        """Raise :class:`ConfigError` for inputs that no program accepts: they may exceed memory."""
        if not 1 <= batch <= DEFAULT_CAPS.micro_batch:
            raise ConfigError(f"a micro-batch has 1 to {DEFAULT_CAPS.micro_batch} samples, got {batch}")
        for spec in (*self.positional, *self.named.values()) if self.given is None else ():
            nbytes = batch * math.prod(spec.shape) * spec.dtype.itemsize
            if nbytes > DEFAULT_CAPS.tensor_bytes or len(spec.shape) >= DEFAULT_CAPS.dimensions:
                raise ConfigError(
                    f"an input takes at most {DEFAULT_CAPS.tensor_bytes} bytes in {DEFAULT_CAPS.dimensions} "
                    f"dimensions, got {batch} samples of shape {spec.shape}: {nbytes} bytes"
                )

    def _lengths(self, batch: int, seed: int) -> torch.Tensor | None:
        """Return each text's length, from half of the maximum to all of it. None if no input is a mask."""
        masks = [spec.shape[-1] for spec in self.named.values() if spec.mask]
        if not masks:
            return None
        generator = torch.Generator().manual_seed(seed)
        return torch.randint((masks[0] + 1) // 2, masks[0] + 1, (batch,), generator=generator, device="cpu")


def made_up(values: Iterable[Value], device: str | torch.device = "cpu") -> list[torch.Tensor]:
    """Return inputs that a program accepts: random real numbers, and zeros for integers.

    Every table has a row 0, so a zero is a valid index. Zero as a real number would pass some kernels faster
    than other values.
    """
    generator = torch.Generator().manual_seed(0)
    found = []
    for value in values:
        dtype = DTYPES[value.spec.dtype]
        numbers = torch.zeros(value.spec.span, dtype=dtype, device="cpu")
        if dtype.is_floating_point:
            numbers.normal_(generator=generator)
        found.append(numbers.to(device).as_strided(value.spec.shape, value.spec.stride))
    return found
