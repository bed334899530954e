"""The front: routes, errors, metrics; everything that waits does so without blocking anyone else."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

import upriver
from upriver import errors
from upriver.errors import (
    Overloaded,
    ProtocolError,
    QuotaExceeded,
    TooLarge,
    UpriverError,
)
from upriver.program.devices import check_device
from upriver.protocol import Info, Load, valid_digest
from upriver.server import logs, openapi, ui
from upriver.server.access import Access, tenant_of
from upriver.server.admission import adaptive, static
from upriver.server.audit import Audit, Entry
from upriver.server.budget import BASE, Budget, Hold, memory_budget
from upriver.server.config import ServerConfig
from upriver.server.datasets import Datasets
from upriver.server.jobs import Hello, Setup
from upriver.server.limits import on_cpu
from upriver.server.line import Full, Line
from upriver.server.memory import FREE_SLOTS, KEPT_BYTES
from upriver.server.metrics import Metrics
from upriver.server.needs import GRAPH_FACTOR, WEIGHED_BYTES, Stretch
from upriver.server.pool import WorkerPool
from upriver.server.profiling import Profiler
from upriver.server.programs import Programs
from upriver.server.requests import content_length, number, while_there, zeros
from upriver.server.rows import program_rows, tenant_rows
from upriver.server.run import Runner
from upriver.server.sandbox import enclose
from upriver.server.shelf import Shelf
from upriver.server.state import Snapshot
from upriver.server.status import Wording, code_of, counted, http_error
from upriver.server.stream import FrameStream
from upriver.server.tenants import ANYONE, Tenant
from upriver.server.tracing import Traced, traced
from upriver.server.turns import Turns
from upriver.types import DEFAULT_MICRO_BATCH

log = logging.getLogger(__name__)

PROBE_BYTES = 64 << 20
"""Most bytes of one probe: half a second at 1 Gbit/s."""

BYTES_PER_PIXEL = 6
"""Of a stored image while it is decoded: as it is, and turned to RGB."""

LEAST_BYTES = 64 << 20
"""With less beside idle workers hardly any request fits."""

DRAIN_RETRY_S = 5.0
"""A server that is about to end is gone or has been replaced by then."""


class Front:
    """One server: its routes as methods, and what they share.

    Args:
        config: The operator's decisions.

    Attributes:
        draining: Whether it takes no further requests, for it is about to end.

    Raises:
        ConfigError: If a store's URI is not understood, or the device is not there.
        StoreError: If a store is not there.
    """

    def __init__(self, config: ServerConfig) -> None:
        check_device(config.device)
        self._config = config
        self.draining = False
        self._base: Hold | None = None  # what idle workers take, as soon as that is known
        everyone = list(config.everyone()) or [ANYONE]
        self.metrics = Metrics(tenants=[tenant.name for tenant in everyone], stores=config.stores)
        self.audit = Audit(config.audit_log)
        self._stores = traced(config.open_stores())
        self.wording = Wording(self._stores)
        self.budget = Budget(
            memory_budget(config.device, reserve=config.memory_reserve, given=config.memory_budget_bytes)
        )
        self._shelf = Shelf(
            self.budget,
            most_bytes=config.program_budget_bytes,
            on_evict=self._evicted,
            quotas={each.name: each.program_bytes for each in everyone if each.program_bytes is not None},
        )
        self.pool = WorkerPool(
            count=config.workers,
            setup=Setup(
                threads=config.threads_per_worker,
                device=config.device,
                caps=config.caps,
                memory_bytes=self.budget.total_bytes,
            ),
            job_timeout_s=config.job_timeout_s,
            enclosure=enclose(config.sandbox, device=config.device, memory_bytes=self.budget.total_bytes),
            on_restart=self.metrics.restart,
        )
        self._programs = Programs(
            self._stores,
            prefix=config.prefix,
            shelf=self._shelf,
            caps=config.caps,
            most_bytes=config.program_budget_bytes,
            workers=config.workers,
            copies=1 if on_cpu(config.device) else config.workers,
            metrics=self.metrics,
        )
        self._line = Line(
            self.budget,
            self._shelf,
            adaptive if config.admission == "adaptive" else static,
            most=config.max_admitted,
            most_waiting=config.max_waiting,
            most_waiting_bytes=config.max_waiting_bytes,
            min_batch=config.min_batch if config.admission == "adaptive" else 1,
            collect_s=config.collect_s if config.admission == "adaptive" else 0.0,
            on_change=self._show_line,
        )
        self._turns = Turns(config.workers, one_each=True)
        self._runner = Runner(
            config,
            pool=self.pool,
            programs=self._programs,
            datasets=Datasets(self._stores, prefix=config.prefix, most=config.max_datasets),
            budget=self.budget,
            line=self._line,
            turns=self._turns,
            metrics=self.metrics,
            wording=self.wording,
        )
        self._profiler = Profiler(config, pool=self.pool, runner=self._runner)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Workers live as long as the application."""
        self.pool.start()
        holding = asyncio.create_task(self._hold_base())
        try:
            yield
        finally:
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            await self.pool.close()
            self.audit.close()

    async def _hold_base(self) -> None:
        """What workers take before they do anything is no request's; before it is held none is taken."""
        try:
            await self.pool.first()
        except errors.ConfigError:  # whoever started this server is told
            return
        resident = 0 if self.pool.hello is None else self.pool.hello.resident_bytes
        each = resident + FREE_SLOTS * KEPT_BYTES + GRAPH_FACTOR * WEIGHED_BYTES
        each += self._config.caps.pixels * BYTES_PER_PIXEL
        nbytes = min(each * self._config.workers, self.budget.free_bytes)
        if self.budget.free_bytes - nbytes < LEAST_BYTES:
            log.warning(
                "idle workers take %d of the memory budget's %d bytes: next to nothing is left for requests",
                each * self._config.workers,
                self.budget.total_bytes,
            )
        self._base = self.budget.hold(nbytes, owner=BASE)

    def _evicted(self, key: str) -> None:
        self.pool.forget(key)

    def _show_line(self) -> None:
        self.metrics.queue(self._line.waiting, self._line.waiting_bytes)

    def routes(self) -> list[Route]:
        """All of them; HEAD comes with GET."""
        return [
            Route("/livez", self.live),
            Route("/readyz", self.ready),
            Route("/metrics", self.show_metrics),
            Route("/ui", self.ui),
            Route("/openapi.json", self.openapi),
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
        """There is a worker to compute, and it will be there for a while."""
        self._check_open()
        if not self.pool.ready:
            raise Overloaded(self.pool.why)
        return PlainTextResponse("ready\n")

    async def show_metrics(self, request: Request) -> Response:
        """In Prometheus' text format."""
        self._show_line()
        used = await asyncio.to_thread(self.pool.used_bytes)
        self.metrics.memory(self.budget.reserved_bytes, used, self.budget.total_bytes)
        self.metrics.program_bytes.set(self._shelf.nbytes)
        self.metrics.draining.set(self.draining)
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def ui(self, request: Request) -> Response:
        """The same for people, with what each tenant, worker and program is at."""
        return ui.response(await self.snapshot())

    async def openapi(self, request: Request) -> Response:
        """What every route takes and answers."""
        return Response(msgspec.json.encode(openapi.document()), media_type="application/json")

    async def info(self, request: Request) -> Response:
        """What this server is; the fingerprint is a worker's, for that is what computes."""
        hello = self._hello()
        info = Info(
            version=upriver.__version__,
            fingerprint=hello.fingerprint,
            stores=tuple(name for name in self._stores if tenant_of(request).may_read(name)),
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
        nbytes = number(text)
        if nbytes is None or nbytes > PROBE_BYTES:
            raise ProtocolError(f"bytes must lie in 0..{PROBE_BYTES}, got {text[:40]!r}")
        return StreamingResponse(
            zeros(nbytes),
            media_type="application/octet-stream",
            headers={"content-length": str(nbytes), "cache-control": "no-store"},
        )

    async def program(self, request: Request) -> Response:
        """HEAD asks for a program, PUT brings one."""
        digest, tenant = request.path_params["digest"], tenant_of(request)
        if not valid_digest(digest):
            raise ProtocolError(f"a program's digest is 64 lower-case hex digits, got {digest[:80]!r}")
        if request.method == "HEAD":
            return Response(status_code=200 if await self._programs.exists(tenant, digest) else 404)
        self._check_open()
        self._hello()
        body_nbytes = content_length(request)
        if body_nbytes is None:
            raise ProtocolError("a program is sent with a Content-Length")
        with self._written_down(tenant, digest, body_nbytes):
            await self._receive(request, tenant, digest, body_nbytes)
        return JSONResponse({"digest": digest}, status_code=201)

    async def _receive(self, request: Request, tenant: Tenant, digest: str, body_nbytes: int) -> None:
        """Take a program in: memory is held for all that comes, and a worker loads it before it is stored."""
        with self._programs.upload(tenant, digest, body_nbytes) as hold:
            program = await self._programs.receive(
                tenant, digest, self._body(request), hold, body_nbytes=body_nbytes
            )
            if program is None:
                return
            whole = Stretch(key=program.key, start=0, stop=0)
            async with self._runner.turn(tenant, "weigh"):
                weighed = await self.pool.weigh(program.graph, whole)
            self._programs.weighed(program, weighed, hold)
            async with self._runner.turn(tenant, "check"):
                await self.pool.check(program)
            await self._programs.put(tenant, program, hold)

    @contextmanager
    def _written_down(self, tenant: Tenant, digest: str, nbytes: int) -> Iterator[None]:
        """An upload, in the audit log when it is over."""
        began, outcome = time.perf_counter(), "ok"
        try:
            yield
        except BaseException as error:
            outcome = code_of(error)
            raise
        finally:
            self.audit.upload(
                tenant.name,
                request_id=logs.request_id(),
                program=digest,
                bytes_in=nbytes,
                seconds=time.perf_counter() - began,
                outcome=outcome,
            )

    async def run(self, request: Request) -> Response:
        """Stages [start, stop) of a chain on these inputs, one micro-batch after the other."""
        tenant, stack = tenant_of(request), AsyncExitStack()
        entry = Entry(self.audit, tenant.name, logs.request_id())
        try:
            self._check_open()
            self._hello()
            self._check_length(request)
            body = self._body(request, entry)
            asked = await self._runner.read(body, stack, tenant, on_request=entry.about)
            order = await while_there(request, self._runner.admit(asked, stack))
        except BaseException as error:
            await stack.aclose()
            self._shed(tenant, error)
            entry.close(code_of(error))
            raise
        return FrameStream(
            self._runner.answer(order, on_error=lambda error: self._broke_off(tenant, entry, error)),
            stack=stack,
            stall_timeout_s=self._config.stall_timeout_s,
            deadline=asked.deadline,
            on_sent=lambda nbytes: self._sent(tenant, entry, nbytes),
            on_end=lambda how: self._ended(tenant, entry, how),
        )

    async def profile(self, request: Request) -> Response:
        """What model stages cost here."""
        self._check_open()
        tenant, began, outcome = tenant_of(request), time.perf_counter(), "ok"
        programs: list[str] = []
        try:
            found = await self._profiler.measure(
                self._body(request),
                self._hello(),
                tenant,
                on_request=lambda asked: programs.extend(asked.programs),
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
        """How busy the workers are."""
        self._hello()
        tenant = tenant_of(request)
        turn_s = self._turns.expected_wait_s(tenant.name, tenant.weight)
        found = msgspec.structs.replace(self.current_load(), expected_wait_s=turn_s)
        return Response(msgspec.json.encode(found), media_type="application/json")

    def current_load(self) -> Load:
        """The same as data, whoever asks."""
        return self.pool.load.load(
            running=self._runner.running,
            waiting=self._line.waiting,
            waiting_bytes=self._line.waiting_bytes,
            reserved_bytes=self.budget.reserved_bytes,
            budget_bytes=self.budget.total_bytes,
            draining=self.draining,
        )

    def _hello(self) -> Hello:
        """What the workers said of themselves.

        Raises:
            Overloaded: If none is ready yet.
        """
        if self.pool.hello is None or self._base is None:
            raise Overloaded(self.pool.why)
        return self.pool.hello

    def _check_open(self) -> None:
        """Whether further work is taken.

        Raises:
            Overloaded: If the server is about to end.
        """
        if self.draining:
            raise Overloaded("this server is about to end; ask another one", retry_after_s=DRAIN_RETRY_S)

    def _check_length(self, request: Request) -> None:
        length, most = content_length(request), self._config.caps.body_bytes
        if length is not None and length > most:
            raise TooLarge(f"a request has at most {most} bytes, got {length}")

    def _shed(self, tenant: Tenant, error: BaseException) -> None:
        """Count a request that was turned away, by why."""
        full = isinstance(error.__cause__, Full)
        reasons: tuple[tuple[type[BaseException], str], ...] = (
            (QuotaExceeded, "quota"),
            (Overloaded, "queue" if full else "draining" if self.draining else "memory"),
            (errors.DoesNotFit, "memory"),
            (errors.DeadlineExceeded, "deadline"),
            (ClientDisconnect, "disconnect"),
        )
        reason = next((reason for kind, reason in reasons if isinstance(error, kind)), None)
        if reason is not None:
            self.metrics.shed(tenant.name, reason)

    def _sent(self, tenant: Tenant, entry: Entry, nbytes: int) -> None:
        entry.bytes_out += nbytes
        self.metrics.bytes_out_by(tenant.name, nbytes)

    def _broke_off(self, tenant: Tenant, entry: Entry, error: UpriverError) -> None:
        """An answer ends with an error."""
        entry.failed(error.code)
        self._shed(tenant, error)

    def _ended(self, tenant: Tenant, entry: Entry, how: str) -> None:
        if how != "ok":
            self.metrics.shed(tenant.name, "deadline" if how == "deadline" else "disconnect")
        entry.close(how)

    async def _body(self, request: Request, entry: Entry | None = None) -> AsyncIterator[bytes]:
        """What the client sends, as long as it sends: who stalls must not keep a place from others."""
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
            if entry is not None:
                entry.bytes_in += len(chunk)
            yield chunk

    async def snapshot(self) -> Snapshot:
        """What the server does at this moment."""
        used = await asyncio.to_thread(self.pool.used_bytes)
        load = self.current_load()
        return Snapshot(
            tenants=tenant_rows(
                list(self._config.everyone()) or [ANYONE],
                line=self._line,
                budget=self.budget,
                done=self.metrics.micro_batches_by(),
            ),
            workers=self.pool.rows(),
            programs=program_rows(self._shelf),
            errors=self.metrics.errors.rows(),
            budget_bytes=load.budget_bytes,
            reserved_bytes=load.reserved_bytes,
            used_bytes=used,
            queue_requests=load.waiting,
            queue_bytes=load.waiting_bytes,
            utilisation=load.utilisation,
            k=load.k,
            expected_wait_s=load.expected_wait_s,
            uptime_s=self.metrics.uptime_s,
            draining=self.draining,
        )


def create_app(config: ServerConfig) -> Starlette:
    """The whole server as an ASGI application.

    Raises:
        ConfigError: If a store's URI is not understood, or the device is not there.
        StoreError: If a store is not there.
    """
    front = Front(config)
    app = Starlette(
        routes=[counted(route, front.metrics, front.wording) for route in front.routes()],
        lifespan=front.lifespan,
        middleware=[Middleware(Access, config=config, audit=front.audit), Middleware(Traced)],
        exception_handlers={HTTPException: http_error},
    )
    app.router.redirect_slashes = False  # an address made of what a client wrote into Host is no answer
    app.state.front = front
    return app
