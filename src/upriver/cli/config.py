"""Read TOML files strictly: an unknown key, a missing key or a wrong type is an error that names it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from upriver.errors import ConfigError
from upriver.text import near_names

Config = TypeVar("Config", bound=msgspec.Struct)


def read_toml(path: Path, schema: type[Config]) -> Config:
    """Read a file into a ``msgspec.Struct`` that forbids unknown fields.

    Raises:
        ConfigError: If the file cannot be read, is not TOML, or does not follow the schema.
    """
    return parse(load_toml(path), schema, where=str(path))


def load_toml(path: Path) -> dict[str, object]:
    """Read a TOML file as plain values."""
    try:
        return toml_values(path.read_bytes(), path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def toml_values(data: bytes, path: Path) -> dict[str, object]:
    """Return a TOML file's content as plain values.

    Raises:
        ConfigError: If it is not TOML; the message names the file.
    """
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def parse(values: object, schema: type[Config], *, where: str) -> Config:
    """Check plain values against a schema; the error names ``where``."""
    try:
        return msgspec.convert(values, schema)
    except msgspec.ValidationError as error:
        keys = schema.__struct_encode_fields__
        given = values if isinstance(values, Mapping) else {}
        near = [name for key in given if key not in keys for name in near_names(key, keys)]
        hint = f"near are {', '.join(dict.fromkeys(near))}; " if near else ""
        raise ConfigError(f"{where}: {error}; {hint}the keys are {', '.join(keys)}") from error
