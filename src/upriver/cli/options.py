"""Options that several commands take, and what their text means."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from upriver.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

ModelArgument = Annotated[
    str, typer.Argument(help="torchvision:NAME, timm:NAME, transformers:NAME or package.module:callable.")
]
WeightsOption = Annotated[Path | None, typer.Option(help="Safetensors file; random weights without it.")]
MicroBatchOption = Annotated[int, typer.Option(help="Samples the captured stages see at once.")]
InputShapeOption = Annotated[
    str | None, typer.Option(metavar="C,H,W", help="Shape of one sample, where the model does not tell.")
]
AutocastOption = Annotated[
    str | None, typer.Option(metavar="bfloat16|float16", help="Run under autocast to this type.")
]
StoreOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="Store option (endpoint, region); repeatable.")
]


def store_options(given: list[str] | None) -> dict[str, str]:
    """``NAME=VALUE`` texts as a mapping.

    Raises:
        ConfigError: If one of them has another form.
    """
    options: dict[str, str] = {}
    for text in given or []:
        name, separator, value = text.partition("=")
        if not name or not separator:
            raise ConfigError(f"--option must be NAME=VALUE, got {name!r}")
        options[name] = value
    return options


def parse_shape(text: str | None) -> tuple[int, ...] | None:
    """``3,224,224`` as numbers.

    Raises:
        ConfigError: If it is anything else.
    """
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--input-shape must be positive whole numbers as in 3,224,224, got {text!r}")
    return tuple(int(part) for part in parts)


def parse_counts(text: str, option: str) -> tuple[int, ...]:
    """``1,16`` as numbers, each once.

    Raises:
        ConfigError: If it is anything else.
    """
    parts = [part.strip() for part in text.split(",")]
    counts = tuple(dict.fromkeys(int(part) for part in parts if part.isdecimal()))
    if not all(part.isdecimal() for part in parts) or min(counts) < 1:
        raise ConfigError(f"{option} must be positive whole numbers as in 1,16, got {text!r}")
    return counts


def check_micro_batch(micro_batch: int) -> int:
    """A micro-batch has at least one sample.

    Raises:
        ConfigError: If it has not.
    """
    if micro_batch < 1:
        raise ConfigError(f"micro_batch must be at least 1, got {micro_batch}")
    return micro_batch


def check_module(model: nn.Module, name: str | None) -> None:
    """A module that is named must be in the model.

    Raises:
        ConfigError: If it is not; the message offers near names.
    """
    import difflib

    names = [known for known, _ in model.named_modules() if known]
    if name is not None and name not in names:
        near = difflib.get_close_matches(name, names, n=3) or names[:6]
        raise ConfigError(f"the model has no module {name!r}; near are {', '.join(near)}")
