"""Read a model's inputs from a file: an image, an array, or tensors by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upriver.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from upriver.program.capture.input_spec import InputSpec, ModelInputs
    from upriver.program.example_inputs import Example

IMAGES = (".jpg", ".jpeg", ".png", ".webp")

MAGIC = b"\x93NUMPY"
"""First bytes of a .npy file."""


def read_inputs(path: Path, inputs: ModelInputs, model: nn.Module | None = None) -> Example:
    """Return one call of a model.

    Args:
        path: File of inputs. An image (resized, cropped and normalised as for ImageNet) suits a model that
            takes one; a ``.npy`` array suits a model of one input. In a ``.safetensors`` file, a tensor named
            like a keyword input or a parameter of the model's forward is that input. The others are
            positional, in the order of their names.
        model: The model, for the names of its forward's parameters.

    Raises:
        ConfigError: If the file cannot be read, or its content does not suit the model.
    """
    from upriver.program.example_inputs import Example

    ending = path.suffix.lower()
    if ending in IMAGES:
        return Example(args=(_image(path, inputs),))
    if ending == ".npy":
        return _call({"": _array(path)}, inputs, path, model)
    if ending == ".safetensors":
        return _call(_tensors(path), inputs, path, model)
    raise ConfigError(f"--input must be an image ({', '.join(IMAGES)}), .npy or .safetensors, got {path}")


def _image(path: Path, inputs: ModelInputs) -> torch.Tensor:
    from upriver.cli.stages import input_stages
    from upriver.pipeline import SampleError, stored_tensor

    shape = inputs.shape
    if shape is None or len(shape) != 3 or shape[0] != 3 or shape[1] != shape[2]:
        takes = "an example of its own" if shape is None else f"samples of shape {shape}"
        raise ConfigError(
            f"--input: {path} is an image, and the model takes {takes}; give a .safetensors file"
        )
    chain = input_stages("eval", size=shape[1])
    try:
        stored = stored_tensor(path.read_bytes())
        pixels = chain.run(stored, sample=0, epoch=0, seed=0, start=chain.start, stop=0)
    except OSError as error:
        raise _unreadable(path, error) from None
    except SampleError as error:
        raise ConfigError(f"--input: {path} is no image that can be read: {error}") from None
    return pixels.unsqueeze(0)


def _array(path: Path) -> torch.Tensor:
    import numpy as np
    import torch

    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ValueError("it is no .npy file")
        array = np.load(path, allow_pickle=False)
        return torch.from_numpy(np.asarray(array, order="C")).clone()
    except OSError as error:
        raise _unreadable(path, error) from None
    except (ValueError, TypeError, EOFError) as error:
        # numpy would unpickle such objects, which runs code of the file
        why = "it holds Python objects" if "pickle" in str(error) else str(error)
        raise ConfigError(f"--input: {path} holds no array of numbers: {why}") from None


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        # Copied into memory of their own: a tensor's place in the file decides low bits.
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except OSError as error:
        raise _unreadable(path, error) from None
    except SafetensorError as error:
        raise ConfigError(f"--input: {path} is no safetensors file: {error}") from None


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot read --input {path}: {error.strerror or error}")


def _call(
    tensors: Mapping[str, torch.Tensor], inputs: ModelInputs, path: Path, model: nn.Module | None
) -> Example:
    """Return a call with these tensors, by name or in order."""
    from upriver.program.example_inputs import Example, tensors_in

    given = inputs.given
    positional = given.args if given is not None else inputs.positional
    keywords = tuple(given.kwargs if given is not None else inputs.named)
    if len(tensors) == 1 and len(keywords) == 1 and not positional:
        tensors = dict(zip(keywords, tensors.values(), strict=True))
    ordered, beyond, num_needed = _parameters(model, len(positional))
    num_positional = len(positional)
    if given is None and not keywords:  # of the user's own model nothing else tells the number of inputs
        num_positional = max(num_positional, num_needed)
        ordered, beyond, _ = _parameters(model, num_positional)
    allowed = keywords + tuple(name for name in beyond if name not in keywords)
    if given is not None:  # inputs that the example leaves out may be given all the same
        keywords = allowed
    named = {name: tensors[name] for name in allowed if name in tensors}
    placed = {place: tensors[name] for place, name in enumerate(ordered) if name in tensors.keys() - named}
    others = sorted(tensors.keys() - named.keys() - set(ordered))
    constants: dict[int, Any] = {}  # numbers and other constants are the example's
    if given is not None:
        constants = {place: value for place, value in enumerate(given.args) if not tensors_in(value)}
        named = {name: value for name, value in given.kwargs.items() if not tensors_in(value)} | named
    free = [place for place in range(num_positional) if place not in placed and place not in constants]
    placed |= {place: tensors[name] for name, place in zip(others, free, strict=False)}
    for place in sorted(constants):
        if place <= max(placed, default=-1) or set(range(place)) <= placed.keys():
            placed.setdefault(place, constants[place])
    beside = others[len(free) :]
    if beside or sorted(placed) != list(range(len(placed) if given is not None else num_positional)):
        unnamed = ["one without a name"] * (num_positional - len(ordered))
        takes = ", ".join((*ordered, *unnamed, *keywords))
        got = ", ".join(sorted(tensors)) or "none"
        got += f", of which it does not take {', '.join(beside)}" if beside else ""
        raise ConfigError(f"--input: the model takes {takes}; {path} holds {got}")
    args = [placed[place] for place in sorted(placed)]
    if given is None:
        args[: len(positional)] = map(_fitted, args, inputs.positional)
        named |= {name: _fitted(named[name], spec) for name, spec in inputs.named.items() if name in named}
    return Example(args=tuple(args), kwargs=named)


def _parameters(model: nn.Module | None, positional: int) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Return the forward's first parameters, its named ones behind them, and how many are required."""
    try:
        found = list(inspect.signature(model.forward).parameters.values()) if model is not None else []
    except (TypeError, ValueError):
        found = []
    ordered = [each for each in found if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    num_needed = sum(each.default is each.empty for each in ordered)
    ordered = ordered[:positional]
    by_name = [each for each in found if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    behind = tuple(each.name for each in by_name if each not in ordered)
    return tuple(each.name for each in ordered), behind, num_needed


def _fitted(tensor: torch.Tensor, spec: InputSpec) -> torch.Tensor:
    """Add a missing dimension for samples, and cast to the model's floating-point type."""
    if tuple(tensor.shape) == spec.shape:
        tensor = tensor.unsqueeze(0)
    both = tensor.is_floating_point() and spec.dtype.is_floating_point
    return tensor.to(spec.dtype) if both else tensor
