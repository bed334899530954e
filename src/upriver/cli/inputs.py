"""What a model is asked, from a file: an image, an array, or tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from upriver.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from upriver.program.example import Example
    from upriver.program.inputs import InputSpec, ModelInputs

IMAGES = (".jpg", ".jpeg", ".png", ".webp")


def read_inputs(path: Path, inputs: ModelInputs) -> Example:
    """One call of a model.

    Args:
        path: An image for a model that takes one (resized, cropped and normalised as for ImageNet); a
            ``.npy`` array for a model of one input; or a ``.safetensors`` file: what is named as a keyword
            input is that, the others are positional, in the order of their names.
        inputs: What the model takes.

    Raises:
        ConfigError: If the file cannot be read, or holds something else than the model takes.
    """
    from upriver.program.example import Example

    ending = path.suffix.lower()
    if ending in IMAGES:
        return Example(args=(_image(path, inputs),))
    if ending == ".npy":
        return _call({"": _array(path)}, inputs, path)
    if ending == ".safetensors":
        return _call(_tensors(path), inputs, path)
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
        array = np.load(path, allow_pickle=False)
        return torch.from_numpy(np.asarray(array, order="C")).clone()
    except OSError as error:
        raise _unreadable(path, error) from None
    except (ValueError, TypeError, EOFError) as error:
        raise ConfigError(f"--input: {path} holds no array of numbers: {error}") from None


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        # In memory of their own: where a tensor lies in the file decides low bits.
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except OSError as error:
        raise _unreadable(path, error) from None
    except SafetensorError as error:
        raise ConfigError(f"--input: {path} is no safetensors file: {error}") from None


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot read --input {path}: {error.strerror or error}")


def _call(tensors: Mapping[str, torch.Tensor], inputs: ModelInputs, path: Path) -> Example:
    """A call with these tensors, by name or in order."""
    from upriver.program.example import Example

    names = tuple(inputs.given.kwargs if inputs.given is not None else inputs.named)
    if len(tensors) == 1 and len(names) == 1 and not inputs.positional:
        tensors = dict(zip(names, tensors.values(), strict=True))
    named = {name: tensors[name] for name in names if name in tensors}
    others = [tensors[name] for name in sorted(tensors.keys() - named.keys())]
    if inputs.given is None:
        if len(others) != len(inputs.positional):
            takes = [*("one without a name" for _ in inputs.positional), *names]
            got = ", ".join(sorted(tensors)) or "none"
            raise ConfigError(f"--input: the model takes {', '.join(takes)}; {path} holds {got}")
        others = [_fitted(one, spec) for one, spec in zip(others, inputs.positional, strict=True)]
        named = {name: _fitted(one, inputs.named[name]) for name, one in named.items()}
    return Example(args=tuple(others), kwargs=named)


def _fitted(tensor: torch.Tensor, spec: InputSpec) -> torch.Tensor:
    """With a dimension for samples where one came without, and in the model's floating-point type."""
    if tuple(tensor.shape) == spec.shape:
        tensor = tensor.unsqueeze(0)
    both = tensor.is_floating_point() and spec.dtype.is_floating_point
    return tensor.to(spec.dtype) if both else tensor
