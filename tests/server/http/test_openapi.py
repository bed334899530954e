"""Test the OpenAPI document: well-formed, and true of this server."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.running import ask, refused
from upriver.protocol import Info, Load, decode_info
from upriver.server import ServerConfig, create_app
from upriver.server.app import PROBE_BYTES
from upriver.server.http import openapi
from upriver.server.http.auth import OPEN_PATHS, READING
from upriver.server.http.errors import STATUS
from upriver.server.http.openapi import FRAMES
from upriver.server.http.openapi import PROBE_BYTES as DOCUMENTED_PROBE_BYTES
from upriver.server.http.openapi_components import ERRORS
from upriver.server.http.response_stream import FrameStream

document = functools.cache(openapi.document)
"""Describe the routes; the tests look at it hundreds of times, and change nothing."""

PROTOCOL_PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"
HTTP_ITSELF = {408, 431, 500}
"""Statuses to which no error is mapped by name: the first two are HTTP's, the last is for the rest."""


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield path, method and description of each operation."""
    for path, item in document()["paths"].items():
        for method, operation in item.items():
            if method != "parameters":
                yield path, method.upper(), operation


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in the document."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from nodes(each)


def resolved(reference: str) -> Any:
    assert reference.startswith("#/")
    found: Any = document()
    for step in reference[2:].split("/"):
        found = found[step]
    return found


def test_every_route_is_there_with_its_methods_and_no_other() -> None:
    app = create_app(ServerConfig(stores={"default": "memory://openapi"}))
    served = {(route.path, method) for route in app.routes for method in route.methods}  # type: ignore[attr-defined]
    implied = {(path, "HEAD") for path, method in served if method == "GET"}
    assert {(path, method) for path, method, _ in operations()} == served - implied


def test_every_status_that_an_error_can_have_is_there() -> None:
    assert set(ERRORS) == {status for _, status in STATUS} | HTTP_ITSELF
    told = {int(status) for _, _, operation in operations() for status in operation["responses"]}
    assert told == set(ERRORS) | {200, 201}


def test_the_document_is_as_openapi_wants_it() -> None:
    whole = document()
    assert re.fullmatch(r"3\.1\.\d+", whole["openapi"])
    assert {"title", "version"} <= set(whole["info"])
    names = [operation["operationId"] for _, _, operation in operations()]
    assert len(names) == len(set(names))
    for path, method, operation in operations():
        given = [*operation.get("parameters", ()), *whole["paths"][path].get("parameters", ())]
        in_path = {each["name"] for each in given if each["in"] == "path"}
        assert in_path == set(re.findall(r"{(\w+)}", path)), path
        assert all(each["required"] for each in given if each["in"] == "path")
        assert operation["summary"] and operation["responses"], (path, method)
        assert ("requestBody" in operation) == (method in ("PUT", "POST"))
        for status, answer in operation["responses"].items():
            answer = resolved(answer["$ref"]) if "$ref" in answer else answer
            assert answer["description"], (path, status)
            assert ("content" in answer) == (method != "HEAD"), (path, status)


def test_every_route_parameter_and_error_is_described() -> None:
    for path, method, operation in operations():
        summary, description = operation["summary"], operation["description"]
        assert "\n" not in summary and not summary.endswith("."), (path, method)
        assert 2 <= len(re.findall(r"[.](?: |$)", description)) <= 5, (path, method)
        for each in (*operation.get("parameters", ()), *document()["paths"][path].get("parameters", ())):
            assert each["description"].endswith("."), (path, each["name"])
        for status, answer in operation["responses"].items():
            said = answer.get("description") or resolved(answer["$ref"])["description"]
            assert said.endswith("."), (path, status)


def test_every_field_of_a_message_is_described() -> None:
    for name, schema in document()["components"]["schemas"].items():
        for field, form in schema["properties"].items():
            assert "description" in form or name == "Error", (name, field)


def test_references_lead_somewhere_and_patterns_are_no_pythons() -> None:
    for node in nodes(document()):
        if "$ref" in node:
            assert isinstance(resolved(node["$ref"]), dict)
        if isinstance(node.get("pattern"), str):
            re.compile(node["pattern"])
            assert not re.search(r"\\[AZ]", node["pattern"])


def test_health_is_open_and_nothing_else_is() -> None:
    anyone = {path for path, _, operation in operations() if operation.get("security") == []}
    assert anyone == OPEN_PATHS
    for path, _, operation in operations():
        assert ("401" in operation["responses"]) == (path not in anyone)
    schemes = document()["components"]["securitySchemes"]
    for node in [document(), *(operation for _, _, operation in operations())]:
        assert {name for way in node.get("security", ()) for name in way} <= set(schemes)


def test_a_password_is_named_where_the_server_takes_one() -> None:
    for path, method, operation in operations():
        ways = operation.get("security", document()["security"])
        assert ({"basic": []} in ways) == (method in READING and path not in OPEN_PATHS), (path, method)


def test_it_says_what_the_code_says() -> None:
    assert DOCUMENTED_PROBE_BYTES == PROBE_BYTES
    assert FrameStream.media_type == FRAMES
    schemas = document()["components"]["schemas"]
    for kind in (Info, Load):
        assert set(schemas[kind.__name__]["properties"]) == set(kind.__struct_fields__)
    assert "Attributes:" not in json.dumps(schemas)


def test_the_page_on_the_protocol_has_the_same_statuses_and_codes() -> None:
    part = PROTOCOL_PAGE.read_text(encoding="utf-8").split("## Errors")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d{3}) \| ([^|]*) \|", part, re.MULTILINE)
    written = {(int(status), code) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    assert {status for status, _ in written} == set(ERRORS) | {405}
    for kind, status in STATUS:
        assert (status, kind.code) in written, kind.__name__


@pytest.mark.full
def test_the_server_hands_it_out(server: Any) -> None:
    status, headers, body = ask(server, "GET", "/openapi.json")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(body) == json.loads(msgspec.json.encode(document()))


@pytest.mark.parametrize("path", ["/v1/info", "/v1/load"])
def test_an_answer_has_the_fields_that_are_told(server: Any, path: str) -> None:
    found = json.loads(ask(server, "GET", path)[2])
    kind = {"/v1/info": "Info", "/v1/load": "Load"}[path]
    schema = document()["components"]["schemas"][kind]
    assert set(found) == set(schema["properties"])
    assert set(schema["required"]) <= set(found)
    if kind == "Info":
        assert decode_info(json.dumps(found).encode()).caps.pixels > 0


def test_an_error_has_the_form_that_is_told(server: Any) -> None:
    _, error = refused(server, b"nonsense")
    fields = document()["components"]["schemas"]["Error"]["properties"]["error"]
    assert set(fields["required"]) <= set(error) <= set(fields["properties"])
