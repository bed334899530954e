"""Run a real server in a process of its own, and talk plain HTTP to it."""

from __future__ import annotations

import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psutil

from upriver.errors import UpriverError
from upriver.protocol import End, encode, read_frame
from upriver.server import Server, ServerConfig
from upriver.types import MicroBatch

SERVE = """
import json, signal, sys
from upriver.imports import uncollected

with uncollected():
    import msgspec
    from upriver.protocol import Caps
    from upriver.server import ServerConfig, serve

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores for what runs behind it
settings = json.loads(sys.argv[1])
if "caps" in settings:
    settings["caps"] = msgspec.convert(settings["caps"], Caps)
sys.executable = settings.pop("python", sys.executable)  # what workers are started with
serve(ServerConfig(**settings), on_listening=lambda found: print(json.dumps(dict(found)), flush=True))
"""


class Running:
    """Server process."""

    def __init__(self, process, url):
        self.process = process
        self.url = url
        self.address = urlsplit(url).netloc

    def workers(self):
        with suppress(psutil.NoSuchProcess):
            return [child.pid for child in psutil.Process(self.process.pid).children()]
        return []

    def wait_ready(self):
        wait_for(lambda: ask(self, "GET", "/readyz")[0] == 200)
        return self

    def wait_workers(self):
        """Return the worker processes, once all are ready to compute and ended ones were noticed."""
        self.wait_ready()

        def found():
            ready = json.loads(ask(self, "GET", "/v1/load")[2])["workers"]
            return [pid for pid in self.workers() if len(self.workers()) == len(ready)]

        return wait_for(found)

    def metric(self, name, label=""):
        """Return the sum of a metric over all labels, or over those that contain ``label``."""
        lines = ask(self, "GET", "/metrics")[2].decode().splitlines()
        named = (line for line in lines if line.partition("{")[0].partition(" ")[0] == name)
        return sum(float(line.rpartition(" ")[2]) for line in named if label in line)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=180)


def free_port():
    """Return a port on which nothing listens, and that the kernel does not assign by itself."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port


@contextmanager
def running(store_uri, **settings):
    """Start a server; remove everything afterwards."""
    config = {"stores": {"default": store_uri}, "port": 0, "threads": 1, "grace_s": 2, **settings}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, json.dumps(config)],
        stdout=subprocess.PIPE,
    )
    try:
        found = json.loads(process.stdout.readline())
        assert found["pid"] == process.pid
        yield Running(process, found["listening"])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def in_thread(store_uri, **settings):
    """Run a server in a thread of this process, without waiting for its workers."""
    server = Server(ServerConfig(stores={"default": store_uri}, port=0, grace_s=0, **settings))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [server.socket]})
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield Running(None, f"http://127.0.0.1:{server.socket.getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join()
        server.socket.close()


def alive(pid):
    """Return whether a process runs; it may end between two checks."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def has_loaded(pid, library):
    """Return whether a process has mapped a file with this name in its path."""
    return library in Path(f"/proc/{pid}/maps").read_text()


def wait_for(condition, *, seconds=180):
    """Wait until ``condition()`` is true; return its value."""
    end = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < end, f"not so within {seconds} s"
        time.sleep(0.02)


@contextmanager
def stopped(server):
    """Stop the workers, so that requests stay in flight."""
    for process in _family(server):
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        go_on(server)


def go_on(server):
    """Let stopped workers continue."""
    for process in _family(server):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


def _family(server):
    return psutil.Process(server.process.pid).children(recursive=True)


def connect(server):
    return http.client.HTTPConnection(server.address, timeout=180)


def ask(server, method, path, body=None, headers=None):
    """Return status, headers and body of an answer."""
    connection = connect(server)
    try:
        connection.request(method, path, body=body, headers=headers or {})
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def body_of(*messages):
    return b"".join(bytes(part) for message in messages for part in encode(message))


def refused(server, body, path="/v1/run", method="POST"):
    """Return status and error of an error answer."""
    status, _, answer = ask(server, method, path, body)
    assert status >= 400, answer[:200]
    return status, json.loads(answer)["error"]


@contextmanager
def answering(server, request, batches=()):
    """Open the response to a run request, unread."""
    connection = connect(server)
    try:
        connection.request("POST", "/v1/run", body=body_of(request, *batches))
        response = connection.getresponse()
        assert response.status == 200, response.read()
        yield response
    finally:
        connection.close()


def messages(response):
    """Yield every message of an answer, with or without an end."""
    found = []
    while True:
        message = read_frame(response)
        found.append(message)
        if isinstance(message, (End, UpriverError)):
            assert response.read() == b""
            return found


def run(server, request, batches=()):
    """Return the micro-batches of an answer."""
    with answering(server, request, batches) as response:
        found = messages(response)
    if isinstance(found[-1], UpriverError):
        raise found[-1]
    return [message for message in found if isinstance(message, MicroBatch)]


def changed(request, **fields):
    return msgspec.structs.replace(request, **fields)
