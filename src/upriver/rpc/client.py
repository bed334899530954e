"""Talk to one near-data server: HTTP/1.1 from the standard library, in the caller's threads.

Payloads are read directly into the memory of the resulting tensors (`upriver.protocol.read_frame`), without
joining or copying chunks. A transport failure raises `ServerUnavailable`. An error that the server reports is
raised as the same error here.
"""

from __future__ import annotations

import http.client
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Protocol, TypeVar

import msgspec

from upriver import tracing
from upriver.errors import NotAuthorized, ProgramNotFound, ProtocolError, ServerUnavailable, UpriverError
from upriver.protocol import (
    DEFAULT_CAPS,
    PROCESS_HEADER,
    Caps,
    FeaturesFound,
    Info,
    Load,
    Message,
    ProfileRequest,
    RunRequest,
    StageCosts,
    Uploaded,
    decode_info,
    decode_json,
    decode_versioned,
    encode,
    program_head,
)
from upriver.rpc.connection_pool import Connections
from upriver.rpc.frame_reader import BodyStream, Crossing, FrameReader
from upriver.rpc.http import (
    BROKEN,
    Address,
    Connection,
    ConnectionHolder,
    Timeouts,
    error_of,
    read_to_end,
    within,
)
from upriver.rpc.link_meter import LinkMeter
from upriver.rpc.validation import whole
from upriver.text import said
from upriver.types import MicroBatch, Timings

PUT_S = 120.0
"""Seconds for an upload in addition to sending its bytes: the server checks it and writes it to its store."""

PUT_BYTES_PER_S = 125_000
"""Slowest upload that does not time out: below 1 Mbit/s no job gains from a server."""

INFO_BYTES = 1 << 20
"""Longest /v1/info body read; a real one has some hundred bytes."""

ANSWER_BYTES = 4 << 20
"""Longest profile read: a thousand stages need some hundred kB."""

PROFILE_S = 180.0
"""Seconds for a profile. A server stops after 30 s once each program has run twice. For the slowest network
measured that takes as long, loading included, and other jobs' micro-batches run in between."""

PROBE_BYTES = 64 * 1024
"""Bytes that a probe reads at once: one piece of an emulated link."""

PROBE_SETTLED = 4
"""A probe's rate leaves out the first of this many parts: a burst or a slow start decides that part's rate.
"""

_ZEROS = bytes(1 << 20)
"""Body of uploads that measure the link."""

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
"""No headers in addition to the token."""

_T = TypeVar("_T")


class AnswerClosed(UpriverError):
    """This process closed an answer while it was being read."""

    code = "closed"


class ProgramUpload(Protocol):
    """The parts of a `upriver.program.graph.executor.Program` that are uploaded."""

    @property
    def digest(self) -> str:
        """Digest that names the program."""

    @property
    def graph_bytes(self) -> bytes:
        """``graph.json``."""

    @property
    def weights_bytes(self) -> memoryview:
        """The weights file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """The result of one probe of the link.

    Attributes:
        num_bytes: Bytes requested and received, or sent.
        first_byte_s: Seconds from the request to the first byte: the round trip and the server's front. For
            an upload: the seconds in addition to ``seconds``.
        seconds: Seconds from the first byte to the last, as they arrived.
        bytes_per_s: Rate of the link, without the first part of the transfer. An upload includes that part,
            so a burst raises its rate.
    """

    num_bytes: int
    first_byte_s: float
    seconds: float
    bytes_per_s: float


class ServerClient:
    """A client for one server. Thread-safe.

    Each request in flight has its own connection, which is kept for the next one. A forked child of this
    process gets its own connections; answers that were being read stay with the parent.

    Args:
        url: ``http://host:port`` or ``https://host:port``, with a path if a proxy adds one.
        meter: Counts what the server sends, and paces it on an emulated link.
        caps: Largest allowed frame.
        tls: TLS context for https; the system's certificates if None.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        meter: LinkMeter | None = None,
        timeouts: Timeouts | None = None,
        caps: Caps = DEFAULT_CAPS,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.meter = meter or LinkMeter()
        self.timeouts = timeouts or Timeouts()
        self._caps = caps
        self._address = Address.parse(url, tls)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._connections = Connections(self._address)
        self._answered = False

    @property
    def url(self) -> str:
        """The address, as it appears in reports."""
        return self._address.url

    def __repr__(self) -> str:
        return f"ServerClient({self.url!r})"

    # ------------------------------------------------------------------------------ short questions

    def alive(self, *, timeout_s: float | None = None) -> bool:
        """Return whether the server's front answers (``GET /livez``).

        Raises:
            ServerUnavailable: If it cannot be reached, or does not answer in time.
        """
        return self._status("GET", "/livez", timeout_s=timeout_s) == 200

    def ready(self, *, timeout_s: float | None = None) -> bool:
        """Return whether the server accepts requests (``GET /readyz``).

        Raises:
            ServerUnavailable: If it cannot be reached, or does not answer in time.
        """
        return self._status("GET", "/readyz", timeout_s=timeout_s) == 200

    def process(self) -> str:
        """Return the name of the process at this address; empty if it sends none, as older versions do.

        Raises:
            UpriverError: As for `info`.
        """
        with self._question("GET", "/livez") as response:
            self._expect_ok(response)
            return _process_of(response)

    def info(self, *, process: str | None = None) -> Info:
        """Return the server's description of itself.

        Args:
            process: The process that must answer, named as by `process`; None accepts any.

        Raises:
            ProtocolError: If it speaks another version of the protocol, or is no such server.
            NotAuthorized: If the token is not accepted.
            ServerUnavailable: If it cannot be reached, or another process answers.
        """
        with self._question("GET", "/v1/info") as response:
            self._expect_ok(response, process)
            return self._decoded(response, INFO_BYTES, decode_info)

    def load(self, *, process: str | None = None) -> Load:
        """Return how busy the server is.

        Raises:
            UpriverError: As for `info`.
        """
        with self._question("GET", "/v1/load") as response:
            self._expect_ok(response, process)
            return self._decoded(response, INFO_BYTES, lambda data: decode_versioned(data, Load, "load"))

    def profile(self, programs: Sequence[str], *, stop: int | None = None, repeats: int = 5) -> StageCosts:
        """Let the server measure the costs of model stages.

        Args:
            programs: Digests of programs on the server: one network at different micro-batch sizes.
            stop: Last stage to measure; None measures all.
            repeats: Counted runs of each.

        Raises:
            Busy: If it is measuring another profile.
            ProgramNotFound: If a program is missing on the server.
            UpriverError: As for `info`.
        """
        request = ProfileRequest(programs=tuple(programs), stop=stop, repeats=repeats)
        body = [msgspec.json.encode(request)]
        with self._question("POST", "/v1/profile", body, total_s=PROFILE_S, span="profile") as response:
            return self._decoded(
                response, ANSWER_BYTES, lambda data: decode_versioned(data, StageCosts, "profile")
            )

    def find_features(self, request: RunRequest) -> FeaturesFound:
        """Return which samples of a request with ``keep`` the server has rows of.

        Raises:
            UpriverError: As for `info`.
        """
        return self._features("/v1/features", request)

    def remove_features(self, request: RunRequest) -> None:
        """Let the server remove the rows that it has kept for the stages of a request with ``keep``.

        Raises:
            UpriverError: As for `info`.
        """
        self._features("/v1/features/remove", request)

    def _features(self, path: str, request: RunRequest) -> FeaturesFound:
        with self._question("POST", path, encode(request), span="features") as response:
            return self._decoded(
                response, ANSWER_BYTES, lambda data: decode_versioned(data, FeaturesFound, "features")
            )

    def has_program(self, digest: str) -> bool:
        """Return whether the server has access to a program.

        Raises:
            UpriverError: As for `info`.
        """
        with self._question("HEAD", f"/v1/programs/{digest}", span="find program") as response:
            if response.status == 404:
                return False
            self._expect_ok(response)
            return True

    def put_program(self, program: ProgramUpload) -> None:
        """Upload a program, which the server puts into its store.

        Weights that were uploaded with another program, the same network at another size, are not sent again.

        Raises:
            UpriverError: As for `info`; `ProgramError` if the server rejects the program.
        """
        try:
            self._put_program(program, ())
        except ProgramNotFound:
            self._put_program(program, (program.weights_bytes,))

    def _put_program(self, program: ProgramUpload, weights: Sequence[bytes | memoryview]) -> None:
        graph = program.graph_bytes
        total_s = PUT_S + sum(map(len, weights)) / PUT_BYTES_PER_S
        with self._question(
            "PUT",
            f"/v1/programs/{program.digest}",
            [program_head(len(graph)), graph, *weights],
            total_s=total_s,
            span="upload",
        ) as response:
            self._expect_ok(response)

    def probe(self, num_bytes: int) -> Probe:
        """Download ``num_bytes`` over the link and measure the time.

        Raises:
            UpriverError: As for `info`.
        """
        asked = time.monotonic()
        with self._question("GET", f"/v1/probe?bytes={num_bytes}") as response:
            self._expect_ok(response)
            source, buffer = BodyStream(response, self.url), memoryview(bytearray(PROBE_BYTES))
            arrived: list[tuple[int, float]] = []
            received, piece = 0, 1  # a read returns when all its bytes are there: the first byte comes alone
            with Crossing(self.meter) as crossing:
                while received < num_bytes:
                    crossing(got := source.readinto(buffer[: min(piece, num_bytes - received)]))
                    received += got
                    arrived.append((received, time.monotonic()))
                    piece = max(1, min(PROBE_BYTES, num_bytes // (2 * PROBE_SETTLED)))
        arrived = arrived or [(0, time.monotonic())]
        settled, settled_at = next(each for each in arrived if PROBE_SETTLED * each[0] >= received)
        first_at, last_at = arrived[0][1], arrived[-1][1]
        return Probe(
            num_bytes=received,
            first_byte_s=first_at - asked,
            seconds=last_at - first_at,
            bytes_per_s=(received - settled) / max(last_at - settled_at, 1e-6),
        )

    def probe_upload(self, num_bytes: int) -> Probe:
        """Send ``num_bytes`` to the server, which measures the time; bytes that arrive at once take none.

        Raises:
            ConfigError: If ``num_bytes`` is no whole number from 1 on.
            TooLarge: If it is more than the server accepts.
            UpriverError: As for `info`.
        """
        whole("num_bytes", num_bytes)
        pieces = [_ZEROS[: num_bytes - start] for start in range(0, num_bytes, len(_ZEROS))]
        began = time.monotonic()
        with self._question("POST", "/v1/probe", pieces) as response:
            found = self._decoded(response, INFO_BYTES, lambda data: decode_json(data, Uploaded, "probe"))
        took_s = time.monotonic() - began
        if found.bytes != num_bytes:
            raise ProtocolError(f"{self.url}: {num_bytes} bytes were sent, and it got {found.bytes}")
        seconds = min(found.seconds, took_s)  # its clock may run faster than this one
        return Probe(
            num_bytes=num_bytes,
            first_byte_s=took_s - seconds,
            seconds=seconds,
            bytes_per_s=num_bytes / max(seconds, 1e-6),
        )

    # ---------------------------------------------------------------------------------------- work

    def run(
        self, request: RunRequest, batches: Sequence[MicroBatch] = (), *, process: str | None = None
    ) -> RunAnswer:
        """Run stages on the server; return an iterator of (micro-batch, timings) in the order of the request.

        Nothing is sent before the first item is requested. Closing the iterator early closes the connection,
        and the server drops the rest.

        Args:
            batches: The inputs, if the request names no dataset.
            process: As for `info`.

        Raises:
            ServerUnavailable: While iterating: if the server cannot be reached, stops or breaks off, or if
                another process answers.
            ProtocolError: While iterating: if the answer does not match the request.
            UpriverError: While iterating: the server's error.
        """
        return RunAnswer(self, request, batches, process=process)

    def abort(self) -> None:
        """Break off all connections: their readers get ServerUnavailable. Further requests work."""
        self._connections.abort()

    def close(self) -> None:
        """Abort, and refuse further requests."""
        self._connections.close()

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --------------------------------------------------------------------------------- connections

    def _status(self, method: str, path: str, *, timeout_s: float | None) -> int:
        with self._question(method, path, total_s=timeout_s) as response:
            return response.status

    @contextmanager
    def _question(
        self,
        method: str,
        path: str,
        body: Sequence[bytes | memoryview] = (),
        *,
        total_s: float | None = None,
        span: str | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Open a short exchange with a total time limit; ``span`` is its name in traces."""
        holder = ConnectionHolder()
        total_s = total_s or self.timeouts.question_s
        timeout_s = min(total_s, self.timeouts.read_s)
        traced = nullcontext(NO_HEADERS) if span is None else tracing.apart(span, server=self.url)
        with (
            traced as headers,
            within(total_s, holder.close, url=self.url),
            self._exchange(
                method, path, body, timeout_s=timeout_s, on_connection=holder, headers=headers
            ) as response,
        ):
            yield response

    @contextmanager
    def _exchange(
        self,
        method: str,
        path: str,
        body: Sequence[bytes | memoryview] = (),
        *,
        timeout_s: float | None = None,
        on_connection: ConnectionHolder | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> Iterator[http.client.HTTPResponse]:
        """Send one request and yield its response; keep the connection if the response was read fully."""
        headers = {**self._headers, **headers}
        connection, response = self._send(method, path, body, headers, timeout_s, on_connection)
        try:
            yield response
            read_to_end(response)
        except BROKEN as error:
            raise self._unavailable(error) from error
        finally:
            if on_connection is not None:
                on_connection.release()
            self._connections.give_back(connection, reusable=response.isclosed())

    def _send(
        self,
        method: str,
        path: str,
        body: Sequence[bytes | memoryview],
        headers: Mapping[str, str],
        timeout_s: float | None,
        holder: ConnectionHolder | None,
    ) -> tuple[Connection, http.client.HTTPResponse]:
        while True:
            connection, fresh = self._connections.borrow()
            try:
                if holder is not None:
                    holder.hold(connection)
                connection.open(self.timeouts, timeout_s)
                response = connection.ask(method, self._address.path + path, body, headers)
                self._answered = True
                return connection, response
            except BROKEN as error:
                self._connections.give_back(connection, reusable=False)
                # The server may have closed a kept connection meanwhile. That is no failure of the server,
                # and every request may be repeated.
                if fresh or isinstance(error, TimeoutError) or connection.broken_off:
                    raise self._unavailable(error, hung_up=not connection.broken_off) from error
            except BaseException:
                self._connections.give_back(connection, reusable=False)
                raise

    def _unavailable(self, error: BaseException, *, hung_up: bool = False) -> ServerUnavailable:
        """Return a connection's error as `ServerUnavailable`, with a message.

        Args:
            hung_up: Whether the error came before a response, and this process did not break off.
        """
        plain = self._address.tls is None and not self._answered
        if isinstance(error, TimeoutError):
            what = "no answer in time"
        elif hung_up and plain and isinstance(error, ConnectionResetError):
            what = "it hung up without an answer; if it speaks https, its address begins with https://"
        elif isinstance(error, http.client.IncompleteRead):
            what = "broke off in the middle of its answer"
        elif isinstance(error, http.client.HTTPException) and not isinstance(error, OSError):
            what = f"does not speak HTTP ({type(error).__name__}: {said(str(error), 80)})"
        else:
            what = said(str(error)) or type(error).__name__
        return ServerUnavailable(f"{self.url}: {what}")

    # -------------------------------------------------------------------------------------- errors

    def _decoded(self, response: http.client.HTTPResponse, most: int, decode: Callable[[bytes], _T]) -> _T:
        self._expect_ok(response)
        try:
            return decode(response.read(most))
        except ProtocolError as error:
            raise ProtocolError(f"{self.url}: {said(str(error))}") from None

    def _expect_ok(self, response: http.client.HTTPResponse, process: str | None = None) -> None:
        if not 200 <= response.status < 300:
            error = error_of(response, self.url)
            if isinstance(error, NotAuthorized):
                cause = "the token was refused" if self._headers else "no token was given"
                raise NotAuthorized(f"{error}; {cause}, which does not mend by itself")
            raise error
        if process is not None and _process_of(response) != process:
            raise ServerUnavailable(f"{self.url}: another process answers there than the one that was let in")


def _process_of(response: http.client.HTTPResponse) -> str:
    return response.getheader(PROCESS_HEADER) or ""


class RunAnswer:
    """The answer to one run request, as an iterator; any thread may call `close` at any time."""

    def __init__(
        self,
        client: ServerClient,
        request: RunRequest,
        batches: Sequence[MicroBatch] = (),
        *,
        process: str | None = None,
    ) -> None:
        self._holder = ConnectionHolder()
        self._reader: FrameReader | None = None
        self._frames = self._read(client, request, batches, process)
        self._reading = threading.Lock()  # held by a thread inside the generator

    def __iter__(self) -> RunAnswer:
        return self

    def __next__(self) -> tuple[MicroBatch, Timings]:
        if self._holder.closed:
            raise AnswerClosed("the answer was closed before it was read")
        try:
            with self._reading:
                return next(self._frames)
        except ServerUnavailable as error:
            if self._holder.closed:
                raise AnswerClosed("the answer was closed while it was read") from error
            raise

    @property
    def arrived(self) -> tuple[int, float]:
        """Bytes of the answer so far, and seconds from the first byte to the last."""
        return (self._reader.num_bytes, self._reader.arriving_s) if self._reader is not None else (0, 0.0)

    def close(self) -> None:
        """Break off; a thread that is reading the answer gets AnswerClosed."""
        self._holder.close()
        # A thread inside the generator now leaves it by itself. Closing the generator meanwhile mostly raises
        # a ValueError. But CPython 3.11 looks for the inner iterator first, and may crash on what it finds
        # there.
        if self._reading.acquire(blocking=False):
            try:
                self._frames.close()
            finally:
                self._reading.release()

    def __enter__(self) -> RunAnswer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(
        self, client: ServerClient, request: RunRequest, batches: Sequence[MicroBatch], process: str | None
    ) -> Generator[tuple[MicroBatch, Timings], None, None]:
        messages: list[Message] = [request, *batches]
        body = [part for message in messages for part in encode(message)]
        asked = len(request.micro_batches)
        with (
            tracing.apart("request", server=client.url, micro_batches=asked, cut=request.stop) as headers,
            client._exchange(
                "POST", "/v1/run", body, on_connection=self._holder, headers=headers
            ) as response,
        ):
            client._expect_ok(response, process)
            reader = FrameReader(response, url=client.url, meter=client.meter, caps=client._caps)
            self._reader = reader
            for ids in request.micro_batches:
                yield reader.micro_batch(ids, request)
            reader.end()
