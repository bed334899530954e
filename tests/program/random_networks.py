"""Draw random networks: descriptions that shrink and print, and the modules that they describe.

A network is a chain of steps on one value. The network keeps each step's result, so later steps can read it
again: skips, dense connections and towers are built this way. A description printed by a failing test is
Python code, ready to be pasted into a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from upriver.program.example_inputs import Example

MICRO_BATCH = 4


@dataclass(frozen=True)
class Family:
    """Form of the value: its shape for one sample, and the dimension (samples counted) of its features."""

    shape: tuple[int, ...]
    dim: int

    @property
    def width(self) -> int:
        """Number of features."""
        return self.shape[self.dim - 1]

    def along(self, features: torch.Tensor) -> torch.Tensor:
        """Return one number per feature, in a shape that can be added to the value."""
        return features.reshape(-1, *[1] * (len(self.shape) - self.dim))


FAMILIES = {
    "vector": Family((8,), 1),
    "image": Family((6, 5, 5), 1),
    "tokens": Family((3, 8), 2),
}


@dataclass(frozen=True)
class Block:
    """A module, which changes the answer of some layers (see ``FORMS`` and ``LAYERS``)."""

    form: str
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Do:
    """An operation in the network's own forward (see ``Net``), at times on a value kept before."""

    what: str
    at: int = 0


@dataclass(frozen=True)
class Freeze:
    """The choice of frozen parameters (see ``apply``)."""

    kind: str
    numbers: tuple[int, ...] = ()


Step: TypeAlias = "Block | Do"


@dataclass(frozen=True)
class Description:
    """The complete description of a network."""

    steps: tuple[Step, ...]
    freeze: Freeze
    family: str = "vector"
    dtype: str = "float32"
    inputs: str = "one"
    strided: bool = False
    output: str = "tensor"
    ties: tuple[tuple[int, int], ...] = ()
    seed: int = 0

    @property
    def blocks(self) -> list[Block]:
        """Blocks of the network."""
        return [step for step in self.steps if isinstance(step, Block)]

    def build(self) -> Net:
        """Build the network, in training mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            net = Net(self)
            for module in net.modules():
                if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and module.track_running_stats:
                    module.running_mean.normal_()
                    module.running_var.uniform_(0.5, 1.5)
        net.to(getattr(torch, self.dtype))
        for earlier, later in self.ties:
            _tie(net.affine_of(earlier), net.affine_of(later))
        apply(self.freeze, net)
        return net

    def example(self, seed: int, samples: int = MICRO_BATCH) -> Example:
        """Return random inputs."""
        family, dtype = FAMILIES[self.family], getattr(torch, self.dtype)
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        x = normal(samples, *family.shape)
        if self.strided:  # features are last in memory, or first: not as the shape says
            x = x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 2 else x.t().contiguous().t()
        if self.inputs == "one":
            return Example.of(x)
        if self.inputs == "indices":
            numbers = torch.randint(0, family.width, (samples, *family.shape), generator=generator)
            return Example.of((x, numbers))
        y = normal(*family.shape) if self.inputs == "unbatched" else normal(samples, *family.shape)
        return Example.of({"x": x, "y": y} if self.inputs == "keywords" else (x, y))


# ----------------------------------------------------------------------------------------- modules


class Noise(nn.Module):
    """Add random numbers, in evaluation, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class Count(nn.Module):
    """Count its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * self.count


class Attention(nn.Module):
    """A stock encoder layer, for tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 2, dim_feedforward=8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def _affine(family: Family) -> nn.Module:
    if len(family.shape) == 3:
        return nn.Conv2d(family.width, family.width, 3, padding=1)
    return nn.Linear(family.width, family.width)


def _batchnorm(family: Family, **options: Any) -> nn.Module:
    channels = family.shape[0]
    return (
        nn.BatchNorm2d(channels, **options) if len(family.shape) == 3 else nn.BatchNorm1d(channels, **options)
    )


LAYERS: dict[str, Callable[[Family], nn.Module]] = {
    "affine": _affine,
    "batchnorm": _batchnorm,
    "batchnorm_free": lambda family: _batchnorm(family, affine=False),
    "batchnorm_of_the_batch": lambda family: _batchnorm(family, track_running_stats=False),
    "layernorm": lambda family: nn.LayerNorm(family.shape),
    "attention": lambda family: Attention(family.width) if len(family.shape) == 2 else _affine(family),
    "dropout": lambda family: nn.Dropout(0.4),
    "dropout_": lambda family: nn.Dropout(0.4, inplace=True),
    "relu": lambda family: nn.ReLU(),
    "relu_": lambda family: nn.ReLU(inplace=True),
    "tanh": lambda family: nn.Tanh(),
    "gelu": lambda family: nn.GELU(),
    "hardswish_": lambda family: nn.Hardswish(inplace=True),
    "pool": lambda family: nn.AvgPool2d(3, 1, 1) if len(family.shape) == 3 else nn.Identity(),
    "noise": lambda family: Noise(),
    "count": lambda family: Count(),
}


class Body(nn.Module):
    """The module that a :class:`Block` describes."""

    def __init__(self, block: Block, family: Family) -> None:
        super().__init__()
        self.form = block.form
        self.family = family
        self.layers = nn.Sequential(*(LAYERS[name](family) for name in block.layers))
        if block.form == "dense":
            self.project = (
                nn.Conv2d(2 * family.width, family.width, 1)
                if len(family.shape) == 3
                else nn.Linear(2 * family.width, family.width)
            )
        if block.form == "position":
            self.table = nn.Embedding(family.width, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return FORMS[self.form](self, x, self.layers(x))


def _strided(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _swapped(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat(x.chunk(2, dim)[::-1], dim)


def _shifted(x: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a view that starts at an odd position: its memory is not aligned."""
    return torch.cat([x, y], dim).narrow(dim, 1, x.shape[dim])


def _gram(x: torch.Tensor) -> torch.Tensor:
    rows = x.flatten(1)
    return ((rows @ rows.T).softmax(-1) @ rows).reshape(x.shape)


def _mask(family: Family, x: torch.Tensor) -> torch.Tensor:
    return x * family.along(torch.arange(family.width) % 3 != 0).to(x.dtype)


FORMS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "plain": lambda body, x, y: y,
    "residual": lambda body, x, y: x + y,
    "residual_": lambda body, x, y: functional.relu(y.add_(x), inplace=True),
    "dense": lambda body, x, y: _project(body, torch.cat([x, y], body.family.dim)),
    "swapped": lambda body, x, y: _swapped(y, body.family.dim),
    "strided": lambda body, x, y: _strided(y),
    "shifted": lambda body, x, y: _shifted(x, y, body.family.dim),
    "spread": lambda body, x, y: y.mean(body.family.dim, keepdim=True).expand_as(y),
    "masked": lambda body, x, y: _mask(body.family, y),
    "position": lambda body, x, y: y + body.family.along(body.table(torch.arange(body.family.width))),
    "pair": lambda body, x, y: (y, y * 2),
    "aliases": lambda body, x, y: (y, y.flatten(1).view(y.shape)),
    "mapping": lambda body, x, y: {"first": y, "nothing": None, "second": torch.tanh(y)},
    "centred": lambda body, x, y: y - y.mean(0),
    "gram": lambda body, x, y: _gram(y),
}


def _project(body: Body, x: torch.Tensor) -> torch.Tensor:
    return body.project(x)


class Net(nn.Module):
    """The module that a :class:`Description` describes."""

    def __init__(self, description: Description) -> None:
        super().__init__()
        self.description = description
        self.family = FAMILIES[description.family]
        self.blocks = nn.ModuleList(Body(block, self.family) for block in description.blocks)
        self.gate = nn.Sigmoid()
        self.drop = nn.Dropout(0.4)
        self.head = nn.Linear(self.family.width, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        given = x
        kept = [x]
        number = 0
        for step in self.description.steps:
            if isinstance(step, Block) or step.what == "again":
                chosen = number if isinstance(step, Block) else step.at % max(1, number)
                number += isinstance(step, Block)
                if number:
                    x = self._unpack(self.blocks[chosen](x), kept)
            elif step.what == "restart":
                x = given
            elif step.what == "second":
                x = x if y is None else y.to(x.dtype).expand_as(x) if x.shape != y.shape else y.to(x.dtype)
            else:
                x = self._do(step, x, kept, number)
        return self._answer(x)

    def _unpack(self, result: Any, kept: list[torch.Tensor]) -> torch.Tensor:
        if isinstance(result, dict):
            result = (result["first"], result["second"])
        if isinstance(result, tuple):
            kept.append(result[1])
            result = result[0]
        kept.append(result)
        return result

    def _do(self, step: Do, x: torch.Tensor, kept: list[torch.Tensor], number: int) -> torch.Tensor:
        other = kept[step.at % len(kept)]
        match step.what:
            case "skip":
                return x + other
            case "concat":
                return _shifted(x, other, self.family.dim)
            case "add_":
                return x.add_(0.5)
            case "relu_":
                return functional.relu_(x)
            case "skip_":
                x += other
                return x
            case "flat":
                return x.reshape(x.shape[0], -1).view(x.shape)
            case "strided":
                return _strided(x)
            case "swapped":
                return _swapped(x, self.family.dim)
            case "mask":
                return _mask(self.family, x)
            case "gate":
                kept.append(self.gate(x))
                return x
            case "drop":
                return self.drop(x)
            case "borrow":
                return self._borrow(x, step.at % number) if number else x
            case "detach":
                return x.detach()
            case "branch":
                return x * 2 if x.sum() > 0 else x
            case "centre":
                return x - x.mean(0)
            case "gram":
                return _gram(x)
        raise ValueError(step.what)

    def _borrow(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """Read another module's weight without calling the module."""
        affine = self.affine_of(number)
        if isinstance(affine, nn.Linear):
            return functional.linear(x, affine.weight)
        if isinstance(affine, nn.Conv2d):
            return functional.conv2d(x, affine.weight, padding=1)
        return x

    def _answer(self, x: torch.Tensor) -> Any:
        features = x.mean((2, 3)) if x.dim() == 4 else x.mean(1) if x.dim() == 3 else x
        logits = self.head(features)
        match self.description.output:
            case "tuple":
                return logits, x
            case "mapping":
                return {"logits": logits, "nothing": None, "hidden": [x]}
        return logits

    def affine_of(self, number: int) -> nn.Module | None:
        """Return the first linear or convolutional layer of a block."""
        if number >= len(self.blocks):
            return None
        found = (m for m in self.blocks[number].layers if isinstance(m, nn.Linear | nn.Conv2d))
        return next(found, None)


def _tie(earlier: nn.Module | None, later: nn.Module | None) -> None:
    if earlier is not None and later is not None:
        later.weight = earlier.weight


# ---------------------------------------------------------------------------------------- freezing


def apply(freeze: Freeze, net: Net) -> None:
    """Freeze the chosen parameters."""
    chosen = set(_chosen(freeze, net))
    for module, name, parameter in _parameters(net):
        if (module, name) in chosen:
            parameter.requires_grad_(False)


def _parameters(net: Net) -> Iterator[tuple[str, str, nn.Parameter]]:
    for path, module in net.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield path, name, parameter


def _chosen(freeze: Freeze, net: Net) -> Iterator[tuple[str, str]]:
    owners = list(dict.fromkeys(path for path, _, _ in _parameters(net)))
    for path, name, _ in _parameters(net):
        block = int(path.split(".")[1]) if path.startswith("blocks.") else len(net.blocks)
        match freeze.kind:
            case "prefix":
                wanted = block < freeze.numbers[0]
            case "span":
                wanted = freeze.numbers[0] <= block < freeze.numbers[1]
            case "blocks":
                wanted = block in freeze.numbers
            case "all_but":
                wanted = block not in freeze.numbers
            case "layers":
                wanted = owners.index(path) in freeze.numbers
            case "every_other":
                wanted = owners.index(path) % 2 == freeze.numbers[0]
            case "norms":
                wanted = "Norm" in type(net.get_submodule(path)).__name__
            case "biases":
                wanted = name == "bias"
            case "weights":
                wanted = name != "bias"
            case _:
                raise ValueError(freeze.kind)
        if wanted:
            yield path, name


# ----------------------------------------------------------------------------------------- drawing

_COMMON_LAYERS = ["affine"] * 6 + ["batchnorm", "layernorm", "relu", "relu_", "tanh", "gelu", "dropout"]
_OTHER_LAYERS = ["attention", "batchnorm_free", "dropout_", "hardswish_", "pool"]
_RARE_LAYERS = ["batchnorm_of_the_batch", "noise", "count"]
_COMMON_FORMS = ["plain"] * 4 + ["residual", "residual_", "dense"]
_OTHER_FORMS = ["swapped", "strided", "shifted", "spread", "masked", "position", "pair", "mapping"]
_RARE_FORMS = ["aliases", "centred", "gram"]
_DEEDS = ["again", "skip", "concat", "add_", "relu_", "skip_", "flat", "strided", "swapped", "mask", "gate"]
_RARE_DEEDS = ["drop", "borrow", "restart", "second", "detach", "branch", "centre", "gram"]


def _layers() -> st.SearchStrategy[tuple[str, ...]]:
    names = st.one_of(
        *[st.sampled_from(_COMMON_LAYERS)] * 6, st.sampled_from(_OTHER_LAYERS)
    ) | st.sampled_from(_COMMON_LAYERS * 6 + _RARE_LAYERS)
    return st.lists(names, min_size=1, max_size=3).map(tuple)


def _blocks() -> st.SearchStrategy[Block]:
    forms = st.sampled_from(_COMMON_FORMS * 6 + _OTHER_FORMS * 4 + _RARE_FORMS)
    return st.builds(Block, form=forms, layers=_layers())


def _deeds() -> st.SearchStrategy[Do]:
    return st.builds(Do, what=st.sampled_from(_DEEDS * 5 + _RARE_DEEDS), at=st.integers(0, 5))


def _chains(longest: int) -> st.SearchStrategy[list[Step]]:
    """Draw at least one block, with up to two operations before each."""
    links = st.tuples(st.lists(_deeds(), max_size=2), _blocks()).map(lambda link: [*link[0], link[1]])
    return st.lists(links, min_size=1, max_size=longest).map(
        lambda parts: [step for part in parts for step in part]
    )


@st.composite
def _towers(draw: st.DrawFn) -> tuple[list[Step], int, int]:
    """Draw two towers on one input or on two, joined; with the number of blocks in each."""
    first, second = draw(_chains(3)), draw(_chains(3))
    kept = 1 + sum(isinstance(step, Block) for step in first)  # about: some steps keep more
    join = Do(draw(st.sampled_from(["concat", "skip", "skip_"])), kept - 1)
    again = Do(draw(st.sampled_from(["restart", "second"])))
    counts = [sum(isinstance(step, Block) for step in part) for part in (first, second)]
    return [*first, again, *second, join], counts[0], counts[1]


def _freezes(blocks: int) -> st.SearchStrategy[Freeze]:
    numbers = st.integers(0, blocks)
    some = st.lists(numbers, min_size=1, max_size=3, unique=True).map(lambda n: tuple(sorted(n)))
    leaves = st.lists(st.integers(0, 2 * blocks), min_size=1, max_size=5, unique=True).map(
        lambda n: tuple(sorted(n))
    )
    return st.one_of(
        *[st.builds(Freeze, st.just("prefix"), st.tuples(st.integers(1, blocks)))] * 7,
        st.builds(Freeze, st.sampled_from(["blocks", "all_but"]), some),
        st.builds(Freeze, st.just("layers"), leaves),
        st.builds(Freeze, st.just("every_other"), st.tuples(st.integers(0, 1)))
        | st.builds(Freeze, st.sampled_from(["norms", "biases", "weights"])),
    )


@st.composite
def descriptions(draw: st.DrawFn) -> Description:
    """Draw a random network."""
    if draw(st.integers(0, 3)) == 3:
        steps, first, second = draw(_towers())
        blocks = first + second
        spans = [Freeze("prefix", (first,)), Freeze("span", (first, blocks))]
        freeze = draw(st.one_of(st.sampled_from(spans), st.sampled_from(spans), _freezes(blocks)))
    else:
        steps = draw(_chains(6))
        blocks = sum(isinstance(step, Block) for step in steps)
        freeze = draw(_freezes(blocks))
    ties = st.tuples(st.integers(0, max(0, blocks - 1)), st.integers(0, max(0, blocks - 1)))
    return Description(
        steps=tuple(steps),
        freeze=freeze,
        family=draw(st.sampled_from(sorted(FAMILIES, reverse=True))),
        dtype=draw(st.sampled_from(["float32"] * 6 + ["bfloat16", "float64"])),
        inputs=draw(st.sampled_from(["one"] * 3 + ["two", "keywords", "unbatched", "indices"])),
        strided=draw(st.sampled_from([False, False, True])),
        output=draw(st.sampled_from(["tensor", "tensor", "tuple", "mapping"])),
        ties=draw(st.sampled_from([(), ()]) | st.lists(ties, max_size=1).map(tuple)),
        seed=draw(st.integers(0, 3)),
    )
