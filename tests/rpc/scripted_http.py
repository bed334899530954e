"""A real HTTP server on loopback that follows a script, also where a well-behaved server never would."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from upriver.protocol import encode

Respond = Callable[["Exchange"], None]


class Exchange:
    """One request, and the means to answer it."""

    def __init__(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        self.handler = handler
        self.method, self.path, self.headers, self.body = handler.command, handler.path, handler.headers, body
        self.client_port = handler.client_address[1]

    def plain(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.handler.send_response(status)
        for name, value in headers.items():
            self.handler.send_header(name.replace("_", "-"), value)
        self.handler.send_header("Content-Length", str(len(body)))
        self.handler.end_headers()
        if self.method != "HEAD":
            self.handler.wfile.write(body)

    def start_chunks(self) -> None:
        self.handler.send_response(200)
        self.handler.send_header("Transfer-Encoding", "chunked")
        self.handler.end_headers()

    def chunk(self, data: bytes) -> None:
        self.handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def end_chunks(self) -> None:
        self.handler.wfile.write(b"0\r\n\r\n")

    def frames(self, *messages: object) -> None:
        """Send a whole, well-formed response."""
        self.start_chunks()
        for message in messages:
            for part in encode(message):
                if len(part):
                    self.chunk(bytes(part))
        self.end_chunks()

    def hang_up(self) -> None:
        """Close the connection without another byte."""
        self.handler.close_connection = True
        self.handler.wfile.flush()
        self.handler.connection.shutdown(2)


@contextmanager
def scripted(respond: Respond, *, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve until the block ends, over TLS if requested; yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            respond(Exchange(self, self.rfile.read(length)))

        do_GET = do_HEAD = do_PUT = do_POST = handle_any

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Ignore a client that hangs up: it is part of the script."""

    server = Server(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http{'s' if tls is not None else ''}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
