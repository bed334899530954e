"""Check that the glossary names classes and modules that exist, and each noun once."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "concepts.md"
GLOSSARY = PAGE.read_text(encoding="utf-8").partition("## Glossary")[2]
ROWS = re.findall(r"^\|([^|]+)\|[^|]+\|([^|]*)\|$", GLOSSARY, re.MULTILINE)[2:]
"""Nouns and classes of each row, without the two lines of the table's head."""


def found(name: str) -> object:
    """Return a public name, or a class or module of the package.

    Raises:
        AttributeError: If there is none.
        ModuleNotFoundError: If there is none.
    """
    inside, _, last = name.rpartition(".")
    try:
        return getattr(importlib.import_module(f"upriver.{inside}".rstrip(".")), last)
    except AttributeError:
        return importlib.import_module(f"upriver.{name}")


def test_glossary_names_what_exists() -> None:
    names = [name for _, cell in ROWS for name in re.findall(r"`([^`]+)`", cell)]
    assert len(names) > 20
    for name in names:
        assert found(name) is not None


def test_glossary_has_each_noun_once() -> None:
    nouns = [noun.strip() for cell, _ in ROWS for noun in cell.split(",")]
    assert len(nouns) > 30
    assert len(nouns) == len(set(nouns))
