"""Test what ``--engine ray`` makes of its arguments, without Ray."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from upriver.cli.serve import ray as serve_ray
from upriver.cluster import deploy
from upriver.cluster.autoscale import TARGET_BYTES
from upriver.cluster.deploy import Deployment, ShutdownRequest, before_import, reason
from upriver.cluster.deployment import ReplicaSettings, Scale, stop_timeout_s
from upriver.errors import ConfigError, ServerUnavailable

STORES = {"default": "file:///data"}


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> list[Deployment]:
    """Record the deployments; each reports at once that it listens."""
    found: list[Deployment] = []

    def serve(deployment: Deployment, *, on_listening: Callable[[Mapping[str, object]], None]) -> None:
        found.append(deployment)
        print("chatter of Ray")
        on_listening({"listening": "ray+http://127.0.0.1:1", "pid": 1})

    monkeypatch.setattr(deploy, "serve_on_ray", serve)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return found


def test_one_replica_on_this_machine_is_the_default(
    deployed: list[Deployment], capsys: pytest.CaptureFixture[str]
) -> None:
    serve_ray.run({"stores": STORES})
    [found] = deployed
    assert found.document == {"stores": STORES, "threads": 1}
    assert (found.address, found.local, found.loopback) == ("local", True, True)
    assert (found.port, found.settings.host) == (8000, "127.0.0.1")
    assert (found.settings.grace_s, found.settings.target_bytes) == (25.0, TARGET_BYTES)
    assert found.scale == Scale(least=1, most=1, num_cpus=1.0)
    out = capsys.readouterr()
    assert json.loads(out.out) == {"listening": "ray+http://127.0.0.1:1", "pid": 1}, "and nothing else"
    assert "chatter" in out.err


def test_what_is_said_is_what_is_deployed(deployed: list[Deployment]) -> None:
    said: list[Mapping[str, object]] = []
    document = {
        "stores": STORES,
        "host": "0.0.0.0",
        "port": 9000,
        "workers": 2,
        "threads": 3,
        "device": "cuda",
        "grace_s": 4,
        "tls": {"certificate": "/c.pem", "key": "/k.pem"},
    }
    serve_ray.run(
        document,
        address="ray://head:10001",
        replicas=(2, 5),
        token="sesame",
        queue_bytes=7,
        on_listening=said.append,
    )
    [found] = deployed
    hashed = hashlib.sha256(b"sesame").hexdigest()
    assert found.document == {
        "stores": STORES,
        "workers": 2,
        "threads": 3,
        "device": "cuda",
        "grace_s": 4,
        "tls": {"certificate": "/c.pem", "key": "/k.pem"},
        "tenants": {"anyone": {"token_hashes": [hashed]}},
    }
    assert "sesame" not in repr(found)
    assert (found.address, found.local, found.loopback) == ("ray://head:10001", False, False)
    assert (found.port, found.settings.host) == (9000, None)
    assert (found.settings.grace_s, found.settings.target_bytes) == (4.0, 7)
    assert found.scale == Scale(least=2, most=5, num_cpus=6.0, num_gpus=1.0)
    assert (found.certificate, found.key) == ("/c.pem", "/k.pem")
    assert len(said) == 1


def test_replicas_on_one_machine_share_its_memory(deployed: list[Deployment]) -> None:
    serve_ray.run({"stores": STORES}, replicas=(1, 4))
    serve_ray.run({"stores": STORES, "memory_reserve": 0.5}, replicas=2)
    for said in ({"memory_budget_bytes": "1 GiB"}, {"device": "cuda:0"}):
        serve_ray.run({"stores": STORES, **said}, replicas=4)
    serve_ray.run({"stores": STORES}, replicas=4, address="10.0.0.1:6379", token="sesame")
    reserves = [found.document.get("memory_reserve") for found in deployed]
    assert reserves == [pytest.approx(1 - 0.9 / 4), 0.75, None, None, None]
    with pytest.raises(ConfigError, match="memory_reserve"):
        serve_ray.run({"stores": STORES, "memory_reserve": 1}, replicas=2)


def test_the_address_may_stand_in_the_environment(
    deployed: list[Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError, match="token"):
        serve_ray.run({"stores": STORES})
    serve_ray.run({"stores": STORES}, token="sesame")
    serve_ray.run({"stores": STORES}, address="local")
    assert [found.address for found in deployed] == ["10.0.0.1:6379", "local"]


@pytest.mark.parametrize(
    ("document", "arguments", "said"),
    [
        ({"port": 70000}, {}, "port must lie in 0..65535"),
        ({"port": True}, {}, "port must lie"),
        ({"workers": 0}, {}, "workers must be"),
        ({"grace_s": -1}, {}, "grace_s must be"),
        ({}, {"replicas": 0}, "replicas must be"),
        ({}, {"replicas": (3, 2)}, "least <= most"),
        ({}, {"queue_bytes": 0}, "queue_bytes must be"),
        ({}, {"num_cpus": -1.0}, "cores"),
    ],
)
def test_what_cannot_be_meant(
    deployed: list[Deployment], document: dict[str, Any], arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        serve_ray.run({"stores": STORES, **document}, **arguments)
    assert deployed == []


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it is then an ImportError
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", *deploy.OFF):
        monkeypatch.setenv(name, "before")  # so that it is restored afterwards
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(ConfigError, match=r"pip install 'upriver\[ray\]'"):
        serve_ray.run({"stores": STORES}, address="local")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


# ---------------------------------------------------------------------------------------------- details


def test_a_cluster_of_our_own_asks_for_a_token_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", *deploy.OFF):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    before_import(local=False)
    assert "RAY_AUTH_MODE" not in os.environ
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    before_import(local=True)
    assert os.environ["RAY_AUTH_MODE"] == "token"
    token = os.environ["RAY_AUTH_TOKEN"]
    assert len(token) == 64
    before_import(local=True)
    assert os.environ["RAY_AUTH_TOKEN"] == token, "said already"


def test_an_operator_who_says_how_it_is_to_be_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x")
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    monkeypatch.setenv("RAY_DEDUP_LOGS", "1")
    before_import(local=True)
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
    assert "RAY_AUTH_TOKEN" not in os.environ
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "1"


def test_signals_ask_it_to_stop_and_the_second_insists() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    stop = ShutdownRequest()
    stop.install()
    try:
        assert not stop.wait(0.0)
        signal.raise_signal(signal.SIGTERM)
        assert stop.wait() and stop.signal == signal.SIGTERM
        stop.install()
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGINT)
    finally:
        stop.uninstall()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_it_may_be_stopped_from_another_thread() -> None:
    stop = ShutdownRequest()
    thread = threading.Thread(target=stop.set)
    thread.start()
    assert stop.wait(60)
    thread.join()


def test_the_reason_is_that_of_the_server_not_the_whole_traceback() -> None:
    text = (
        "Deploying application upriver failed: Traceback (most recent call last):\n"
        '  File "x.py", line 1, in y\n'
        "upriver.errors.ServerUnavailable: the replica's server ended with exit code 2;\n it said: error: why"
    )
    found = "the replica's server ended with exit code 2; it said: error: why"
    assert reason(text) == found
    assert reason(text, "Failed to update the deployments ['servers'].") == found
    assert reason("", text) == found
    assert reason("", "something else") == "something else"
    assert reason("in detail", "something else") == "in detail"


def test_a_replica_that_fails_is_told_with_the_reason_that_ray_serve_keeps_for_its_deployment() -> None:
    """Ray Serve's status of the application names only the deployment that failed."""
    message = "The deployment failed to start 3 times in a row. Error:\nupriver.errors.ServerUnavailable: why"
    servers = SimpleNamespace(message=message)
    status = SimpleNamespace(applications={"upriver": SimpleNamespace(deployments={"servers": servers})})

    deploying = Future[Any]()
    deploying.set_exception(
        RuntimeError("Deploying application upriver failed: Failed to update the deployments")
    )
    deployment = Deployment(
        document={},
        settings=ReplicaSettings(book="b", host="127.0.0.1", grace_s=1.0),
        scale=Scale(least=1, most=1, num_cpus=1.0),
        port=1,
    )
    for found, said in ((status, "no replica can serve: why"), (None, "Failed to update the deployments")):
        serve = SimpleNamespace(status=Mock(return_value=found))
        with pytest.raises(ServerUnavailable, match=said):
            deploy._wait_for_first(serve, "http://127.0.0.1:1", deployment, deploying, ShutdownRequest())


@pytest.mark.parametrize(("least", "most", "cpus"), [(0, 1, 1), (2, 1, 1), (1, 1, -1), (1, True, 1)])
def test_numbers_of_replicas(least: int, most: int, cpus: float) -> None:
    with pytest.raises(ConfigError):
        Scale(least=least, most=most, num_cpus=cpus)


def test_ray_waits_longer_than_the_replica_does() -> None:
    assert stop_timeout_s(25.0) > 25.0 + 5.0


def test_start_ray_was_too_slow_once_tries_again() -> None:
    ray = Mock()
    ray.init.side_effect = [Exception("The current node timed out during startup."), None]
    deploy.start(ray, num_cpus=1, loopback=True, folder="/tmp/ray")
    assert ray.init.call_count == 2


def test_start_ray_never_starts_raises_with_the_reason() -> None:
    ray = Mock()
    ray.init.side_effect = RuntimeError("Timed out waiting for file")
    with pytest.raises(ServerUnavailable, match="Ray does not start on this machine: Timed out waiting"):
        deploy.start(ray, num_cpus=1, loopback=True, folder="/tmp/ray")
    assert ray.init.call_count == deploy.START_ATTEMPTS
