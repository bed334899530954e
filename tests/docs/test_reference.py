"""Check that the reference shows every public name, and that generated pages say what the code says."""

from __future__ import annotations

import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import upriver
from scripts.site_pages import command_line_page, http_page
from upriver import coldstart, errors, policies
from upriver.cli.app import app
from upriver.server.http.openapi import document
from upriver.server.http.openapi_components import ERRORS

API = Path(__file__).parents[2] / "docs" / "reference" / "api"
SHOWN = [name for page in API.glob("*.md") for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)]


def test_every_exported_name_is_shown_once() -> None:
    exported = {f"upriver.{name}" for name in upriver.__all__} - {"upriver.__version__", "upriver.coldstart"}
    exported |= {f"upriver.coldstart.{name}" for name in coldstart.__all__}
    exported -= {"upriver.UpriverError"}  # among the errors
    assert exported - set(SHOWN) == set()
    assert len(SHOWN) == len(set(SHOWN))


def test_every_policy_is_shown() -> None:
    named = {*policies.POLICIES, *policies.REQUEST_POLICIES, *policies.OFFLOAD_POLICIES}
    assert {f"upriver.policies.{name}" for name in named} - set(SHOWN) == set()


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_shown_exists_and_has_a_docstring(name: str) -> None:
    assert inspect.getdoc(pkgutil.resolve_name(name))


def test_errors_are_shown_whole() -> None:
    assert "upriver.errors" in SHOWN
    kinds = [
        each
        for each in vars(errors).values()
        if isinstance(each, type) and each.__module__ == errors.__name__
    ]
    assert all(each.__doc__ for each in kinds)


def test_the_command_line_page_has_every_command_with_its_options() -> None:
    page = command_line_page()
    for command in app.registered_commands:
        assert f"## `upriver {command.name}`" in page
    assert page.startswith("# Command line\n")
    assert "`--store " in page and "`--version`" in page


def test_the_http_page_has_every_route_status_and_field() -> None:
    api = document()
    sections = dict(re.findall(r"^##+ (.+)\n((?:(?!##).*\n)*)", http_page(api) + "\n", re.M))
    for path, item in api["paths"].items():
        for method in item.keys() - {"parameters"}:
            section = sections[f"{method.upper()} {path}"]
            listed = re.findall(r"rrors \[as below\]\(#errors\): (.+)\.$", section, re.M)
            shown = re.findall(r"^(?:\*\*|\| )(\d+)(?:\*\*: | \|)", section, re.M)
            shown += [status for line in listed for status in line.split(", ")]
            assert sorted(item[method]["responses"]) == sorted(shown), (method, path)
            assert item[method]["description"] in section
    assert re.findall(r"^\| (\d+) \|", sections["Errors"], re.M) == [str(status) for status in ERRORS]
    for name, schema in api["components"]["schemas"].items():
        fields = re.findall(r"^\| `(\w+)` \|", sections[name], re.M)
        assert fields == list(schema.get("properties", {}))


def test_the_http_page_says_forms_and_access() -> None:
    page = http_page(document())
    assert "| `bytes` | query | integer (≥ 0, ≤ 67108864) | no |" in page
    assert "| `error.code` | string | yes | A stable name;" in page
    assert '| `on_bad_sample` | `"fail"` or `"skip"` | no |' in page
    assert "Open to everyone." in page and "Access: bearer or certificate." in page
    assert (
        "with request frames of [RunRequest](#runrequest), data frames of [DataHeader](#dataheader)" in page
    )
