"""Deploy servers on Ray Serve: start or join a cluster, run the application, end both in order."""

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
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from upriver._threads.executor import DaemonExecutor
from upriver.cluster.child import own_server
from upriver.cluster.deployment import SERVERS, ReplicaSettings, Scale, application, stop_timeout_s
from upriver.cluster.discover import LISTING_PATH, NAMESPACE, RayBook
from upriver.cluster.replica_config import is_loopback
from upriver.errors import ConfigError, ServerUnavailable, UpriverError
from upriver.extras import install
from upriver.rpc.child_server import ASK_S
from upriver.rpc.short_question import get
from upriver.text import said

log = logging.getLogger(__name__)

LOCAL = "local"
"""Address that stands for a local cluster, which this process starts, and which ends with it."""

APPLICATION = "upriver"
"""Name of the application, and the first part of its path."""

START_ATTEMPTS = 3
"""Attempts to start Ray. It gives its processes 30 s, fixed; a busy machine needs longer."""

OBJECT_STORE_BYTES = 100 << 20
"""Object store of a local cluster: nothing is put into it, and Ray needs at least some 80 MB."""

POLL_S = 0.25
"""Interval between two checks whether the first replica serves."""

LAST_LOOK_S = 10.0
"""Final wait for ``serve.run``, which looks every second and gives up if the application is gone."""

DIRECTORY_S = 60.0
"""Deadline for the directory to answer once all replicas serve; after it, the directory listens elsewhere."""

OFF = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_ENABLE_AUTO_CONNECT": "0"}
"""Settings that turn features of Ray off. By default Ray reports its use to its makers and drops repeated log
lines. It also starts a cluster of its own for any call without one, such as a call just after the end of
ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """Servers to deploy on a cluster, and the address of their directory.

    Attributes:
        document: Configuration of each server; holds no secrets.
        port: Port of the directory; 0 selects a free one on a local cluster.
        address: Existing cluster (``auto``, ``HOST:PORT``, ``ray://HOST:10001``), or `LOCAL`.
        certificate: Certificate file of the directory for TLS; None selects plain HTTP.
        key: Key of the certificate; None if the certificate's file holds it too.
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
        """Return whether this process starts the cluster."""
        return self.address == LOCAL

    @property
    def loopback(self) -> bool:
        """Return whether only this machine may reach the deployment."""
        return self.settings.host is not None and is_loopback(self.settings.host)


class ShutdownRequest:
    """Request to end this process, by a signal or a call.

    Ray sets signal handlers of its own when it starts, which end the cluster at once. `install` puts ours
    back.

    Attributes:
        signal: Number of the signal that asked, if any.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Handle SIGTERM and SIGINT if called on the main thread; other threads cannot."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                before = signal.signal(number, self._on_signal)
                self._before.setdefault(number, before)

    def uninstall(self) -> None:
        """Restore the previous handlers."""
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    def set(self) -> None:
        """Ask to end, as SIGTERM does."""
        self.wanted = True

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Wait until the process is asked to end; return whether it was."""
        # Poll a plain flag. A handler that sets an Event can meet, on this very thread, the lock that waiting
        # for the Event holds.
        deadline = time.monotonic() + timeout_s
        while not self.wanted and (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(POLL_S, left_s))
        return self.wanted

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.wanted:  # asked twice: end at once
            raise SystemExit(1)
        self.signal = signum
        self.wanted = True


def serve_on_ray(
    deployment: Deployment,
    *,
    on_listening: Callable[[Mapping[str, object]], None],
    stop: ShutdownRequest | None = None,
) -> None:
    """Deploy, report when the first replica serves, and end in order when asked to.

    Args:
        on_listening: Called once with ``{"listening": "ray+http://HOST:PORT", "pid": N}``.
        stop: Ends the deployment; SIGTERM and SIGINT do so as well.

    Raises:
        ConfigError: If Ray is not installed, or the cluster does not exist or cannot be reached as
            configured.
        ServerUnavailable: If no replica can serve.
        KeyboardInterrupt: After SIGINT, once everything has ended.
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
    """Set the environment variables that Ray reads on import.

    A local cluster requires a token. It is made here for this run and kept in no file, unless the environment
    already sets how Ray authenticates.
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
        raise ConfigError(install("--engine ray", f"{name} ({error})", "ray")) from error


# ------------------------------------------------------------------------------------------ the cluster


@contextlib.contextmanager
def _connected(ray: Any, deployment: Deployment) -> Iterator[None]:
    """Connect to the cluster. Start a local one first, and end and remove it last."""
    # In /tmp, as Ray's own: the sockets that Ray puts there have paths of at most 107 characters.
    folder = tempfile.mkdtemp(prefix="upriver-ray-", dir="/tmp") if deployment.local else None
    try:
        if folder is not None:
            # All replicas requested on one machine start; they share its cores.
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
    """Start a local cluster, and connect to it.

    Args:
        num_cpus: CPUs that Ray hands out. Ray counts accelerators itself: it assigns one to each replica,
            which must exist.
        loopback: Whether only this machine may reach the cluster.
        folder: Folder of its files and sockets.

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
        except Exception as error:  # Ray raises many kinds of its own
            ray.shutdown()  # the processes of this attempt end with this process
            problem = f"Ray does not start on this machine: {said(str(error))}"
            if attempt == START_ATTEMPTS:
                raise ServerUnavailable(problem) from error
            log.warning("%s; trying again", problem)


def join(ray: Any, address: str, *, namespace: str | None = None) -> None:
    """Connect to a running cluster.

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
    except Exception as error:  # Ray raises many kinds of its own
        raise ConfigError(f"no Ray cluster at {address!r}: {said(str(error))}") from error


def _reach(address: str) -> None:
    """Check that ``HOST:PORT`` or ``ray://HOST:PORT`` accepts connections; Ray itself would try for a minute.

    Raises:
        OSError: If it does not.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=ASK_S).close()


# -------------------------------------------------------------------------------------- the application


@contextlib.contextmanager
def _running(ray: Any, serve: Any, deployment: Deployment) -> Iterator[tuple[str, Future[Any]]]:
    """Run the application, yield its directory's URL, and drain and remove the application at the end."""
    ours = not _in_use(serve)
    listen, url = _directory_address(ray, deployment)
    # One file may hold both, but Ray Serve needs two settings.
    key = deployment.key or deployment.certificate
    files = {"ssl_certfile": deployment.certificate, "ssl_keyfile": key}
    serve.start(
        proxy_location="HeadOnly",
        http_options={**listen, **(files if deployment.certificate is not None else {})},
    )
    book = RayBook.create(deployment.settings.book)
    app = application(deployment.document, deployment.settings, deployment.scale)
    # It returns when all replicas serve, but the first one suffices here.
    thread = DaemonExecutor(1, name="deploying")
    deploying = thread.submit(serve.run, app, name=APPLICATION, route_prefix=f"/{APPLICATION}")
    thread.shutdown(wait=False)
    try:
        yield url, deploying
    finally:
        try:
            _take_away(serve, deploying, timeout_s=2 * stop_timeout_s(deployment.settings.grace_s))
            with contextlib.suppress(Exception):  # gone with its node, for example: nothing is left to end
                book.end()
            if ours and not _applications(serve):
                serve.shutdown()
            # If it still asks for replicas once Ray is gone, Ray ends this process with exit code 1.
            wait([deploying], LAST_LOOK_S)
        except Exception as error:  # Ray raises many kinds of its own, which must not hide the original error
            log.warning("cannot tell whether all replicas have ended: %s", said(str(error)))


def _directory_address(ray: Any, deployment: Deployment) -> tuple[dict[str, object], str]:
    """Return the address on which Ray Serve's proxy listens, and the URL by which others reach it."""
    port = deployment.port or _free_port()
    if deployment.loopback:
        host = reached = str(deployment.settings.host)
    else:
        host, reached = "0.0.0.0", _head(ray)
    scheme = "https" if deployment.certificate is not None else "http"
    shown = f"[{reached}]" if ":" in reached else reached
    return {"host": host, "port": port}, f"{scheme}://{shown}:{port}"


def _head(ray: Any) -> str:
    """Return the address of the machine on which Ray Serve's only proxy runs."""
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
    """Return whether Ray Serve already runs on the cluster."""
    status = serve.status()
    return bool(status.proxies or status.applications)


def _applications(serve: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = serve.status().applications
    return found


def _take_away(serve: Any, deploying: Future[Any], *, timeout_s: float) -> None:
    """Delete the application: each replica leaves the address book, and its server finishes its requests."""
    deadline = time.monotonic() + timeout_s
    while APPLICATION not in _applications(serve) and not wait([deploying], POLL_S).done:
        if time.monotonic() >= deadline:  # an application that is still being deployed cannot be deleted
            break
    with contextlib.suppress(TimeoutError):  # Ray Serve's own timeout may be shorter
        serve.delete(APPLICATION)
    while APPLICATION in _applications(serve):
        if time.monotonic() >= deadline:
            log.warning("the replicas have not ended within %.0f s", timeout_s)
            return
        time.sleep(POLL_S)


# -------------------------------------------------------------------------------------- the first replica


def _wait_for_first(
    serve: Any, url: str, deployment: Deployment, deploying: Future[Any], stop: ShutdownRequest
) -> bool:
    """Wait until the directory lists a server; return False if asked to stop before.

    Raises:
        ServerUnavailable: If no replica can serve.
        ConfigError: If replicas serve, but the directory does not answer at its address.
    """
    deadline: float | None = None
    while not stop.wait(POLL_S):
        if deploying.done() and (error := deploying.exception()) is not None:
            raise ServerUnavailable(f"no replica can serve: {reason(_told(serve), str(error))}")
        if _servers_listed(url, encrypted=deployment.certificate is not None):
            return True
        if deploying.done():
            deadline = deadline or time.monotonic() + DIRECTORY_S
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"replicas serve, but their directory does not answer at {url}: Ray Serve keeps the "
                    "port of its first start on this cluster; give that port"
                )
    return False


def _servers_listed(url: str, *, encrypted: bool) -> bool:
    """Return whether the directory answers and lists a server."""
    tls = own_server() if encrypted else None
    try:
        status, body = get(url, f"/{APPLICATION}{LISTING_PATH}", timeout_s=ASK_S, tls=tls)
        return status == 200 and bool(json.loads(body)["servers"])
    except (UpriverError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _told(serve: Any) -> str:
    """Return Ray Serve's message about the replicas; the application's says only that none started."""
    try:
        return str(_applications(serve)[APPLICATION].deployments[SERVERS].message)
    except Exception:  # gone in between, for example
        return ""


def reason(*texts: str) -> str:
    """Return the cause of a replica's failure: upriver's error at the end of Ray Serve's traceback.

    Args:
        texts: Messages of Ray Serve, the most detailed first.
    """
    for text in texts:
        place = text.rfind("upriver.errors.")
        if place >= 0:
            return said(text[place:].partition(":")[2], 1500)
    return said(next(filter(None, texts), ""), 1500)
