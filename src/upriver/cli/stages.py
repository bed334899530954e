"""Parse input stages of the command line or a file: ``train``, ``eval``, or a list of stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upriver.cli.config import load_toml
from upriver.errors import ConfigError

if TYPE_CHECKING:
    from upriver.pipeline import InputChain

RESIZE_FOR_CROP = 256 / 224
"""Shorter side before the centre crop, relative to the crop: the usual evaluation of ImageNet models."""


def input_stages(text: str, *, size: int = 224) -> InputChain:
    """Return the stages of a preset, or of a TOML file of ``[[stage]]`` tables.

    Args:
        text: ``train`` (random crop, flip), ``eval`` (centre crop), or the path of a file.
        size: Side in pixels of a preset's output.

    Raises:
        ConfigError: If the preset or the file does not exist, or the file is invalid.
    """
    from upriver.pipeline import InputChain, imagenet_eval, imagenet_train

    if text == "train":
        return InputChain(imagenet_train(size))
    if text == "eval":
        return InputChain(imagenet_eval(size, round(size * RESIZE_FOR_CROP)))
    if not text.endswith(".toml"):
        raise ConfigError(f"input stages are train, eval or a .toml file, got {text!r}")
    document = load_toml(Path(text))
    if list(document) != ["stage"] or not isinstance(document["stage"], list):
        raise ConfigError(
            f"{text} must hold [[stage]] tables and nothing else, got {', '.join(document) or 'nothing'}"
        )
    return InputChain.from_json([_whole(table) for table in document["stage"]])


def _whole(table: object) -> object:
    """Return a stage with its defaults filled in: a stored chain names every parameter, a file need not."""
    from upriver.pipeline.stages.registry import STAGES

    if not isinstance(table, Mapping) or table.get("stage") not in STAGES:
        return table
    stage = STAGES[table["stage"]]
    defaults: dict[str, Any] = {
        field.name: field.default for field in fields(stage) if field.default is not MISSING
    }
    return {**{name: list(v) if isinstance(v, tuple) else v for name, v in defaults.items()}, **table}
