"""Describe the parts that routes share in the OpenAPI document: message schemas, error responses, access."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from inspect import cleandoc
from typing import Any

import msgspec

from upriver.protocol import (
    DataHeader,
    FeaturesFound,
    Info,
    Load,
    ProfileRequest,
    RunRequest,
    StageCosts,
    Uploaded,
)
from upriver.protocol.messages import StatsHeader

Json = dict[str, Any]

ERRORS: Mapping[int, str] = {
    400: "The request is malformed, or a value is outside its limits. Do not repeat it unchanged.",
    401: "There is no token and no certificate, or none that is valid here. `WWW-Authenticate` names the "
    "scheme.",
    403: "The tenant is known, but may not use what the request names.",
    404: "The tenant has no store, dataset, object or program of that name.",
    408: "The request's head was not complete within the server's `head_timeout_s` (20 s by default).",
    409: "An object is no longer the one that was indexed or looked up: its ETag differs.",
    413: "The request exceeds a cap of the server on bytes or pixels (`too_large`), or the memory that the "
    "server has for one request (`does_not_fit`).",
    422: "A stored sample cannot be read (`bad_sample`), or allowed code failed (`code_failed`).",
    429: "The tenant's quota is used up. Repeat the request after `Retry-After`.",
    431: "The request's head exceeds 64 KiB or 100 fields.",
    500: "The server has a fault, and its log says more.",
    502: "The object store refuses the server's credentials, has no such bucket, or did not answer in time.",
    503: "All connections or requests are in use, no worker is ready, or the server is about to stop. "
    "Repeat the request after `Retry-After`, or use another server.",
    504: "The request exceeded its deadline, waits included.",
    507: "The upload exceeds what the tenant may store, or the store is full. The message has both numbers.",
}
"""Every error status and when it happens. The body has the error's code, which is more specific."""

_COME_BACK = (429, 503)
"""Statuses with `Retry-After`."""

_TYPES = (
    Info,
    Load,
    Uploaded,
    FeaturesFound,
    ProfileRequest,
    StageCosts,
    RunRequest,
    DataHeader,
    StatsHeader,
)


def components() -> Json:
    """Return schemas, error responses and security schemes."""
    _, schemas = msgspec.json.schema_components(_TYPES, ref_template="#/components/schemas/{name}")
    return {
        "schemas": {**{name: _portable(schema) for name, schema in schemas.items()}, "Error": _error()},
        "responses": {f"E{status}": _refusal(status) for status in ERRORS},
        "securitySchemes": {
            "bearer": {
                "type": "http",
                "scheme": "bearer",
                "description": "A tenant's token, or the server's one token.",
            },
            "basic": {
                "type": "http",
                "scheme": "basic",
                "description": "The token as the password, with any user name; for GET and HEAD only.",
            },
            "certificate": {
                "type": "mutualTLS",
                "description": "A client certificate with a name of the tenant, of the server's `client_ca`.",
            },
        },
    }


def _refusal(status: int) -> Json:
    refusal = json_answer("Error", ERRORS[status])
    if status in _COME_BACK:
        refusal["headers"] = {
            "Retry-After": {
                "description": "Seconds to wait before the next attempt, rounded up.",
                "schema": {"type": "integer", "minimum": 0},
            }
        }
    return refusal


def _error() -> Json:
    """Return the schema of errors, in the form of `upriver.protocol.error_body`."""
    fields = {
        "code": {
            "type": "string",
            "description": "A stable name; one that is not known is an error all the same.",
        },
        "message": {"type": "string", "description": "The cause in one line, for people."},
        "sample": {"type": "integer", "description": "Row of a bad sample in its dataset."},
        "object": {"type": "string", "description": "Name of the stored object of a bad sample."},
        "reason": {"type": "string", "description": "Fault of a bad sample."},
        "traceback": {"type": "string", "description": "Last lines of the traceback of code that failed."},
        "retry_after_s": {
            "type": "number",
            "minimum": 0,
            "description": "Seconds to wait before the next attempt, as in `Retry-After`.",
        },
    }
    error = {"type": "object", "required": ["code", "message"], "properties": fields}
    return {"type": "object", "required": ["error"], "properties": {"error": error}}


def _portable(schema: Any) -> Any:
    """Return a schema for other readers: portable patterns, and docstrings spread over schema and fields."""
    if isinstance(schema, list):
        return [_portable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _portable(value) for key, value in schema.items()}
    if isinstance(plain.get("pattern"), str):
        plain["pattern"] = plain["pattern"].replace(r"\Z", "$")
    if isinstance(text := plain.get("description"), str):
        for name, meaning in _attributes(text):
            plain["properties"][name]["description"] = meaning
        plain["description"] = re.sub(r"\s+", " ", text.split("\n\n", 1)[0]).strip()
    return plain


def _attributes(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield name and meaning of each attribute that a docstring describes."""
    _, _, section = cleandoc(docstring).partition("\nAttributes:\n")
    for name, meaning in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
        yield name, re.sub(r"\s+", " ", meaning).replace("``", "`")


def refers(kind: str, name: str) -> Json:
    """Return a reference to a component."""
    return {"$ref": f"#/components/{kind}/{name}"}


def answer(description: str, schema: Json) -> Json:
    """Describe a response with a JSON body."""
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def json_answer(name: str, description: str) -> Json:
    """Describe a response whose body is a message."""
    return answer(description, refers("schemas", name))
