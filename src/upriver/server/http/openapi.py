"""Describe the server's HTTP routes as an OpenAPI 3.1 document, for people, generated clients and fuzzers.

The schemas come from the types that encode and decode the messages, so the two cannot differ. A test compares
routes and statuses with the application's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec

import upriver
from upriver.protocol import (
    MAX_GRAPH_BYTES,
    DataHeader,
    Info,
    Load,
    ProfileRequest,
    RunRequest,
    StageCosts,
    Uploaded,
)
from upriver.protocol.messages import DIGEST_PATTERN, StatsHeader

Json = dict[str, Any]

FRAMES = "application/vnd.upriver.frames"
"""Media type of requests and responses made of frames (docs/protocol.md)."""

PROBE_BYTES = 64 << 20
"""Most bytes of one probe, as in `upriver.server.app`."""

TRACE_PATTERN = r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"
"""Pattern of a ``traceparent`` header (W3C Trace Context, section 3.2)."""

ERRORS: Mapping[int, str] = {
    400: "Malformed, or outside what is allowed.",
    401: "No token and no certificate, or none that is valid here.",
    403: "Not for this tenant, or code that is not allowed.",
    404: "No such store, dataset, object or program.",
    408: "No whole request head came in time.",
    409: "An object is not the one that was indexed.",
    413: "More bytes or pixels than this server takes, or more memory than it has for one request.",
    422: "A sample cannot be read, or made; as a rule this is an error frame of an answer that has begun.",
    429: "The tenant's quota is used up, or another profile is being measured; see Retry-After.",
    431: "The head of the request is too large.",
    500: "A fault of the server's, or two workers died of this request.",
    502: "The object store cannot be read.",
    503: "No room, no worker, or about to stop; see Retry-After.",
    504: "It was not done by its deadline.",
    507: "The tenant has stored as much as it may, or the store's disk is full.",
}
"""Every error status and its meaning. The body has the error's code, which is more specific."""

_ANYONE = (400, 408, 431, 500, 503)
"""Statuses that HTTP itself may return before a route is found."""

_KNOWN = (*_ANYONE, 401, 403)
"""Statuses of routes that require a token or a certificate."""

_WORK = (*_KNOWN, 404, 409, 413, 429, 502, 504)
"""Statuses of routes that read or compute for a tenant."""

_COME_BACK = (429, 503)

_TYPES = (Info, Load, Uploaded, ProfileRequest, StageCosts, RunRequest, DataHeader, StatsHeader)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Operation:
    """One method of one path.

    Attributes:
        name: Operation id, for generated clients.
        good: Status of success, and its response.
        more: Parameters, request body and other security schemes.
    """

    name: str
    summary: str
    good: tuple[int, Json]
    errors: tuple[int, ...] = _KNOWN
    more: Json = field(default_factory=dict)

    def to_json(self) -> Json:
        status, answer = self.good
        answers = {
            str(status): answer,
            **{str(each): _refers("responses", f"E{each}") for each in self.errors},
        }
        return {
            "operationId": self.name,
            "summary": self.summary,
            **self.more,
            "responses": dict(sorted(answers.items())),
        }


def document() -> Json:
    """Return the description of every route, ready to be encoded as JSON."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "upriver near-data server",
            "version": upriver.__version__,
            "description": "Runs input stages and frozen model stages beside an object store. "
            "docs/protocol.md has the whole protocol; this document has its HTTP.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"bearer": []}, {"certificate": []}],
        "paths": {**_operating(), **_describing(), **_programs(), **_working()},
        "components": _components(),
    }


@cache
def encoded() -> bytes:
    """Return the document as JSON. It never changes while the process lives, so it is encoded once."""
    return msgspec.json.encode(document())


def _operating() -> Json:
    """Return the routes for the server's operators."""
    page: Json = {"security": [{"bearer": []}, {"basic": []}, {"certificate": []}]}
    return {
        "/livez": {"get": _health("live", "Whether the front answers")},
        "/readyz": {"get": _health("ready", "Whether work is done here")},
        "/metrics": _get(
            "metrics", "Metrics in Prometheus' text format", _plain("The metrics.", "text/plain")
        ),
        "/ui": _get("page", "A page with live numbers", _plain("The page.", "text/html"), more=page),
        "/openapi.json": _get("description", "This document", _answer("It.", {"type": "object"})),
    }


def _describing() -> Json:
    """Return the routes that describe the server, the link to it and its load."""
    zeros = {
        **_plain("So many bytes, all of them zero.", "application/octet-stream"),
        "headers": {"Content-Length": {"schema": {"type": "integer", "minimum": 0}}},
    }
    asked = _parameter(
        "bytes", "query", {"type": "integer", "minimum": 0, "maximum": PROBE_BYTES, "default": 0}
    )
    return {
        "/v1/info": _get("info", "What this server is", _json("Info", "Its description of itself.")),
        "/v1/load": _get("load", "How busy it is", _json("Load", "Over the last seconds.")),
        "/v1/probe": {
            **_get("probe", "Bytes to measure the link with", zeros, more={"parameters": [asked]}),
            "post": _upload_probe().to_json(),
        },
    }


def _upload_probe() -> _Operation:
    body = f"Any bytes, at most {PROBE_BYTES}; they are thrown away as they come."
    return _Operation(
        name="probeUpload",
        summary="Take bytes to measure the way to the server with",
        good=(200, _json("Uploaded", "How many came, and how long that took.")),
        errors=(*_KNOWN, 413, 504),
        more={"requestBody": _body(body, {"application/octet-stream": {"schema": _BINARY}})},
    )


def _programs() -> Json:
    digest = _parameter("digest", "path", {"type": "string", "pattern": DIGEST_PATTERN}, required=True)
    stored = {
        "type": "object",
        "required": ["digest"],
        "properties": {"digest": {"type": "string", "pattern": DIGEST_PATTERN}},
    }
    body = (
        f"8 bytes big-endian, the length of the graph (1 to {MAX_GRAPH_BYTES}); graph.json, whose SHA-256 is "
        "the digest; the weights file, or nothing where it is stored already. Wants a Content-Length."
    )
    put = _Operation(
        name="putProgram",
        summary="Store a program",
        good=(201, _answer("Checked, loaded once, and stored.", stored)),
        errors=(*_WORK, 507),
        more={
            "parameters": [_traceparent()],
            "requestBody": _body(body, {"application/octet-stream": {"schema": _BINARY}}),
        },
    )
    return {"/v1/programs/{digest}": {"parameters": [digest], "head": _asking(), "put": put.to_json()}}


def _asking() -> Json:
    """Describe HEAD, whose response has no body whatever its status."""
    errors = (*_KNOWN, 404, 502)
    answers = {str(status): {"description": ERRORS[status]} for status in errors}
    return {
        "operationId": "hasProgram",
        "summary": "Whether a run request may name this program",
        "parameters": [_traceparent()],
        "responses": {"200": {"description": "It may."}, **answers},
    }


def _working() -> Json:
    """Return the routes that compute."""
    return {"/v1/run": {"post": _run().to_json()}, "/v1/profile": {"post": _profile().to_json()}}


def _run() -> _Operation:
    request, data, stats = (_refers("schemas", name) for name in ("RunRequest", "DataHeader", "StatsHeader"))
    asked = "A request frame and, where its inputs are sent along, a data frame for each micro-batch."
    told = "For each micro-batch a data and a stats frame, then an end frame; an error frame ends it early."
    return _Operation(
        name="run",
        summary="Run stages of a chain on stored samples or tensors sent along, or code installed there",
        good=(200, {"description": told, "content": _frames(data=data, stats=stats)}),
        errors=(*_WORK, 422),
        more={
            "parameters": [_traceparent()],
            "requestBody": _body(asked, _frames(request=request, data=data)),
        },
    )


def _profile() -> _Operation:
    asked = {"application/json": {"schema": _refers("schemas", "ProfileRequest")}}
    return _Operation(
        name="profile",
        summary="Measure what model stages cost here",
        good=(200, _json("StageCosts", "Of each stage, the median of its runs.")),
        errors=_WORK,
        more={
            "parameters": [_traceparent()],
            "requestBody": _body("Which programs, and how far.", asked),
        },
    )


# ---------------------------------------------------------------------------------------- building blocks

_BINARY: Json = {"type": "string", "format": "binary"}


def _get(name: str, summary: str, answer: Json, *, more: Json | None = None) -> Json:
    return {"get": _Operation(name=name, summary=summary, good=(200, answer), more=more or {}).to_json()}


def _health(name: str, summary: str) -> Json:
    """Describe a route that is open to everyone: health checks have no token."""
    answer = _plain("Yes.", "text/plain")
    return _Operation(
        name=name, summary=summary, good=(200, answer), errors=_ANYONE, more={"security": []}
    ).to_json()


def _refers(kind: str, name: str) -> Json:
    return {"$ref": f"#/components/{kind}/{name}"}


def _answer(description: str, schema: Json) -> Json:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _plain(description: str, media_type: str) -> Json:
    """Describe a response that is not JSON: OpenAPI 3.1 has no schema for it."""
    return {"description": description, "content": {media_type: {}}}


def _json(name: str, description: str) -> Json:
    return _answer(description, _refers("schemas", name))


def _frames(**headers: Json) -> Json:
    """Describe a body of frames with the schemas of their headers, for which OpenAPI has no place."""
    return {FRAMES: {"schema": _BINARY, "x-frames": headers}}


def _traceparent() -> Json:
    return _parameter("traceparent", "header", {"type": "string", "pattern": TRACE_PATTERN})


def _body(description: str, content: Json) -> Json:
    return {"required": True, "description": description, "content": content}


def _parameter(name: str, place: str, schema: Json, *, required: bool = False) -> Json:
    return {"name": name, "in": place, "required": required, "schema": schema}


# --------------------------------------------------------------------------------------------- components


def _components() -> Json:
    _, schemas = msgspec.json.schema_components(_TYPES, ref_template="#/components/schemas/{name}")
    return {
        "schemas": {**{name: _portable(schema) for name, schema in schemas.items()}, "Error": _error()},
        "responses": {f"E{status}": _refusal(status) for status in ERRORS},
        "securitySchemes": {
            "bearer": {"type": "http", "scheme": "bearer"},
            "basic": {"type": "http", "scheme": "basic", "description": "The token as the password."},
            "certificate": {"type": "mutualTLS"},
        },
    }


def _refusal(status: int) -> Json:
    answer = _json("Error", ERRORS[status])
    if status in _COME_BACK:
        answer["headers"] = {
            "Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 0}}
        }
    return answer


def _error() -> Json:
    """Return the schema of errors, in the form of `upriver.protocol.error_body`."""
    fields = {
        "code": {
            "type": "string",
            "description": "A stable name; one that is not known is an error all the same.",
        },
        "message": {"type": "string"},
        "sample": {"type": "integer", "description": "Of a bad sample: its row."},
        "object": {"type": "string", "description": "Of a bad sample: what holds it."},
        "reason": {"type": "string", "description": "Of a bad sample: what is wrong with it."},
        "traceback": {"type": "string", "description": "Of code that failed: where, in its last lines."},
        "retry_after_s": {"type": "number", "minimum": 0},
    }
    error = {"type": "object", "required": ["code", "message"], "properties": fields}
    return {"type": "object", "required": ["error"], "properties": {"error": error}}


def _portable(schema: Any) -> Any:
    """Return a schema for other readers: portable patterns, and only the summary of each docstring."""
    if isinstance(schema, list):
        return [_portable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _portable(value) for key, value in schema.items()}
    if isinstance(plain.get("pattern"), str):
        plain["pattern"] = plain["pattern"].replace(r"\Z", "$")
    if isinstance(plain.get("description"), str):
        plain["description"] = re.sub(r"\s+", " ", plain["description"].split("\n\n", 1)[0]).strip()
    return plain
