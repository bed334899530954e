"""Define options that several commands share, and parse their text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from upriver.errors import ConfigError
from upriver.text import near_names, parse_rate

if TYPE_CHECKING:
    from torch import nn

    from upriver.program.graph.liveness import Granularity

ModelArgument = Annotated[
    str, typer.Argument(help="torchvision:NAME, timm:NAME, transformers:NAME or package.module:callable.")
]
WeightsOption = Annotated[
    Path | None,
    typer.Option(help="Safetensors file, index of several, or folder; random weights without it."),
]
MicroBatchOption = Annotated[int, typer.Option(help="Samples the captured stages see at once.")]
InputShapeOption = Annotated[
    str | None, typer.Option(metavar="C,H,W", help="Shape of one sample, where the model does not tell.")
]
AutocastOption = Annotated[
    str | None, typer.Option(metavar="bfloat16|float16", help="Run under autocast to this type.")
]
GranularityOption = Annotated[
    str | None,
    typer.Option(metavar="module|op", help="Cuts behind modules (default), or behind every operator."),
]
StoreOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="Store option (endpoint, region); repeatable.")
]


def fill(model: nn.Module, weights: Path | None) -> None:
    """Load the weights of ``--weights`` into a model; do nothing without the option.

    Raises:
        UpriverError: If the weights do not exist, or do not fit the model.
    """
    if weights is not None:
        from upriver.coldstart.plain_load import load_weights

        load_weights(model, weights)


def store_options(given: list[str] | None) -> dict[str, str]:
    """Parse the values of ``--option``."""
    return name_values(given, "--option")


def name_values(given: list[str] | None, option: str) -> dict[str, str]:
    """Parse ``NAME=VALUE`` texts."""
    values: dict[str, str] = {}
    for text in given or []:
        name, separator, value = text.partition("=")
        if not name or not separator:
            raise ConfigError(f"{option} must be NAME=VALUE, got {name!r}")
        values[name] = value
    return values


def parse_shape(text: str | None) -> tuple[int, ...] | None:
    """Parse a shape such as ``3,224,224``."""
    if text is None:
        return None
    parts = text.split(",")
    if not all(_is_positive(part) for part in parts):
        raise ConfigError(
            f"--input-shape must be positive whole numbers as in 3,224,224, got {_shortened(text)}"
        )
    return tuple(int(part) for part in parts)


def parse_counts(text: str, option: str) -> tuple[int, ...]:
    """Parse counts such as ``1,16``, each once."""
    parts = text.split(",")
    if not all(_is_positive(part) for part in parts):
        raise ConfigError(f"{option} must be positive whole numbers as in 1,16, got {_shortened(text)}")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _is_positive(part: str) -> bool:
    # More digits exceed any size, and Python parses no more than some thousands.
    part = part.strip()
    return part.isdecimal() and len(part) <= 18 and int(part) > 0


def _shortened(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}…"


def parse_bandwidth(text: str, option: str = "--bandwidth") -> float:
    """Parse a rate such as ``50Mbit`` or ``10MB`` as bytes per second.

    Raises:
        ConfigError: If it is no rate, or more than any link has; the message names the option.
    """
    try:
        rate = parse_rate(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    from upriver.types import BANDWIDTH  # imports torch, which a mistyped option must not wait for

    BANDWIDTH.check(f"{option} in bytes per second", rate)
    return rate


MOST_POINTS = 200
"""Most points of a sweep; a picture would not show more apart."""


def parse_sweep(text: str) -> tuple[float, ...]:
    """Parse ``bandwidth=50Mbit..12Gbit`` (logarithmic points) or ``bandwidth=A,B,C`` as bytes per second."""
    from upriver.report.sweep import logarithmic

    name, _, values = text.partition("=")
    if name.strip() != "bandwidth" or not values.strip():
        raise ConfigError(f"--sweep must be bandwidth=A..B or bandwidth=A,B,C, got {text!r}")
    first, between, last = values.partition("..")
    if between:
        ends = parse_bandwidth(first, "--sweep"), parse_bandwidth(last, "--sweep")
        if ends[0] >= ends[1]:
            raise ConfigError(f"--sweep must go from a lower to a higher bandwidth, got {values!r}")
        return logarithmic(*ends)
    rates = tuple(parse_bandwidth(part, "--sweep") for part in values.split(","))
    if len(rates) > MOST_POINTS:
        raise ConfigError(f"--sweep takes at most {MOST_POINTS} bandwidths, got {len(rates)}")
    return rates


def check_micro_batch(micro_batch: int) -> int:
    """Check that a micro-batch has at least one sample, and no more than a program may take; return it.

    Raises:
        ConfigError: If it has not.
    """
    from upriver.program.graph.caps import DEFAULT_CAPS

    if not 1 <= micro_batch <= DEFAULT_CAPS.micro_batch:
        raise ConfigError(f"micro_batch must be 1 to {DEFAULT_CAPS.micro_batch}, got {micro_batch}")
    return micro_batch


def check_granularity(granularity: str | None) -> Granularity:
    """Check the granularity of cuts, and return it."""
    match granularity:
        case None | "module":
            return "module"
        case "op":
            return "op"
    raise ConfigError(f"--granularity must be module or op, got {granularity!r}")


def check_module(model: nn.Module, name: str | None) -> None:
    """Check that a named module is in the model.

    Raises:
        ConfigError: If it is not; the message offers similar names.
    """
    names = [known for known, _ in model.named_modules() if known]
    if name is not None and name not in names:
        near = near_names(name, names) or names[:6]
        raise ConfigError(f"the model has no module {name!r}; near are {', '.join(near)}")
