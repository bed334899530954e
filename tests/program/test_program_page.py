"""Check that the page on program files describes every field, and states every cap correctly."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import msgspec
import pytest

from upriver.program.graph import schema as format
from upriver.program.graph import weights_file
from upriver.program.graph.caps import DEFAULT_CAPS, GraphCaps

PAGE = (Path(__file__).parents[2] / "docs" / "program-file.md").read_text(encoding="utf-8")

OPENINGS = {
    format.Graph: "## graph.json",
    format.Value: "A **value**",
    format.TensorSpec: "A **spec**",
    format.Weight: "A **weight**",
    format.Node: "A **node**",
    format.Stage: "A **stage**",
}


def table_after(opening: str) -> dict[str, list[str]]:
    """Return the first table after some words: the other cells of each row by its first cell."""
    found: dict[str, list[str]] = {}
    for line in PAGE[PAGE.index(opening) :].splitlines():
        if line.startswith("| `"):
            first, *rest = [cell.strip() for cell in line.strip("|").split(" | ")]
            found[first.strip("` ")] = rest
        elif found:
            break
    return found


@pytest.mark.parametrize("struct", OPENINGS, ids=lambda struct: struct.__name__)
def test_every_field_of_every_object_is_there_in_its_order(struct: type[msgspec.Struct]) -> None:
    expected = [field.encode_name for field in msgspec.structs.fields(struct)]
    assert list(table_after(OPENINGS[struct])) == expected


def test_every_cap_is_there_with_its_default() -> None:
    said = {name: float(cells[0]) for name, cells in table_after("## Caps").items()}
    assert said == {field.name: getattr(DEFAULT_CAPS, field.name) for field in fields(GraphCaps)}


def test_versions_and_types_are_those_of_the_code() -> None:
    assert f'`"{format.SCHEMA}"`' in table_after("## graph.json")["schema"][1]
    types = table_after("A **spec**")["dtype"][1]
    assert [word.strip("` ") for word in types.removeprefix("one of").split(",")] == list(format.DTYPES)
    codes = PAGE.split("- Types are ")[1].split(", whose")[0].replace(" and", ",")
    assert [word.strip("` \n") for word in codes.split(",")] == list(weights_file._CODES.values())


def test_every_form_of_an_argument_is_there() -> None:
    said = PAGE.split("An **argument**")[1].split("A **stage**")[0]
    for name in format._MEMORY_FORMATS:
        assert f"`{name}`" in said
    for form in ("tensor", "float", "dtype", "memory_format", "layout", "device"):
        assert f'`{{"{form}": ' in said
