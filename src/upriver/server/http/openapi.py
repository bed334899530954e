"""Describe the server's HTTP routes as an OpenAPI 3.1 document, for people, generated clients and fuzzers.

The schemas come from the types that encode and decode the messages, so the two cannot differ. A test compares
routes and statuses with the application's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import msgspec

import upriver
from upriver.protocol import MAX_GRAPH_BYTES
from upriver.protocol.messages import DIGEST_PATTERN
from upriver.server.http.openapi_components import ERRORS, Json, answer, components, json_answer, refers

FRAMES = "application/vnd.upriver.frames"
"""Media type of requests and responses made of frames (docs/protocol.md)."""

PROBE_BYTES = 64 << 20
"""Most bytes of one probe, as in `upriver.server.app`."""

TRACE_PATTERN = r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"
"""Pattern of a ``traceparent`` header (W3C Trace Context, section 3.2)."""

_ANYONE = (400, 408, 431, 500, 503)
"""Statuses that HTTP itself may return before a route is found."""

_KNOWN = (*_ANYONE, 401)
"""Statuses of routes that require a token or a certificate."""

_WORK = (*_KNOWN, 403, 404, 409, 413, 502, 504)
"""Statuses of routes that read or compute for a tenant."""

_BY_PASSWORD: list[Json] = [{"bearer": []}, {"basic": []}, {"certificate": []}]
"""Access by GET or HEAD, where the token may be a password (`upriver.server.http.auth.READING`)."""

_WEIGHTS_CHANGED = "The stored weights were replaced while the server read them. Repeat the request."

_NO_WORKER = (
    "No worker has been ready yet, or all connections are in use. Repeat the request after `Retry-After`."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Operation:
    """One method of one path.

    Attributes:
        name: Operation id, for generated clients.
        good: Status of success, and its response.
        when: Statuses that happen for reasons of this route, and those reasons; they replace `ERRORS`.
        more: Parameters, request body and other security schemes.
    """

    name: str
    summary: str
    description: str
    good: tuple[int, Json]
    errors: tuple[int, ...] = _KNOWN
    when: Mapping[int, str] = field(default_factory=dict)
    more: Json = field(default_factory=dict)

    def to_json(self) -> Json:
        status, response = self.good
        return {
            "operationId": self.name,
            "summary": self.summary,
            "description": self.description,
            **self.more,
            "responses": dict(sorted({str(status): response, **self._refusals()}.items())),
        }

    def _refusals(self) -> Json:
        """Return the error responses. A description next to a reference replaces the one it refers to."""
        return {
            str(status): refers("responses", f"E{status}")
            | ({"description": self.when[status]} if status in self.when else {})
            for status in {*self.errors, *self.when}
        }


def document() -> Json:
    """Return the description of every route, ready to be encoded as JSON."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "upriver near-data server",
            "version": upriver.__version__,
            "description": "Runs input stages and frozen model stages close to an object store. The header "
            "`Upriver-Process` of a response names the server's process; only refusals by HTTP's limits and "
            "of malformed HTTP lack it. Every response to a known client has `X-Request-Id`, which the "
            "server's log repeats. docs/protocol.md has the whole protocol; this document has its HTTP.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"bearer": []}, {"certificate": []}],
        "paths": _paths(),
        "components": components(),
    }


@cache
def encoded() -> bytes:
    """Return the document as JSON. It never changes while the process lives, so it is encoded once."""
    return msgspec.json.encode(document())


def _paths() -> Json:
    """Return all routes, with access by password to those that read and are not open to everyone."""
    paths = {**_operating(), **_describing(), **_programs(), **_working()}
    for item in paths.values():
        for method in item.keys() & {"get", "head"}:
            item[method].setdefault("security", _BY_PASSWORD)
    return paths


def _operating() -> Json:
    """Return the routes for the server's operators."""
    live = _Operation(
        name="live",
        summary="Check that the front is alive",
        description="Answers as long as the process accepts connections, also while it drains. Use it as a "
        "liveness probe. It needs no token.",
        good=(200, _plain("The front is alive.", "text/plain")),
        errors=_ANYONE,
        when={503: "All connections are in use. Repeat the request after `Retry-After`."},
        more={"security": []},
    )
    ready = _Operation(
        name="ready",
        summary="Check that the server accepts work",
        description="Answers 200 once a worker is ready, and until the server begins to stop. A server stays "
        "ready while a dead worker is replaced. Use it as a readiness probe. It needs no token.",
        good=(200, _plain("The server accepts work.", "text/plain")),
        errors=_ANYONE,
        when={503: "No worker is ready, or the server is about to stop. The message says which."},
        more={"security": []},
    )
    metrics = _Operation(
        name="metrics",
        summary="Read the metrics in Prometheus' text format",
        description="Returns counters, gauges and histograms of requests, memory, phases and stores. They "
        "cover all tenants. docs/observability.md lists each with its labels.",
        good=(200, _plain("The metrics.", "text/plain")),
    )
    page = _Operation(
        name="page",
        summary="Show a page with live numbers",
        description="Returns one HTML page without scripts, which refreshes itself every two seconds. It "
        "shows memory, queue, tenants, workers, programs and errors. A browser sends the token as a "
        "password, with any user name.",
        good=(200, _plain("The page.", "text/html")),
    )
    described = _Operation(
        name="description",
        summary="Read this document",
        description="Returns the description of every route as OpenAPI 3.1. The schemas come from the types "
        "that encode and decode the messages.",
        good=(200, answer("This document.", {"type": "object"})),
    )
    return {
        "/livez": {"get": live.to_json()},
        "/readyz": {"get": ready.to_json()},
        "/metrics": {"get": metrics.to_json()},
        "/ui": {"get": page.to_json()},
        "/openapi.json": {"get": described.to_json()},
    }


def _describing() -> Json:
    """Return the routes that describe the server, the link to it and its load."""
    info = _Operation(
        name="info",
        summary="Describe the server",
        description="Returns versions, fingerprint, stores, limits, devices and workers. Stores are those "
        "that the asking tenant may read, by name. The fingerprint decides whether a job with "
        "`exact=bitwise` may use the server.",
        good=(200, json_answer("Info", "The server's description of itself.")),
        when={503: _NO_WORKER},
    )
    load = _Operation(
        name="load",
        summary="Report how busy the server is",
        description="Returns present queues and memory, and utilisation and the load factor `k` over the "
        "last `window_s` seconds. `expected_wait_s` is the wait of one more micro-batch of the asking "
        "tenant. Answers of `POST /v1/run` carry both as well.",
        good=(200, json_answer("Load", "The load over the last seconds.")),
        when={503: _NO_WORKER},
    )
    return {
        "/v1/info": {"get": info.to_json()},
        "/v1/load": {"get": load.to_json()},
        "/v1/probe": {"get": _download_probe().to_json(), "post": _upload_probe().to_json()},
    }


def _download_probe() -> _Operation:
    zeros = {
        **_plain("The requested number of zero bytes.", "application/octet-stream"),
        "headers": {
            "Content-Length": {
                "description": "Bytes of the body.",
                "schema": {"type": "integer", "minimum": 0},
            }
        },
    }
    size = _parameter(
        "bytes",
        "query",
        {"type": "integer", "minimum": 0, "maximum": PROBE_BYTES, "default": 0},
        "Bytes to send: 0 to 64 MiB. 0 measures the round trip.",
    )
    return _Operation(
        name="probe",
        summary="Download bytes to measure the link from the server",
        description="Returns zero bytes, which the client times. Tenants take turns at sending, so probes of "
        "one do not delay the others. The response must not be cached.",
        good=(200, zeros),
        when={400: "`bytes` is no whole number from 0 to 67108864."},
        more={"parameters": [size]},
    )


def _upload_probe() -> _Operation:
    body = f"Any bytes, at most {PROBE_BYTES} (64 MiB). The server discards them as they arrive."
    return _Operation(
        name="probeUpload",
        summary="Upload bytes to measure the link to the server",
        description="Reads the body and discards it. The answer has its size, and the seconds from its first "
        "byte to its last as the server saw them. These are 0 if all bytes arrived at once.",
        good=(200, json_answer("Uploaded", "The size of the body, and the seconds that it took.")),
        when={
            400: "The body stopped arriving for the server's `stall_timeout_s` (120 s by default).",
            413: f"The body has more than {PROBE_BYTES} bytes.",
            504: "The body took longer than the server's `deadline_s` (600 s by default).",
        },
        more={"requestBody": _body(body, {"application/octet-stream": {"schema": _BINARY}})},
    )


def _programs() -> Json:
    digest = _parameter(
        "digest",
        "path",
        {"type": "string", "pattern": DIGEST_PATTERN},
        "SHA-256 of the program's `graph.json`: 64 lower-case hex digits.",
        required=True,
    )
    item = {"parameters": [digest], "head": _find_program(), "put": _put_program().to_json()}
    return {"/v1/programs/{digest}": item}


def _put_program() -> _Operation:
    stored = {
        "type": "object",
        "required": ["digest"],
        "properties": {
            "digest": {
                "type": "string",
                "pattern": DIGEST_PATTERN,
                "description": "The digest of the request's path.",
            }
        },
    }
    body = (
        f"8 bytes big-endian, the length of the graph (1 to {MAX_GRAPH_BYTES}); graph.json, whose SHA-256 is "
        "the digest; the weights file, or nothing where it is stored already. Requires a Content-Length."
    )
    return _Operation(
        name="putProgram",
        summary="Store a program",
        description="Checks both digests, loads the program once in a worker, and stores weights and graph "
        "for the asking tenant. Nothing is stored before all of that succeeds. A body without weights "
        "reuses those of another program.",
        good=(201, answer("The program was checked, loaded once, and stored.", stored)),
        errors=_WORK,
        when={
            400: "The digest is malformed, Content-Length is missing, the body stopped arriving, or graph "
            "and weights do not fit their digests.",
            403: "The tenant may use no store here, so its programs have no place.",
            404: "The body has no weights, and the store has none of that digest. Send them, too.",
            409: f"The body has no weights. {_WEIGHTS_CHANGED}",
            413: "The program exceeds the cap `program_bytes`, or the server's memory.",
            500: "Workers died of this program, or the server has a fault.",
            502: "The object store cannot be read or written.",
            503: "There is no memory now, no worker is ready, or the server is about to stop.",
            504: "The upload took longer than `deadline_s`, with one second more for each 64 KiB.",
            507: ERRORS[507],
        },
        more={
            "parameters": [_traceparent()],
            "requestBody": _body(body, {"application/octet-stream": {"schema": _BINARY}}),
        },
    )


def _find_program() -> Json:
    """Describe HEAD, whose response has no body whatever its status."""
    when = {
        400: "The digest is not 64 lower-case hex digits.",
        404: "No store that the tenant may read has the program. Upload it with `PUT`.",
    }
    statuses = sorted((*_KNOWN, 403, 404, 502))
    answers = {str(status): {"description": when.get(status, ERRORS[status])} for status in statuses}
    return {
        "operationId": "hasProgram",
        "summary": "Ask whether a run request may name this program",
        "description": "Looks for the program in the stores that the tenant may read. The graph is stored "
        "last, so its weights exist, too. The response has no body.",
        "parameters": [_traceparent()],
        "responses": {"200": {"description": "A run request may name the program."}, **answers},
    }


def _working() -> Json:
    """Return the routes that compute."""
    return {
        "/v1/run": {"post": _run().to_json()},
        "/v1/features": {
            "post": _features(
                name="findFeatures",
                summary="Ask which samples of a run request have kept rows",
                description="Reads nothing but the index of the rows that this server and others have kept "
                "for the tenant: of the request's program, cut, input stages, view and micro-batch, on a "
                "processor of this kind. Objects that changed since are noticed by `POST /v1/run`.",
                good="Those samples, and the reason why no more are kept now.",
            ).to_json()
        },
        "/v1/features/remove": {
            "post": _features(
                name="removeFeatures",
                summary="Remove the kept rows of a run request's stretch",
                description="Removes the rows of all samples that the tenant has kept for the request's "
                "program, cut, input stages, view and micro-batch. Those of other stages stay.",
                good="No samples: none is kept any more.",
            ).to_json()
        },
        "/v1/profile": {"post": _profile().to_json()},
    }


def _features(*, name: str, summary: str, description: str, good: str) -> _Operation:
    asked = {FRAMES: {"schema": refers("schemas", "RunRequest")}}
    return _Operation(
        name=name,
        summary=summary,
        description=description,
        good=(200, json_answer("FeaturesFound", good)),
        errors=_WORK,
        when={
            400: "The frame or a field is malformed or exceeds its limits, or the body stopped arriving.",
            403: "Samples lie outside the tenant's folders.",
            404: "The tenant has no such store, dataset or program (`not_found`, `program_not_found`).",
            413: "The body exceeds a cap, or the request needs more memory than the server has for one.",
            429: "The tenant has as many requests as it may. Repeat after `Retry-After`.",
        },
        more={
            "parameters": [_traceparent()],
            "requestBody": _body("A request frame with `keep`, as for `POST /v1/run`.", asked),
        },
    )


def _run() -> _Operation:
    request, data, stats = (refers("schemas", name) for name in ("RunRequest", "DataHeader", "StatsHeader"))
    body = (
        "A request frame and, where its inputs are sent along, a data frame for each micro-batch. At most "
        "the cap `body_bytes` of `GET /v1/info` (512 MiB by default)."
    )
    return _Operation(
        name="run",
        summary="Run stages of a chain, or allowed code, on micro-batches of samples",
        description="Reads samples from a store, or takes tensors from the body, and computes stages "
        "`start` to `stop`. The response begins when the request has been admitted to memory, and sends each "
        "micro-batch as it is ready. Errors after that are an error frame, with the codes below. An answer "
        "without an end frame is incomplete.",
        good=(
            200,
            {
                "description": "For each micro-batch a data frame and a stats frame, then an end frame. An "
                "error frame ends the answer early.",
                "content": _frames(data=data, stats=stats),
            },
        ),
        errors=_WORK,
        when={
            400: "A frame or a field is malformed or exceeds its limits, tensors do not fit the program, or "
            "the body stopped arriving.",
            403: "Samples lie outside the tenant's folders, or the code is not allowed here.",
            404: "The tenant has no such store, dataset, object or program (`not_found`, "
            "`program_not_found`).",
            409: "A sample's object is no longer the indexed one: index the data again. Or stored weights of "
            "the program were replaced while the server read them: repeat the request.",
            413: "The body, an image or a tensor exceeds a cap (`too_large`), or the request needs more "
            "memory than the server has for one (`does_not_fit`).",
            422: "A stored sample cannot be read (`bad_sample`), or allowed code failed (`code_failed`). As "
            "a rule this is an error frame.",
            429: "The tenant has as many requests or waiting bytes as it may. Repeat after `Retry-After`.",
            500: "Two workers died of one micro-batch (`worker_crashed`), or the server has a fault.",
            503: "The queue is full, there is no memory in time, no worker is ready, or the server is about "
            "to stop. Repeat after `Retry-After`.",
            504: "The answer was not out after `deadline_s` of the request or of the server, waits included.",
        },
        more={
            "parameters": [_traceparent()],
            "requestBody": _body(body, _frames(request=request, data=data)),
        },
    )


def _profile() -> _Operation:
    asked = {"application/json": {"schema": refers("schemas", "ProfileRequest")}}
    return _Operation(
        name="profile",
        summary="Measure the cost of model stages on this server",
        description="Runs 1 to 4 captures of one network on made-up inputs, once to warm up and then "
        "`repeats` times. Each run is a job of its own between those of other requests. No further run "
        "begins after 30 s. A server measures one profile at a time.",
        good=(200, json_answer("StageCosts", "For each stage, the median of its runs.")),
        errors=_WORK,
        when={
            400: "A field is malformed, a program is named twice, or the programs have different stages or "
            "equal sizes of micro-batch.",
            404: "The server does not have one of the programs. Upload it with `PUT`.",
            409: _WEIGHTS_CHANGED,
            413: "The body has more than 16384 bytes, or a program needs more memory than the server has.",
            429: "Another profile is being measured (`busy`), or the tenant's quota is used up (`quota`). "
            "Repeat after `Retry-After`.",
            500: "Two workers died of a run (`worker_crashed`), or the server has a fault.",
            504: "The measurement took longer than the server's `deadline_s` (600 s by default).",
        },
        more={
            "parameters": [_traceparent()],
            "requestBody": _body(
                "Programs, their last stage, and runs. At most 16384 bytes (16 KiB).", asked
            ),
        },
    )


# ---------------------------------------------------------------------------------------- building blocks

_BINARY: Json = {"type": "string", "format": "binary"}


def _plain(description: str, media_type: str) -> Json:
    """Describe a response that is not JSON: OpenAPI 3.1 has no schema for it."""
    return {"description": description, "content": {media_type: {}}}


def _frames(**headers: Json) -> Json:
    """Describe a body of frames with the schemas of their headers, for which OpenAPI has no place."""
    return {FRAMES: {"schema": _BINARY, "x-frames": headers}}


def _traceparent() -> Json:
    return _parameter(
        "traceparent",
        "header",
        {"type": "string", "pattern": TRACE_PATTERN},
        "Trace and span of the client (W3C Trace Context). The server's spans join that trace, if it sends "
        "traces.",
    )


def _body(description: str, content: Json) -> Json:
    return {"required": True, "description": description, "content": content}


def _parameter(name: str, place: str, schema: Json, description: str, *, required: bool = False) -> Json:
    return {
        "name": name,
        "in": place,
        "required": required,
        "description": description,
        "schema": schema,
    }
