"""What a model or a program takes: made-up inputs of the right form."""

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
"""Token ids below this are left out of random text: models give them meanings (padding, begin, mask)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSpec:
    """One input of a model, for one sample.

    Attributes:
        shape: Without the batch dimension.
        dtype: Floating point for pixels and sound, int64 for tokens.
        below: Integers are drawn from [0, below).
        pad: Tokens: what stands behind the end of a sample's text; None for inputs that are always full.
        end: Tokens: what stands last in a sample's text, where a model looks for it.
        mask: Whether this input says which tokens are text (1) and which padding (0).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    below: int = 2
    pad: int | None = None
    end: int | None = None
    mask: bool = False

    def example(self, batch: int, *, seed: int = 0, lengths: torch.Tensor | None = None) -> torch.Tensor:
        """Random values of this form: normal, or integers below the bound, or a mask.

        Args:
            batch: Number of samples.
            seed: Decides the values.
            lengths: Tokens of each sample's text; all of them where nothing is said.
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
        """True where a sample has text."""
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
    """All inputs of a model: positional and keyword ones, or an example that the model came with.

    Attributes:
        positional: Inputs without a name, in order.
        named: Keyword inputs.
        given: An example to take the values from instead; nothing else is looked at then.
    """

    positional: tuple[InputSpec, ...] = ()
    named: Mapping[str, InputSpec] = field(default_factory=dict)
    given: Example | None = None

    def example(self, batch: int, *, seed: int = 0) -> torch.Tensor | Example:
        """One call with so many samples: a tensor where the model takes one positional input.

        Texts are of different lengths, padded as a tokenizer would do it. Values of a given example are
        repeated as they are.

        Raises:
            ConfigError: If a program takes no so many samples, or no input of that size.
        """
        self._check(batch)
        if self.given is not None:
            return self.given.resized(batch)
        lengths = self._lengths(batch, seed)
        args = tuple(spec.example(batch, seed=seed, lengths=lengths) for spec in self.positional)
        if len(args) == 1 and not self.named:
            return args[0]
        # Another seed for each input: equal ones would give two towers of a model the same picture.
        kwargs = {
            name: spec.example(batch, seed=seed + number, lengths=lengths)
            for number, (name, spec) in enumerate(self.named.items(), start=len(args))
        }
        return Example(args=args, kwargs=kwargs)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Of one sample of the first input; None for a given example."""
        if self.given is not None:
            return None
        return next(iter((*self.positional, *self.named.values()))).shape

    def reshaped(self, shape: tuple[int, ...]) -> ModelInputs:
        """The same with another shape of one sample, also for inputs that follow the first one's (a mask).

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
        """What no program takes is not made: it may fit into no memory."""
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
        """How long each text is, from half of what fits to all of it; None without a mask that says so."""
        masks = [spec.shape[-1] for spec in self.named.values() if spec.mask]
        if not masks:
            return None
        generator = torch.Generator().manual_seed(seed)
        return torch.randint((masks[0] + 1) // 2, masks[0] + 1, (batch,), generator=generator, device="cpu")


def made_up(values: Iterable[Value], device: str | torch.device = "cpu") -> list[torch.Tensor]:
    """Tensors that a program takes: random numbers, and zeros where whole ones are wanted.

    Every table has a row 0, so zeros can be looked up in any; real numbers that are zero would go through
    some kernels faster than others do.

    Args:
        values: The inputs of its graph.
        device: Where they are to lie.
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
