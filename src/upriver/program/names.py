"""Models by name: torchvision:resnet18, timm:NAME, transformers:NAME, package.module:callable.

Nothing is fetched: a model comes from its configuration with random weights from a fixed seed, or with the
weights of a safetensors file.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from upriver.errors import ModelError

IMAGE_SHAPE = (3, 224, 224)
"""What a vision model takes where it says nothing else: the size that ImageNet models are trained at."""

TOKENS = 128
"""Length of the example a language model is captured with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSpec:
    """One input of a model, for one sample.

    Attributes:
        shape: Without the batch dimension.
        dtype: Floating point for pixels, int64 for tokens.
        below: Integers are drawn from [0, below).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    below: int = 2

    def example(self, batch: int, *, seed: int = 0) -> torch.Tensor:
        """Random values of this form: normal, or integers below the bound."""
        generator = torch.Generator().manual_seed(seed)
        if self.dtype.is_floating_point:
            return torch.randn(batch, *self.shape, generator=generator, dtype=self.dtype)
        return torch.randint(0, self.below, (batch, *self.shape), generator=generator, dtype=self.dtype)


def load_model(
    name: str,
    *,
    weights: Path | None = None,
    seed: int = 0,
    input_shape: tuple[int, ...] | None = None,
) -> tuple[nn.Module, InputSpec]:
    """Build a model from its name.

    Args:
        name: ``torchvision:NAME``, ``timm:NAME``, ``transformers:NAME`` (a model type such as ``bert``,
            or a class) or
            ``package.module:callable`` (called without arguments, returns a module).
        weights: A safetensors file with the model's state; random weights without it.
        seed: Decides the random weights; the caller's random state stays as it was.
        input_shape: Of one sample, where the model's own is not known or not wanted.

    Raises:
        ModelError: If there is no such model, its package is not installed, or the weights do not fit.
    """
    source, separator, rest = name.partition(":")
    if not separator or not source or not rest:
        raise ModelError(
            "a model is torchvision:NAME, timm:NAME, transformers:NAME or package.module:callable, "
            f"got {name!r}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, spec = _SOURCES[source](rest) if source in _SOURCES else _own(source, rest)
    if weights is not None:
        load_weights(model, weights)
    return model, spec if input_shape is None else InputSpec(
        shape=input_shape, dtype=spec.dtype, below=spec.below
    )


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a safetensors file into a model.

    Raises:
        ModelError: If the file cannot be read, or its tensors are not the model's.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read weights from {path}: {error}") from error
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise ModelError(f"{path} does not fit the model: {str(error).splitlines()[-1].strip()}") from error
    for what, names in (("lacks", missing), ("has, and the model has not,", unexpected)):
        if names:
            raise ModelError(f"{path} {what} {len(names)} tensors, first {sorted(names)[0]!r}")


# ------------------------------------------------------------------------------------------ sources


def _torchvision(name: str) -> tuple[nn.Module, InputSpec]:
    _require("torchvision", "upriver[vision]")
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise _unknown("torchvision", name, known)
    return models.get_model(name, weights=None), InputSpec(shape=_torchvision_shape(models, name))


def _torchvision_shape(models: Any, name: str) -> tuple[int, ...]:
    """The crop that the published weights were trained for."""
    try:
        size = models.get_model_weights(name).DEFAULT.transforms.keywords["crop_size"]
    except (AttributeError, KeyError, ValueError):
        return IMAGE_SHAPE
    return (3, size, size)


def _timm(name: str) -> tuple[nn.Module, InputSpec]:
    _require("timm", "upriver[models]")
    timm = importlib.import_module("timm")
    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models())
    model = timm.create_model(name, pretrained=False)
    return model, InputSpec(shape=tuple(model.default_cfg.get("input_size", IMAGE_SHAPE)))


def _transformers(name: str) -> tuple[nn.Module, InputSpec]:
    """A classifier of that model type, or that class, by its default configuration."""
    _require("transformers", "upriver[models]")
    transformers = importlib.import_module("transformers")
    if isinstance(getattr(transformers, name, None), type):
        model_class = getattr(transformers, name)
        config = model_class.config_class()
        build: Callable[[], Any] = lambda: model_class(config)  # noqa: E731
    elif name in transformers.CONFIG_MAPPING:
        config = transformers.AutoConfig.for_model(name)
        auto = _auto_class(transformers, config)
        build = lambda: auto.from_config(config)  # noqa: E731
    else:
        raise _unknown("transformers", name, transformers.CONFIG_MAPPING.keys())
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0  # else GPT-2 and its kin refuse a batch of more than one
    config.use_cache = False
    model = build()
    if model.main_input_name == "pixel_values":
        size = getattr(config, "image_size", IMAGE_SHAPE[-1])
        return model, InputSpec(shape=(getattr(config, "num_channels", 3), size, size))
    return model, InputSpec(shape=(TOKENS,), dtype=torch.int64, below=config.vocab_size)


def _auto_class(transformers: Any, config: Any) -> Any:
    """The classifier family that knows this configuration."""
    for family in ("AutoModelForSequenceClassification", "AutoModelForImageClassification"):
        auto = getattr(transformers, family)
        if type(config) in auto._model_mapping:
            return auto
    raise ModelError(f"transformers has no classifier for model type {config.model_type!r}")


def _own(module_name: str, callable_name: str) -> tuple[nn.Module, InputSpec]:
    """A user's own callable; the working directory counts, as it does for ``python -m``."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise ModelError(f"there is no module {error.name!r} to take {callable_name!r} from") from error
        raise
    factory = getattr(module, callable_name, None)
    if not callable(factory):
        raise ModelError(f"module {module_name!r} has no callable {callable_name!r}")
    model = factory()
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{module_name}:{callable_name} must return a torch module, got {type(model).__name__}"
        )
    return model, InputSpec(shape=IMAGE_SHAPE)


_SOURCES: dict[str, Callable[[str], tuple[nn.Module, InputSpec]]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "transformers": _transformers,
}


def _require(package: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ModelError(f"{package} is not installed; install {extra!r} for {package}: models")
    # All three packages import torchvision where it is installed.
    if importlib.util.find_spec("torchvision") is not None:
        from upriver._torchvision import ensure_torchvision

        ensure_torchvision()


def _unknown(source: str, name: str, known: Iterable[str]) -> ModelError:
    near = difflib.get_close_matches(name, list(known), n=3)
    hint = f"; near are {', '.join(near)}" if near else ""
    return ModelError(f"{source} has no model {name!r}{hint}")
