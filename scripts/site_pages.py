"""Generate the pages of the site that follow from the code, as a hook of MkDocs.

Each build makes them anew, and no folder holds them, so they cannot go stale. They are the command line, the
HTTP API and the list of decisions.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from upriver.server.http.openapi import document

Json = dict[str, Any]

DECISIONS = "decisions/index.md"

BOUNDS = {
    "minimum": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "minLength": "length ≥",
    "maxLength": "length ≤",
}
"""Keywords of JSON Schema that bound a value, with their signs."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put every decision into the nav, below their list."""
    [section] = [entry for entry in config.nav or () if entry.get("Decisions") == DECISIONS]
    section["Decisions"] = [DECISIONS, *(f"decisions/{path.name}" for path in decisions(config))]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        DECISIONS: decisions_page(config),
        "reference/cli.md": command_line_page(),
        "reference/http.md": http_page(document()),
    }
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    return files


def decisions(config: MkDocsConfig) -> list[Path]:
    """Return the pages of decisions, by number."""
    return sorted(Path(config.docs_dir, "decisions").glob("[0-9]*.md"))


def decisions_page(config: MkDocsConfig) -> str:
    """Return the list of all decisions with their titles."""
    lines = ["# Decisions", "", "One page for each choice that somebody might want to reverse.", ""]
    for path in decisions(config):
        title = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines)


def command_line_page() -> str:
    """Return the reference of the command line, as typer writes it."""
    docs = [sys.executable, "-m", "typer", "upriver.cli.app", "utils", "docs", "--name", "upriver"]
    page = subprocess.run([*docs, "--title", "Command line"], capture_output=True, text=True, check=True)
    # The list of commands cuts each sentence off, and the sections below it have the whole one.
    return re.sub(r"\*\*Commands\*\*:\n\n(\* .*\n)+", "", page.stdout)


def http_page(api: Json) -> str:
    """Return the reference of the routes and of their messages, from an OpenAPI document."""
    lines = [
        "# HTTP API",
        "",
        "The routes of a near-data server, which returns this as OpenAPI at `GET /openapi.json`. "
        "[Protocol](../protocol.md) says what frames hold and what a client must do.",
        "",
        "Access is by a token (`bearer`), by the token as a password (`basic`), or by a client certificate. "
        "A server with neither tokens nor certificates answers on loopback alone.",
        "",
    ]
    for path, item in api["paths"].items():
        for method in [method for method in item if method != "parameters"]:
            lines += operation_section(
                f"{method.upper()} {path}", item[method], item.get("parameters", []), api
            )
    lines += ["## Errors", "", "Errors have a body of the form [Error](#error), but for `HEAD`.", ""]
    responses = api["components"]["responses"].items()
    lines += table(("status", "when"), [(name[1:], answer["description"]) for name, answer in responses])
    lines += ["## Messages", ""]
    for name, schema in sorted(api["components"]["schemas"].items()):
        lines += [f"### {name}", "", schema.get("description", ""), ""]
        lines += table(("field", "form", "needed", "meaning"), list(field_rows(schema)))
    return "\n".join(lines)


def operation_section(title: str, operation: Json, shared: Sequence[Json], api: Json) -> Iterator[str]:
    """Yield the lines about one route."""
    schemes = [name for each in operation.get("security", api["security"]) for name in each]
    access = f"Access: {' or '.join(schemes)}." if schemes else "Open to everyone."
    yield from (f"## {title}", "", f"{operation['summary']}. {access}", "", operation["description"], "")
    parameters = [
        (f"`{each['name']}`", each["in"], form(each["schema"]), needed(each["required"]), each["description"])
        for each in (*shared, *operation.get("parameters", ()))
    ]
    yield from table(("parameter", "in", "form", "needed", "meaning"), parameters)
    if body := operation.get("requestBody"):
        yield from (f"**Body**: {media(body['content'])}. {body['description']}", "")
    responses = operation["responses"].items()
    for status, answer in responses:
        if int(status) < 400:
            yield from (f"**{status}**: {media(answer.get('content', {}))}. {answer['description']}", "")
    own = [(status, answer) for status, answer in responses if int(status) >= 400 and "description" in answer]
    yield from table(("status", "when"), [(status, answer["description"]) for status, answer in own])
    others = [status for status, answer in responses if int(status) >= 400 and (status, answer) not in own]
    if others:
        yield from (f"{'Other errors' if own else 'Errors'} [as below](#errors): {', '.join(others)}.", "")


def field_rows(schema: Json, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows about the fields of a message, nested ones by their path."""
    for name, field in schema.get("properties", {}).items():
        required = name in schema.get("required", ())
        yield f"`{prefix}{name}`", form(field), needed(required), field.get("description", "")
        yield from field_rows(field, f"{prefix}{name}.")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table without columns that are empty, or nothing without rows."""
    columns = [number for number in range(len(head)) if any(row[number] for row in rows)]
    if rows:
        for row in (head, ["---"] * len(head), *rows):
            yield f"| {' | '.join(row[number] for number in columns)} |"
        yield ""


def media(content: Json) -> str:
    """Return media types with the forms of their bodies."""
    return " or ".join(f"`{kind}` {bodies(each)}".rstrip() for kind, each in content.items()) or "no body"


def bodies(content: Json) -> str:
    """Return the form of a body, or the headers of its frames."""
    if headers := content.get("x-frames"):
        return "with " + ", ".join(f"{kind} frames of {form(schema)}" for kind, schema in headers.items())
    return form(content["schema"]) if "schema" in content else ""


def needed(required: bool) -> str:
    """Return the word for a field or parameter."""
    return "yes" if required else "no"


def form(schema: Json) -> str:
    """Return the form of a value in a few words, with links to the messages."""
    match schema:
        case {"$ref": reference}:
            name = reference.rpartition("/")[2]
            return f"[{name}](#{name.lower()})"
        case {"anyOf": choices} | {"oneOf": choices}:
            return " or ".join(map(form, choices))
        case {"enum": values}:
            return " or ".join(f"`{json.dumps(value)}`" for value in values)
        case {"type": "array", "items": dict(each)}:
            return f"array of {form(each)}"
        case {"type": "array", "prefixItems": each}:
            return f"({', '.join(map(form, each))})"
        case {"type": "object", "additionalProperties": dict(each)}:
            return f"object of {form(each)}"
        case {"type": kind}:
            bounds = [f"{sign} {schema[key]}" for key, sign in BOUNDS.items() if key in schema]
            bounds += [f"like `{schema['pattern']}`"] if "pattern" in schema else []
            return f"{kind} ({', '.join(bounds)})".replace("|", "\\|") if bounds else kind
    return "any"
