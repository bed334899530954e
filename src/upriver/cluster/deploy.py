"""From nothing to a deployment that serves, and back: a cluster, the application on it, an orderly end."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from upriver.cluster.asking import get, own_server
from upriver.cluster.deployment import SERVERS, ReplicaSettings, Scale, application, stop_timeout_s
from upriver.cluster.discover import LISTING_PATH, NAMESPACE, RayBook
from upriver.cluster.document import is_loopback
from upriver.errors import ConfigError, ServerUnavailable, UpriverError
from upriver.text import said

log = logging.getLogger(__name__)

LOCAL = "local"
"""The address that stands for a cluster of our own, on this machine, which ends with this process."""

APPLICATION = "upriver"
"""Name of the application, and the first part of its path."""

START_ATTEMPTS = 3
"""Ray gives its own processes 30 s to start, which no setting changes. On a busy machine they need longer."""

OBJECT_STORE_BYTES = 100 << 20
"""Of a cluster of our own: nothing is put into it, and Ray takes no less than some 80 MB."""

POLL_S = 0.25
"""Between two looks whether the first replica serves."""

ASK_S = 5.0
"""For a question to the directory, or to find that somebody listens."""

DIRECTORY_S = 60.0
"""Once all replicas serve, the directory must be seen within so long, or it listens somewhere else."""

OFF = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_ENABLE_AUTO_CONNECT": "0"}
"""Ray reports its use to its makers unless told not to, leaves repeated lines of logs out, and starts a
cluster of its own for any call that comes when there is none: for one that comes just after the end of ours,
say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """Everything that is to run.

    Attributes:
        document: What each server is told; holds no secrets.
        settings: What replicas are told.
        scale: How many.
        port: Of the directory; 0 takes a free one where the cluster is our own.
        address: Of an existing cluster (``auto``, ``HOST:PORT``, ``ray://HOST:10001``), or `LOCAL`.
        certificate: For the directory over TLS; None speaks plain HTTP.
        key: Of the certificate; None where that file holds it, too.
    """

    document: Mapping[str, object]
    settings: ReplicaSettings
    scale: Scale
    port: int
    address: str = LOCAL
    certificate: str | None = None
    key: str | None = field(default=None, repr=False)

    @property
    def local(self) -> bool:
        """Whether the cluster is started here."""
        return self.address == LOCAL

    @property
    def loopback(self) -> bool:
        """Whether only this machine may reach it."""
        return self.settings.host is not None and is_loopback(self.settings.host)


class ShutdownRequest:
    """Whether this process was asked to end, and how.

    Ray sets handlers of its own when it starts, which end the cluster at once; `install` puts ours back.

    Attributes:
        wanted: Whether it was asked to.
        signal: By which signal, if by one.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Listen to SIGTERM and SIGINT, on the main thread; elsewhere nobody can."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                before = signal.signal(number, self._on_signal)
                self._before.setdefault(number, before)

    def uninstall(self) -> None:
        """Put back what was there before."""
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    def set(self) -> None:
        """End, as if SIGTERM had come."""
        self.wanted = True

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Wait until it is asked to; whether it was."""
        # A plain flag, looked at: a handler that sets an Event can meet, on this very thread, the lock that
        # waiting for the Event takes.
        deadline = time.monotonic() + timeout_s
        while not self.wanted and (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(POLL_S, left_s))
        return self.wanted

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.wanted:  # asked twice: no more patience
            raise SystemExit(1)
        self.signal = signum
        self.wanted = True


def serve_on_ray(
    deployment: Deployment,
    *,
    on_listening: Callable[[Mapping[str, object]], None],
    stop: ShutdownRequest | None = None,
) -> None:
    """Deploy, say so when the first replica serves, and end in an orderly manner when asked to.

    Args:
        deployment: What is to run.
        on_listening: Told once: ``{"listening": "ray+http://HOST:PORT", "pid": N}``.
        stop: Ends it; SIGTERM and SIGINT do so as well.

    Raises:
        ConfigError: If Ray is not installed, there is no such cluster, or it cannot be reached as configured.
        ServerUnavailable: If no replica can serve.
        KeyboardInterrupt: After SIGINT, when all is over.
    """
    stop = stop or ShutdownRequest()
    stop.install()
    try:
        before_import(local=deployment.local)
        ray = _needed("ray")
        serve = _needed("ray.serve")
        with _connected(ray, deployment):
            stop.install()
            with _running(ray, serve, deployment) as (url, deploying):
                if _wait_for_first(serve, url, deployment, deploying, stop):
                    on_listening({"listening": f"ray+{url}", "pid": os.getpid()})
                    stop.wait()
    finally:
        stop.uninstall()
    if stop.signal == signal.SIGINT:
        raise KeyboardInterrupt


def before_import(*, local: bool) -> None:
    """What Ray reads from the environment when it is imported.

    A cluster of our own asks for a token, made here for this one run and kept in no file, unless somebody has
    said how it is to be.
    """
    for name, value in OFF.items():
        os.environ.setdefault(name, value)
    if local and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _needed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"--engine ray needs Ray Serve ({error}): pip install 'upriver[ray]'") from error


# ------------------------------------------------------------------------------------------ the cluster


@contextlib.contextmanager
def _connected(ray: Any, deployment: Deployment) -> Iterator[None]:
    """A connection to the cluster; one of our own is started first, and ended and cleared away last."""
    # In /tmp, as Ray's own: the sockets that it puts there have paths of at most 107 characters.
    folder = tempfile.mkdtemp(prefix="upriver-ray-", dir="/tmp") if deployment.local else None
    try:
        if folder is not None:
            # Whoever asks for so many replicas on one machine gets them; they share its cores.
            num_cpus = max(1, math.ceil(deployment.scale.most * deployment.scale.num_cpus))
            start(ray, num_cpus=num_cpus, loopback=deployment.loopback, folder=folder, namespace=NAMESPACE)
        else:
            join(ray, deployment.address, namespace=NAMESPACE)
        yield
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def start(ray: Any, *, num_cpus: int, loopback: bool, folder: str, namespace: str | None = None) -> None:
    """Start a cluster of our own, and connect to it.

    Args:
        num_cpus: That Ray hands out. Accelerators it counts itself: a replica is told which one is its own,
            and that must be there.
        loopback: Whether only this machine may reach it.
        folder: For its files and sockets.
        namespace: Of named actors.

    Raises:
        ServerUnavailable: If Ray's own processes do not start.
    """
    node = {"_node_ip_address": "127.0.0.1"} if loopback else {}
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            ray.init(
                address=LOCAL,
                namespace=namespace,
                num_cpus=num_cpus,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                logging_level=logging.WARNING,
                log_to_driver=True,
                _temp_dir=folder,
                **node,
            )
            return
        except Exception as error:  # Ray's own kinds, and there are many
            ray.shutdown()  # what this attempt has started ends with this process
            problem = f"Ray does not start on this machine: {said(str(error))}"
            if attempt == START_ATTEMPTS:
                raise ServerUnavailable(problem) from error
            log.warning("%s; trying again", problem)


def join(ray: Any, address: str, *, namespace: str | None = None) -> None:
    """Connect to a cluster that runs.

    Raises:
        ConfigError: If there is none.
    """
    try:
        _reach(address)
        ray.init(
            address=address,
            namespace=namespace,
            logging_level=logging.WARNING,
            log_to_driver=False,
        )
    except Exception as error:  # Ray's own kinds, and there are many
        raise ConfigError(f"no Ray cluster at {address!r}: {said(str(error))}") from error


def _reach(address: str) -> None:
    """See that somebody listens at ``HOST:PORT`` or ``ray://HOST:PORT``: Ray itself would try for a minute.

    Raises:
        OSError: If nobody does.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=ASK_S).close()


# -------------------------------------------------------------------------------------- the application


LAST_LOOK_S = 10.0
"""``serve.run`` asks every second whether all replicas serve, and gives up where the application is gone."""


class Deploying:
    """``serve.run`` in a thread: it returns when all replicas serve, and we go on with the first."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
        self.done = threading.Event()
        self.failure: Exception | None = None
        threading.Thread(target=self._work, name="upriver-deploying", daemon=True).start()

    def _work(self) -> None:
        try:
            self._run()
        except Exception as error:  # Ray's own kinds, and there are many
            self.failure = error
        finally:
            self.done.set()


@contextlib.contextmanager
def _running(ray: Any, serve: Any, deployment: Deployment) -> Iterator[tuple[str, Deploying]]:
    """The application on the cluster, and the URL of its directory; drained and taken away at the end."""
    ours = not _in_use(serve)
    listen, url = _directory_address(ray, deployment)
    # One file may hold both, which Ray Serve wants to be told twice.
    key = deployment.key or deployment.certificate
    files = {"ssl_certfile": deployment.certificate, "ssl_keyfile": key}
    serve.start(
        proxy_location="HeadOnly",
        http_options={**listen, **(files if deployment.certificate is not None else {})},
    )
    book = RayBook.create(deployment.settings.book)
    app = application(deployment.document, deployment.settings, deployment.scale)
    deploying = Deploying(lambda: serve.run(app, name=APPLICATION, route_prefix=f"/{APPLICATION}"))
    try:
        yield url, deploying
    finally:
        try:
            _take_away(serve, deploying, timeout_s=2 * stop_timeout_s(deployment.settings.grace_s))
            with contextlib.suppress(Exception):  # gone with its node, say: then there is nothing to end
                book.end()
            if ours and not _applications(serve):
                serve.shutdown()
            # Where it still asks after replicas once Ray is gone, Ray ends this process with exit code 1.
            deploying.done.wait(LAST_LOOK_S)
        except Exception as error:  # Ray's own kinds; what led here must not be lost behind them
            log.warning("cannot tell whether all replicas have ended: %s", said(str(error)))


def _directory_address(ray: Any, deployment: Deployment) -> tuple[dict[str, object], str]:
    """Where Ray Serve's proxy is to listen, and how others reach it."""
    port = deployment.port or _free_port()
    if deployment.loopback:
        host = reached = str(deployment.settings.host)
    else:
        host, reached = "0.0.0.0", _head(ray)
    scheme = "https" if deployment.certificate is not None else "http"
    shown = f"[{reached}]" if ":" in reached else reached
    return {"host": host, "port": port}, f"{scheme}://{shown}:{port}"


def _head(ray: Any) -> str:
    """Address of the machine on which Ray Serve's one proxy runs."""
    nodes = [node for node in ray.nodes() if node.get("Alive")]
    head = [node for node in nodes if "node:__internal_head__" in node.get("Resources", {})]
    if not (head or nodes):
        raise ConfigError("the Ray cluster has no machine that is alive")
    return str((head or nodes)[0]["NodeManagerAddress"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _in_use(serve: Any) -> bool:
    """Whether Ray Serve runs on the cluster already."""
    status = serve.status()
    return bool(status.proxies or status.applications)


def _applications(serve: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = serve.status().applications
    return found


def _take_away(serve: Any, deploying: Deploying, *, timeout_s: float) -> None:
    """Delete the application: each replica leaves the address book, and its server finishes what it does."""
    deadline = time.monotonic() + timeout_s
    while APPLICATION not in _applications(serve) and not deploying.done.wait(POLL_S):
        if time.monotonic() >= deadline:  # what is still on its way could not be deleted
            break
    with contextlib.suppress(TimeoutError):  # Ray Serve's own patience may be shorter
        serve.delete(APPLICATION)
    while APPLICATION in _applications(serve):
        if time.monotonic() >= deadline:
            log.warning("the replicas have not ended within %.0f s", timeout_s)
            return
        time.sleep(POLL_S)


# -------------------------------------------------------------------------------------- the first replica


def _wait_for_first(
    serve: Any, url: str, deployment: Deployment, deploying: Deploying, stop: ShutdownRequest
) -> bool:
    """Wait until the directory names a server; whether it does (False: asked to stop before).

    Raises:
        ServerUnavailable: If no replica can serve.
        ConfigError: If replicas serve, and nobody answers where the directory should be.
    """
    deadline: float | None = None
    while not stop.wait(POLL_S):
        if deploying.failure is not None:
            raise ServerUnavailable(f"no replica can serve: {reason(_told(serve), str(deploying.failure))}")
        if _servers_listed(url, encrypted=deployment.certificate is not None):
            return True
        if deploying.done.is_set():
            deadline = deadline or time.monotonic() + DIRECTORY_S
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"replicas serve, but their directory does not answer at {url}: Ray Serve listens where "
                    "it was first told to on this cluster; give its port"
                )
    return False


def _servers_listed(url: str, *, encrypted: bool) -> bool:
    """Whether the directory answers, and names a server."""
    try:
        status, body = get(
            url,
            f"/{APPLICATION}{LISTING_PATH}",
            timeout_s=ASK_S,
            tls=own_server() if encrypted else None,
        )
        return status == 200 and bool(json.loads(body)["servers"])
    except (UpriverError, ValueError, KeyError, TypeError):
        return False


def _told(serve: Any) -> str:
    """What Ray Serve says of the replicas: of the application it says only that they could not be started."""
    try:
        return str(_applications(serve)[APPLICATION].deployments[SERVERS].message)
    except Exception:  # gone in between, say
        return ""


def reason(*texts: str) -> str:
    """What went wrong in a replica: Ray Serve hands its whole traceback over, and our own error ends it.

    Args:
        texts: What Ray Serve says, the most detailed first.
    """
    for text in texts:
        place = text.rfind("upriver.errors.")
        if place >= 0:
            return said(text[place:].partition(":")[2], 1500)
    return said(next(filter(None, texts), ""), 1500)
