"""Build the front: routes, errors and metrics. No handler blocks the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

import upriver
from upriver import errors
from upriver.control.admission_queue import QueueFull
from upriver.errors import (
    Overloaded,
    ProgramNotFound,
    ProtocolError,
    QuotaExceeded,
    TooLarge,
    UpriverError,
)
from upriver.protocol import FeaturesFound, Info, Load, Uploaded, valid_digest
from upriver.server.config import ServerConfig
from upriver.server.device_group import DeviceGroup, DeviceGroups
from upriver.server.execution.run_context import until
from upriver.server.features.feature_store import FeatureStore, RequestRows
from upriver.server.http import dashboard as ui
from upriver.server.http import openapi
from upriver.server.http.auth import Authenticator, tenant_of
from upriver.server.http.errors import ErrorWording, code_of, counted, http_errors
from upriver.server.http.light_requests import LightRequests
from upriver.server.http.requests import (
    IncomingBody,
    check_length,
    content_length,
    number,
    while_there,
    zeros,
)
from upriver.server.http.response_stream import FrameStream
from upriver.server.observability import logging as logs
from upriver.server.observability.audit_log import WEIGHTS_WANTED, AuditEntry, AuditLog, Outcome
from upriver.server.observability.load import LoadMeter
from upriver.server.observability.metrics import ServerMetrics
from upriver.server.observability.snapshot import Snapshot
from upriver.server.observability.tracing import TracingMiddleware, traced
from upriver.server.observability.utilisation import look_at, watch
from upriver.server.profile_handler import BODY_BYTES, ProfileHandler
from upriver.server.programs.datasets import Datasets
from upriver.server.scheduling.footprint import StageRange
from upriver.server.snapshot_rows import program_rows, tenant_rows
from upriver.server.tenants import ANYONE, Tenant, missing_folders
from upriver.types import DEFAULT_MICRO_BATCH

log = logging.getLogger(__name__)

PROBE_BYTES = 64 << 20
"""Most bytes of one probe: half a second at 1 Gbit/s."""

LEAST_UPLOAD_RATE = 64 << 10
"""Bytes per second below which an upload is too slow to hold memory for: 0.5 Mbit/s."""

DRAIN_RETRY_S = 5.0
"""Seconds after which a draining server has stopped or has been replaced."""


class ProbeBody(StreamingResponse):
    """Send a probe's bytes, each piece in a turn of its tenant.

    Args:
        more: Arguments for Starlette.
    """

    def __init__(
        self, pieces: AsyncIterator[memoryview], *, looks: LightRequests, tenant: Tenant, **more: Any
    ) -> None:
        self._looks, self._tenant = looks, tenant
        super().__init__(self._in_turns(pieces), **more)

    async def _in_turns(self, pieces: AsyncIterator[memoryview]) -> AsyncIterator[memoryview]:
        async for piece in pieces:
            await self._looks.turn(self._tenant.name, self._tenant.weight)
            yield piece

    async def stream_response(self, send: Send) -> None:
        """Send the pieces as a light request; Starlette runs this in a task of its own."""
        await self._looks.look(self._tenant.name, super().stream_response(send))


class Front:
    """One server: its routes as methods, and their shared state.

    Attributes:
        draining: Whether the server accepts no further requests because it will stop.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self.draining = False
        everyone = list(config.everyone()) or [ANYONE]
        self.metrics = ServerMetrics(tenants=[tenant.name for tenant in everyone], stores=config.stores)
        self.audit = AuditLog(config.audit_log, on_failure=self.metrics.audit_failures.inc)
        self.looks = LightRequests()
        self._stores = traced(config.open_stores())
        for missing in missing_folders(config.tenants, self._stores):
            log.warning("%s", missing)
        self.wording = ErrorWording(self._stores)
        datasets = Datasets(
            self._stores,
            prefix=config.prefix,
            most=config.max_datasets,
            most_bytes=lambda: self.units.most_index_bytes,
            hold=lambda nbytes: self.units.hold_index(nbytes),
        )
        self.features = FeatureStore(
            self._stores,
            prefix=config.prefix,
            stored_bytes=config.stored_bytes,
            caps=config.caps,
            hold=lambda nbytes: self.units.hold_index(nbytes),
            metrics=self.metrics,
            wording=self.wording,
        )
        self._load = LoadMeter(
            config.workers * len(config.devices),
            window_s=config.load_window_s,
            free_below=config.load_free_below,
        )
        self.units = DeviceGroups(
            [
                DeviceGroup(
                    config,
                    device,
                    load=self._load,
                    datasets=datasets,
                    features=self.features,
                    stores=self._stores,
                    metrics=self.metrics,
                    wording=self.wording,
                )
                for device in config.devices
            ]
        )
        self._profiler = ProfileHandler(config, next(iter(self.units)))

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Run the workers, and measure the machine's utilisation, as long as the application lives."""
        self.units.start()
        look, every_s = look_at(self._config.devices), self._config.load_watch_s
        watching = asyncio.create_task(watch(look, self._load.looked, every_s=every_s))
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await self.units.close()
            await self.features.close()
            self.audit.close()

    def routes(self) -> list[Route]:
        """Return all routes; Starlette adds HEAD to GET."""
        return [
            Route("/livez", self.live),
            Route("/readyz", self.ready),
            Route("/metrics", self.show_metrics),
            Route("/ui", self.ui),
            Route("/openapi.json", self.openapi),
            Route("/v1/info", self.info),
            Route("/v1/probe", self.probe, methods=["GET", "POST"]),
            Route("/v1/programs/{digest}", self.program, methods=["HEAD", "PUT"]),
            Route("/v1/run", self.run, methods=["POST"]),
            Route("/v1/features", self.find_features, methods=["POST"]),
            Route("/v1/features/remove", self.remove_features, methods=["POST"]),
            Route("/v1/profile", self.profile, methods=["POST"]),
            Route("/v1/load", self.load),
        ]

    async def live(self, request: Request) -> Response:
        """Answer that the front is alive."""
        return PlainTextResponse("live\n")

    async def ready(self, request: Request) -> Response:
        """Answer whether the server works, and will for a while."""
        self._check_open()
        if not self.units.ready:
            raise Overloaded(self.units.why)
        return PlainTextResponse("ready\n")

    async def show_metrics(self, request: Request) -> Response:
        """Answer with the metrics in Prometheus' text format."""
        used, load = await self.units.used_bytes(), self.current_load()
        self.metrics.queue(load.waiting, load.waiting_bytes)
        self.metrics.memory(load.reserved_bytes, used, load.budget_bytes)
        self.metrics.load(load.k, load.machine)
        self.metrics.program_bytes.set(sum(unit.program_cache.nbytes for unit in self.units))
        self.metrics.draining.set(self.draining)
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def ui(self, request: Request) -> Response:
        """Answer with a page of the same figures, and the state of each tenant, worker and program."""
        return ui.response(await self.snapshot())

    async def openapi(self, request: Request) -> Response:
        """Answer with the OpenAPI document."""
        return Response(openapi.encoded(), media_type="application/json")

    async def info(self, request: Request) -> Response:
        """Answer with the server's description. The fingerprint is a worker's, since workers compute."""
        hello, tenant = self.units.hello, tenant_of(request)
        admits = min(self._config.max_admitted * len(self._config.devices), self._config.max_requests)
        info = Info(
            version=upriver.__version__,
            fingerprint=hello.fingerprint,
            stores=tuple(name for name in self._stores if tenant.may_read(name)),
            micro_batch=DEFAULT_MICRO_BATCH,
            caps=self._config.caps,
            device=self._config.devices[0],
            devices=len(self._config.devices),
            workers=self._config.workers * len(self._config.devices),
            threads=self._config.threads_per_worker,
            worker_network=hello.network,
            allow=self._config.allow,
            admits=admits if tenant.max_requests is None else min(admits, tenant.max_requests),
        )
        return Response(msgspec.json.encode(info), media_type="application/json")

    async def probe(self, request: Request) -> Response:
        """Send (GET) or receive (POST) bytes that measure the link."""
        if request.method == "POST":
            return await self._take_probe(request)
        text = request.query_params.get("bytes", "0")
        nbytes = number(text)
        if nbytes is None or nbytes > PROBE_BYTES:
            raise ProtocolError(f"bytes must lie in 0..{PROBE_BYTES}, got {text[:40]!r}")
        tenant = tenant_of(request)
        return ProbeBody(
            zeros(nbytes),
            looks=self.looks,
            tenant=tenant,
            media_type="application/octet-stream",
            headers={"content-length": str(nbytes), "cache-control": "no-store"},
        )

    async def _take_probe(self, request: Request) -> Response:
        """Discard a probe's bytes as they arrive, and answer with the time that they took."""
        check_length(request, PROBE_BYTES, "probe")
        arriving, tenant = IncomingBody(self._body(request)), tenant_of(request)
        async with until(asyncio.get_running_loop().time() + self._config.deadline_s):
            async for _ in arriving:
                await self.looks.turn(tenant.name, tenant.weight)
                if arriving.num_bytes > PROBE_BYTES:
                    raise TooLarge(f"a probe has at most {PROBE_BYTES} bytes")
        found = Uploaded(bytes=arriving.num_bytes, seconds=arriving.seconds)
        return Response(msgspec.json.encode(found), media_type="application/json")

    async def program(self, request: Request) -> Response:
        """Answer whether a program is stored (HEAD), or store one (PUT)."""
        digest, tenant = request.path_params["digest"], tenant_of(request)
        if not valid_digest(digest):
            raise ProtocolError(f"a program's digest is 64 lower-case hex digits, got {digest[:80]!r}")
        if request.method == "HEAD":
            return Response(status_code=200 if await self._first.programs.exists(tenant, digest) else 404)
        with self._written_down(tenant, digest) as came:
            self._check_open()
            self._check_ready()
            body_nbytes = content_length(request)
            if body_nbytes is None:
                raise ProtocolError("a program is sent with a Content-Length")
            await self._first.programs.check_room(tenant, digest, body_nbytes)
            limit_s = self._config.deadline_s + body_nbytes / LEAST_UPLOAD_RATE
            async with until(asyncio.get_running_loop().time() + limit_s):
                await self._receive(self._body(request, came), tenant, digest, body_nbytes)
        return JSONResponse({"digest": digest}, status_code=201)

    async def _receive(
        self, body: AsyncIterator[bytes], tenant: Tenant, digest: str, body_nbytes: int
    ) -> None:
        """Receive a program. Memory is held for all its bytes, and a worker loads it before it is stored."""
        unit = self._first  # other devices find the program in the store
        with unit.programs.upload(tenant, digest, body_nbytes) as (hold, use):
            program = await unit.programs.receive(tenant, digest, body, hold, body_nbytes=body_nbytes)
            if program is None:
                return
            whole = StageRange(key=program.key, start=0, stop=0)
            async with unit.runner.turn(tenant, "weigh"):
                weighed = await unit.pool.weigh(program.graph, whole, use)
            unit.programs.weighed(program, weighed, hold)
            async with unit.runner.turn(tenant, "check"):
                manifest = await unit.pool.check(program, use)
            await unit.programs.put(tenant, program, hold, manifest)

    @contextmanager
    def _written_down(self, tenant: Tenant, digest: str) -> Iterator[Outcome]:
        """Write an upload to the audit log when the block ends; yield the counter of its bytes."""
        began, outcome, came = time.perf_counter(), "ok", Outcome()
        try:
            yield came
        except ProgramNotFound:
            outcome = WEIGHTS_WANTED
            raise
        except BaseException as error:
            outcome = code_of(error)
            raise
        finally:
            self.audit.upload(
                tenant.name,
                request_id=logs.request_id(),
                program=digest,
                bytes_in=came.bytes_in,
                seconds=time.perf_counter() - began,
                outcome=outcome,
            )

    async def run(self, request: Request) -> Response:
        """Run stages [start, stop) of a chain on the request's inputs, one micro-batch after the other."""
        tenant, stack = tenant_of(request), AsyncExitStack()
        entry = AuditEntry(self.audit, tenant.name, logs.request_id())
        try:
            self._check_open()
            self._check_ready()
            check_length(request, self._config.caps.body_bytes, "request")
            body, runner = self._body(request, entry), self.units.deal(tenant).runner
            asked = await runner.read(
                body, stack, tenant, on_request=entry.about, announced=content_length(request) or 0
            )
            async with while_there(request.receive):
                order = await runner.admit(asked, stack)
        except BaseException as error:
            await stack.aclose()
            self._shed(tenant, error)
            entry.close(code_of(error))
            raise
        return FrameStream(
            runner.answer(order, on_error=lambda error: self._broke_off(tenant, entry, error)),
            stack=stack,
            stall_timeout_s=self._config.stall_timeout_s,
            deadline=asked.deadline,
            on_sent=lambda nbytes: self._sent(tenant, entry, nbytes),
            on_end=lambda how: self._ended(tenant, entry, how),
        )

    async def find_features(self, request: Request) -> Response:
        """Answer which samples of a run request have kept rows."""

        async def look(rows: RequestRows, ids: Sequence[int]) -> FeaturesFound:
            return FeaturesFound(ids=tuple(await rows.found(ids)), why_not=rows.why_not)

        return await self._features(request, look, kind="features")

    async def remove_features(self, request: Request) -> Response:
        """Remove the kept rows of a run request's stages."""

        async def remove(rows: RequestRows, ids: Sequence[int]) -> FeaturesFound:
            await rows.clear()
            return FeaturesFound(ids=())

        return await self._features(request, remove, kind="features_removed")

    async def _features(
        self,
        request: Request,
        act: Callable[[RequestRows, Sequence[int]], Awaitable[FeaturesFound]],
        *,
        kind: str,
    ) -> Response:
        """Read a run request with ``keep``, and answer with what ``act`` finds in its rows."""
        tenant = tenant_of(request)
        entry, outcome = AuditEntry(self.audit, tenant.name, logs.request_id(), kind=kind), "ok"
        try:
            self._check_open()
            self._check_ready()
            check_length(request, self._config.caps.body_bytes, "request")
            runner = self._first.runner
            async with AsyncExitStack() as stack:
                asked = await runner.read(self._body(request, entry), stack, tenant, on_request=entry.about)
                async with until(asked.deadline):
                    rows = await runner.rows_of_question(asked)
                    found = await act(rows, [i for batch in asked.request.micro_batches for i in batch])
        except BaseException as error:
            outcome = code_of(error)
            raise
        finally:
            entry.close(outcome)
        return Response(msgspec.json.encode(found), media_type="application/json")

    async def profile(self, request: Request) -> Response:
        """Measure the cost of model stages on this server."""
        tenant, began, outcome = tenant_of(request), time.perf_counter(), "ok"
        programs: list[str] = []
        try:
            self._check_open()
            check_length(request, BODY_BYTES, "profile request")
            found = await self._profiler.measure(
                self._body(request),
                self.units.hello,
                tenant,
                on_request=lambda asked: programs.extend(asked.programs),
                wanted=while_there(request.receive),
            )
        except BaseException as error:
            outcome = code_of(error)
            raise
        finally:
            self.audit.profile(
                tenant.name,
                request_id=logs.request_id(),
                programs=programs,
                seconds=time.perf_counter() - began,
                outcome=outcome,
            )
        return Response(msgspec.json.encode(found), media_type="application/json")

    async def load(self, request: Request) -> Response:
        """Answer with the workers' load."""
        self._check_ready()
        tenant = tenant_of(request)
        # The next request goes to the device that has less to do.
        waits = [unit.turns.queue.expected_wait_s(tenant.name, tenant.weight) for unit in self.units]
        found = msgspec.structs.replace(self.current_load(), expected_wait_s=min(waits))
        return Response(msgspec.json.encode(found), media_type="application/json")

    def current_load(self) -> Load:
        """Return the load as data, without a tenant's expected wait."""
        units = list(self.units)
        return self._load.load(
            running=sum(unit.runner.running for unit in units),
            waiting=sum(unit.line.queue.waiting for unit in units),
            waiting_bytes=sum(unit.line.queue.waiting_bytes for unit in units),
            reserved_bytes=sum(unit.budget.reserved_bytes for unit in units),
            budget_bytes=sum(unit.budget.total_bytes for unit in units),
            draining=self.draining,
        )

    @property
    def _first(self) -> DeviceGroup:
        """Return the device that receives uploaded programs."""
        return next(iter(self.units))

    def _check_ready(self) -> None:
        """Raise `Overloaded` unless every device has had a worker."""
        _ = self.units.hello

    def _check_open(self) -> None:
        """Raise `Overloaded` if the server is draining, and so accepts no further work."""
        if self.draining:
            raise Overloaded("this server is shutting down; use another one", retry_after_s=DRAIN_RETRY_S)

    def _shed(self, tenant: Tenant, error: BaseException) -> None:
        """Count a request that was turned away, by its reason."""
        full = isinstance(error.__cause__, QueueFull)
        reasons: tuple[tuple[type[BaseException], str], ...] = (
            (QuotaExceeded, "quota"),
            (Overloaded, "queue" if full else self._why_not()),
            (errors.DoesNotFit, "memory"),
            (errors.DeadlineExceeded, "deadline"),
            (ClientDisconnect, "disconnect"),
        )
        reason = next((reason for kind, reason in reasons if isinstance(error, kind)), None)
        if reason is not None:
            self.metrics.shed(tenant.name, reason)

    def _why_not(self) -> str:
        """Return why a request must be retried later, if the queue is not full."""
        return "draining" if self.draining else "memory" if self.units.ready else "worker"

    def _sent(self, tenant: Tenant, entry: AuditEntry, nbytes: int) -> None:
        entry.bytes_out += nbytes
        self.metrics.bytes_out_by(tenant.name, nbytes)

    def _broke_off(self, tenant: Tenant, entry: AuditEntry, error: UpriverError) -> None:
        """Note the error that ends an answer."""
        entry.failed(error.code)
        self._shed(tenant, error)

    def _ended(self, tenant: Tenant, entry: AuditEntry, how: str) -> None:
        if how != "ok" and not entry.has_failed:  # an error counts as one, even if the client disconnects
            self.metrics.shed(tenant.name, "deadline" if how == "deadline" else "disconnect")
        entry.close(how)

    async def _body(self, request: Request, came: Outcome | None = None) -> AsyncIterator[bytes]:
        """Yield the client's body.

        A client that stalls gets an error, so that it keeps no place from others.
        """
        chunks, tenant = request.stream(), tenant_of(request).name
        while True:
            try:
                async with asyncio.timeout(self._config.stall_timeout_s):
                    chunk = await anext(chunks)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise ProtocolError(f"nothing came for {self._config.stall_timeout_s:g} s") from None
            self.metrics.bytes_in(tenant, len(chunk))
            if came is not None:
                came.bytes_in += len(chunk)
            yield chunk

    async def snapshot(self) -> Snapshot:
        """Return the server's present state."""
        used, load = await self.units.used_bytes(), self.current_load()
        return Snapshot(
            tenants=tenant_rows(self._config, units=list(self.units), done=self.metrics.micro_batches_by()),
            workers=tuple(row for unit in self.units for row in unit.pool.rows()),
            programs=tuple(row for unit in self.units for row in program_rows(unit.program_cache)),
            errors=self.metrics.errors.rows(),
            budget_bytes=load.budget_bytes,
            reserved_bytes=load.reserved_bytes,
            used_bytes=used,
            queue_requests=load.waiting,
            queue_bytes=load.waiting_bytes,
            utilisation=load.utilisation,
            k=load.k,
            machine=load.machine,
            expected_wait_s=load.expected_wait_s,
            uptime_s=self.metrics.uptime_s,
            draining=self.draining,
        )


def create_app(config: ServerConfig) -> Starlette:
    """Return the whole server as an ASGI application.

    Raises:
        ConfigError: If a store's URI is invalid, or the device does not exist.
        StoreError: If a store does not exist.
    """
    front = Front(config)
    app = Starlette(
        routes=[counted(route, front.metrics, front.wording) for route in front.routes()],
        lifespan=front.lifespan,
        middleware=[
            Middleware(
                Authenticator,
                config=config,
                audit=front.audit,
                on_refused=front.metrics.errors.add,
                looks=front.looks,
            ),
            Middleware(TracingMiddleware),
        ],
        exception_handlers={HTTPException: http_errors(front.metrics)},
    )
    app.router.redirect_slashes = False  # a redirect would repeat the client's Host header
    app.state.front = front
    return app
