"""Build models by name: torchvision:resnet18, timm:NAME, transformers:NAME, package.module:callable.

Nothing is downloaded: a model is built from its configuration with random weights from a fixed seed. Sizes
are published ones (see :mod:`upriver.program.models.transformers_configs`).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from upriver.errors import ConfigError, ModelError
from upriver.extras import why_missing
from upriver.program.capture.input_spec import InputSpec, ModelInputs
from upriver.program.example_inputs import Example
from upriver.program.models.transformers_configs import build, inputs_of
from upriver.text import near_names

__all__ = ["IMAGE_SHAPE", "InputSpec", "ModelInputs", "load_model"]

IMAGE_SHAPE = (3, 224, 224)
"""Input of a vision model that declares no size: the size that ImageNet models are trained at."""


def load_model(
    name: str,
    *,
    seed: int = 0,
    input_shape: tuple[int, ...] | None = None,
) -> tuple[nn.Module, ModelInputs]:
    """Build a model from its name.

    Args:
        name: ``torchvision:NAME``, ``timm:NAME``, ``transformers:NAME`` (a model type such as ``bert``, or a
            class) or ``package.module:callable`` (called without arguments; returns a module, or a module and
            an example of its inputs).
        seed: Decides the random weights. The caller's random state stays unchanged.
        input_shape: Shape of one sample, to replace the model's own or supply an unknown one.

    Raises:
        ModelError: If there is no such model, or its package is not installed.
        ConfigError: If `input_shape` is given for an example that came with the model, or that example is
            invalid.
    """
    source, separator, rest = name.partition(":")
    if not separator or not source or not rest:
        raise ModelError(
            "a model is torchvision:NAME, timm:NAME, transformers:NAME or package.module:callable, "
            f"got {name!r}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, inputs = _SOURCES[source](rest) if source in _SOURCES else _own(source, rest)
    return model, inputs if input_shape is None else inputs.reshaped(input_shape)


# ------------------------------------------------------------------------------------------ sources


def _image(shape: tuple[int, ...] = IMAGE_SHAPE) -> ModelInputs:
    return ModelInputs(positional=(InputSpec(shape=shape),))


def _torchvision(name: str) -> tuple[nn.Module, ModelInputs]:
    _require("torchvision", "vision")
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise _unknown("torchvision", name, known)
    # Inception and GoogLeNet come with auxiliary heads. Without `init_weights` they would warn.
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return models.get_model(name, weights=None, **options), _image(_torchvision_shape(models, name))


def _torchvision_shape(models: Any, name: str) -> tuple[int, ...]:
    """Return the crop size that the published weights were trained with, as an image shape."""
    try:
        size = models.get_model_weights(name).DEFAULT.transforms.keywords["crop_size"]
    except (AttributeError, KeyError, ValueError):
        return IMAGE_SHAPE
    return (3, size, size)


def _timm(name: str) -> tuple[nn.Module, ModelInputs]:
    _require("timm", "models")
    timm = importlib.import_module("timm")
    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models())
    model = timm.create_model(name, pretrained=False)
    return model, _image(tuple(model.default_cfg.get("input_size", IMAGE_SHAPE)))


def _transformers(name: str) -> tuple[nn.Module, ModelInputs]:
    """Return a model of that class, or a classifier of that model type."""
    _require("transformers", "models")
    transformers = importlib.import_module("transformers")
    model = build(transformers, name)
    if model is None:
        raise _unknown("transformers", name, [*transformers.CONFIG_MAPPING.keys(), *dir(transformers)])
    return model, inputs_of(model, name)


def _own(module_name: str, callable_name: str) -> tuple[nn.Module, ModelInputs]:
    """Build a model from a user's callable. The working directory is importable, as for ``python -m``."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    name = f"{module_name}:{callable_name}"
    module = _import(module_name, callable_name)
    factory = getattr(module, callable_name, None)
    if not callable(factory):
        raise ModelError(f"module {module_name!r} has no callable {callable_name!r}")
    match factory if isinstance(factory, nn.Module) else _call(factory, name):
        case nn.Module() as model:
            return model, _image()
        case (nn.Module() as model, example):
            try:
                return model, ModelInputs(given=Example.of(example))
            except ConfigError as error:
                raise ConfigError(
                    f"{name} must return a torch module, or a module and an example of its inputs; its "
                    f"second value is no example: {error}"
                ) from None
        case other:
            raise ModelError(
                f"{name} must return a torch module, or a module and an example of its inputs, got "
                f"{type(other).__name__}"
            )


def _import(module_name: str, callable_name: str) -> Any:
    try:
        with _stdout_kept_clean():
            return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise ModelError(f"there is no module {error.name!r} to take {callable_name!r} from") from error
        raise ModelError(f"module {module_name!r} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:  # any error of the user's module
        raise ModelError(
            f"module {module_name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def _call(factory: Callable[..., Any], name: str) -> Any:
    try:
        with _stdout_kept_clean():
            return factory()
    except (Exception, SystemExit) as error:  # any error of the user's function
        raise ModelError(f"{name} raised {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _stdout_kept_clean() -> Iterator[None]:
    """Redirect the output of a user's code to stderr, also below Python, to keep it out of results."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # closed: no output can get there
        kept = -1
    try:
        if kept >= 0:
            with contextlib.suppress(OSError):  # no stderr either
                os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if kept >= 0:
            os.dup2(kept, 1)
            os.close(kept)


_SOURCES: dict[str, Callable[[str], tuple[nn.Module, ModelInputs]]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "transformers": _transformers,
}


def _require(package: str, extra: str) -> None:
    why = why_missing(f"a {package}: model", extra, package)
    if why:
        raise ModelError(why)
    # All three packages import torchvision if it is installed.
    if importlib.util.find_spec("torchvision") is not None:
        from upriver._torchvision import ensure_torchvision

        ensure_torchvision()


def _unknown(source: str, name: str, known: Iterable[str]) -> ModelError:
    near = near_names(name, known)
    hint = f"; near are {', '.join(near)}" if near else ""
    return ModelError(f"{source} has no model {name!r}{hint}")
