"""The front: routes, errors, metrics; everything that waits does so without blocking anyone else."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

import upriver
from upriver import errors
from upriver.errors import NotAuthorized, Overloaded, ProtocolError, TooLarge, UpriverError
from upriver.program.devices import check_device
from upriver.protocol import Info, error_body, valid_digest
from upriver.server.access import Access
from upriver.server.config import ServerConfig
from upriver.server.jobs import Hello, Setup
from upriver.server.metrics import Metrics
from upriver.server.pool import WorkerPool
from upriver.server.profiling import Profiler
from upriver.server.programs import Programs
from upriver.server.run import Datasets, Runner
from upriver.server.stream import FrameStream
from upriver.types import DEFAULT_MICRO_BATCH

log = logging.getLogger(__name__)

PROBE_BYTES = 64 << 20
"""Most bytes of one probe: half a second at 1 Gbit/s."""

UPLOADS = 2
"""Programs received at once: each is held in memory until it is checked."""

_PROBE_CHUNK = bytes(256 * 1024)

STATUS: tuple[tuple[type[UpriverError], int], ...] = (
    (NotAuthorized, 401),
    (errors.ObjectNotFound, 404),
    (errors.ProgramNotFound, 404),
    (errors.ObjectChanged, 409),
    (TooLarge, 413),
    (errors.BadSample, 422),
    (errors.Busy, 429),
    (Overloaded, 503),
    (errors.WorkerCrashed, 500),
    (errors.StoreError, 502),
    (errors.ConfigError, 400),
    (errors.DatasetError, 400),
    (errors.ModelError, 400),
    (errors.ProgramError, 400),
    (ProtocolError, 400),
)
"""The first that fits; anything else is 500."""


class Front:
    """One server: its routes as methods, and what they share.

    Args:
        config: The operator's decisions.

    Raises:
        ConfigError: If a store's URI is not understood, or the device is not there.
        StoreError: If a store is not there.
    """

    def __init__(self, config: ServerConfig) -> None:
        check_device(config.device)
        self._config = config
        self.metrics = Metrics()
        self._stores = config.open_stores()
        self._uploads = asyncio.Semaphore(UPLOADS)
        self.pool = WorkerPool(
            count=config.workers,
            setup=Setup(threads=config.threads_per_worker, device=config.device, caps=config.caps),
            job_timeout_s=config.job_timeout_s,
            on_restart=self.metrics.restarts.inc,
        )
        self._programs = Programs(
            self._stores,
            prefix=config.prefix,
            budget_bytes=config.program_budget_bytes,
            caps=config.caps,
            metrics=self.metrics,
            on_evict=self.pool.forget,
        )
        self._runner = Runner(
            config,
            pool=self.pool,
            programs=self._programs,
            datasets=Datasets(self._stores, prefix=config.prefix, most=config.max_datasets),
            metrics=self.metrics,
        )
        self._profiler = Profiler(config, pool=self.pool, programs=self._programs, runner=self._runner)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Workers live as long as the application."""
        self.pool.start()
        try:
            yield
        finally:
            await self.pool.close()

    def routes(self) -> list[Route]:
        """All of them; HEAD comes with GET."""
        return [
            Route("/livez", self.live),
            Route("/readyz", self.ready),
            Route("/metrics", self.show_metrics),
            Route("/v1/info", self.info),
            Route("/v1/probe", self.probe),
            Route("/v1/programs/{digest}", self.program, methods=["HEAD", "PUT"]),
            Route("/v1/run", self.run, methods=["POST"]),
            Route("/v1/profile", self.profile, methods=["POST"]),
            Route("/v1/load", self.load),
        ]

    async def live(self, request: Request) -> Response:
        """The front answers."""
        return PlainTextResponse("live\n")

    async def ready(self, request: Request) -> Response:
        """There is a worker to compute."""
        if not self.pool.ready:
            raise Overloaded(self.pool.why)
        return PlainTextResponse("ready\n")

    async def show_metrics(self, request: Request) -> Response:
        """In Prometheus' text format."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def info(self, request: Request) -> Response:
        """What this server is; the fingerprint is a worker's, for that is what computes."""
        hello = self._hello()
        info = Info(
            version=upriver.__version__,
            fingerprint=hello.fingerprint,
            stores=tuple(self._stores),
            micro_batch=DEFAULT_MICRO_BATCH,
            caps=self._config.caps,
            device=self._config.device,
            workers=self._config.workers,
            threads=self._config.threads_per_worker,
            worker_network=hello.network,
        )
        return Response(msgspec.json.encode(info), media_type="application/json")

    async def probe(self, request: Request) -> Response:
        """So many bytes, to measure the link with."""
        text = request.query_params.get("bytes", "0")
        nbytes = _number(text)
        if nbytes is None or nbytes > PROBE_BYTES:
            raise ProtocolError(f"bytes must lie in 0..{PROBE_BYTES}, got {text[:40]!r}")
        return StreamingResponse(
            _zeros(nbytes),
            media_type="application/octet-stream",
            headers={"content-length": str(nbytes), "cache-control": "no-store"},
        )

    async def program(self, request: Request) -> Response:
        """HEAD asks for a program, PUT brings one."""
        digest = request.path_params["digest"]
        if not valid_digest(digest):
            raise ProtocolError(f"a program's digest is 64 lower-case hex digits, got {digest[:80]!r}")
        if request.method == "HEAD":
            return Response(status_code=200 if await self._programs.exists(digest) else 404)
        body_nbytes = _content_length(request)
        if body_nbytes is None:
            raise ProtocolError("a program is sent with a Content-Length")
        async with self._uploads:
            program = await self._programs.receive(digest, self._body(request), body_nbytes=body_nbytes)
            await self.pool.check(program)
            await self._programs.put(program)
        return JSONResponse({"digest": digest}, status_code=201)

    async def run(self, request: Request) -> Response:
        """Stages [start, stop) of a chain on these inputs, one micro-batch after the other."""
        length = _content_length(request)
        if length is not None and length > self._config.caps.body_bytes:
            raise TooLarge(f"a request has at most {self._config.caps.body_bytes} bytes, got {length}")
        stack = AsyncExitStack()
        try:
            order = await self._runner.admit(self._body(request), stack)
        except BaseException:
            await stack.aclose()
            raise
        return FrameStream(
            self._runner.answer(order),
            stack=stack,
            stall_timeout_s=self._config.stall_timeout_s,
            on_sent=self.metrics.bytes_out.inc,
        )

    async def profile(self, request: Request) -> Response:
        """What model stages cost here."""
        found = await self._profiler.measure(self._body(request), self._hello())
        return Response(msgspec.json.encode(found), media_type="application/json")

    async def load(self, request: Request) -> Response:
        """How busy the workers are."""
        self._hello()
        found = self.pool.load.load(running=self._runner.running)
        return Response(msgspec.json.encode(found), media_type="application/json")

    def _hello(self) -> Hello:
        """What the workers said of themselves.

        Raises:
            Overloaded: If none is ready yet.
        """
        if self.pool.hello is None:
            raise Overloaded(self.pool.why)
        return self.pool.hello

    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        """What the client sends, as long as it sends: who stalls must not keep a place from others."""
        chunks = request.stream()
        while True:
            try:
                async with asyncio.timeout(self._config.stall_timeout_s):
                    chunk = await anext(chunks)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise ProtocolError(f"nothing came for {self._config.stall_timeout_s:g} s") from None
            yield chunk


def create_app(config: ServerConfig) -> Starlette:
    """The whole server as an ASGI application.

    Raises:
        ConfigError: If a store's URI is not understood, or the device is not there.
        StoreError: If a store is not there.
    """
    front = Front(config)
    app = Starlette(
        routes=[_counted(route, front.metrics) for route in front.routes()],
        lifespan=front.lifespan,
        middleware=[Middleware(Access, config=config)],
        exception_handlers={HTTPException: _http_error},
    )
    app.state.front = front
    return app


def error_response(error: UpriverError) -> Response:
    """An error as HTTP."""
    status = next((status for kind, status in STATUS if isinstance(error, kind)), 500)
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    return JSONResponse(error_body(error), status_code=status, headers=headers)


def _counted(route: Route, metrics: Metrics) -> Route:
    """The route, answering errors in our form and counting every answer."""
    endpoint: Callable[[Request], Awaitable[Response]] = route.endpoint

    async def call(request: Request) -> Response:
        try:
            response = await endpoint(request)
        except UpriverError as error:
            metrics.errors.labels(error.code).inc()
            response = error_response(error)
        except ClientDisconnect:
            response = Response(status_code=499)  # nobody reads it; in the metrics it is told from the rest
        except Exception:
            log.exception("%s %s failed", request.method, request.url.path)
            response = error_response(UpriverError("internal error; the server's log says more"))
        metrics.requests.labels(route.path, response.status_code).inc()
        return response

    return Route(route.path, call, methods=sorted(route.methods or ()))


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else "internal error"
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "error")
    return JSONResponse(
        {"error": {"code": code, "message": f"{detail}: {request.url.path}"}}, status_code=status
    )


async def _zeros(nbytes: int) -> AsyncIterator[memoryview]:
    for start in range(0, nbytes, len(_PROBE_CHUNK)):
        yield memoryview(_PROBE_CHUNK)[: nbytes - start]


def _content_length(request: Request) -> int | None:
    return _number(request.headers.get("content-length", ""))


def _number(text: str) -> int | None:
    """A decimal number of 64 bits or so; Python refuses to read endless ones, with an error of its own."""
    return int(text) if re.fullmatch(r"[0-9]{1,19}", text) else None
