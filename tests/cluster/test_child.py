"""Test a replica's server: a real process with a private file, queried, killed, and gone with its parent."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.server.certificates import Authority, needs_openssl
from upriver.cluster.child import ServerProcess, environment, own_server
from upriver.cluster.replica_config import portable
from upriver.errors import ServerUnavailable

GRACE_S = 5.0


@contextlib.contextmanager
def serving(store: Path, *, token: str | None = None, **more: object) -> Iterator[ServerProcess]:
    document = portable({"stores": {"default": store.as_uri()}, "threads": 1, **more}, token=token)
    server = ServerProcess(document, host="127.0.0.1", grace_s=GRACE_S)
    try:
        yield server
    finally:
        server.close()


def test_a_replica_imports_no_torch() -> None:
    modules = ["child", "deploy", "deployment", "discover", "ray_workers"]
    imports = ", ".join(f"upriver.cluster.{name}" for name in modules)
    script = f"import sys, {imports}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@needs_openssl
@pytest.mark.parametrize("apart", [True, False])
def test_a_key_may_stand_in_the_file_of_its_certificate(apart: bool, tmp_path: Path) -> None:
    who = Authority(tmp_path / "authority").issue("replica")
    both = tmp_path / "both.pem"
    both.touch(mode=0o600)
    both.write_bytes(who.certificate.read_bytes() + who.key.read_bytes())
    shown = (str(who.certificate), str(who.key)) if apart else (str(both), None)
    assert own_server(*shown).verify_mode is ssl.CERT_NONE


def ask(url: str, path: str, token: str | None = None) -> int:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_nothing_of_ray_and_no_token_is_passed_on() -> None:
    ours = {
        "PATH": "/bin",
        "B_SECRET": "named by the operator",
        "RAY_AUTH_TOKEN": "of the cluster",
        "RAY_ADDRESS": "somewhere",
        "UPRIVER_TOKEN": "of clients",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    assert environment(ours) == {
        "PATH": "/bin",
        "B_SECRET": "named by the operator",
        "CUDA_VISIBLE_DEVICES": "1",
    }


@pytest.mark.slow
@pytest.mark.full
def test_a_server_lives_says_how_busy_it_is_and_ends_in_peace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    with serving(tmp_path / "store") as server:
        assert list((tmp_path / "temp").iterdir()) == [], "its file is gone once it has been read"
        assert ask(server.url, "/readyz") == 200
        server.check()
        waiting_bytes, utilisation = server.load()
        assert waiting_bytes == 0 and 0 <= utilisation <= 1
        family = [server.pid, *(child.pid for child in psutil.Process(server.pid).children(recursive=True))]
        assert len(family) >= 2
    assert not server.running
    until(lambda: not any(map(_lives, family)))
    server.close()
    with pytest.raises(ServerUnavailable, match="exit code 0"):
        server.check()


@pytest.mark.full
def test_a_server_with_a_token_answers_its_replica_and_no_stranger(tmp_path: Path) -> None:
    with serving(tmp_path, token="sesame") as server:
        assert "sesame" not in Path(f"/proc/{server.pid}/cmdline").read_text()
        assert "sesame" not in Path(f"/proc/{server.pid}/environ").read_text()
        assert ask(server.url, "/v1/info") == 401
        assert ask(server.url, "/v1/info", token="sesame") == 200
        assert server.load()[0] == 0
        server.check()


@pytest.mark.slow
def test_a_server_that_was_killed_is_told(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: not server.running)
        with pytest.raises(ServerUnavailable, match="was ended by SIGKILL"):
            server.check()
        with pytest.raises(ServerUnavailable, match=server.url):
            server.load()


@pytest.mark.full
def test_a_server_that_hangs_is_told_and_ended_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upriver.cluster.child.ASK_S", 0.5)
    monkeypatch.setattr("upriver.cluster.child.KILL_S", 1.0)
    with serving(tmp_path) as server:
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(ServerUnavailable, match=r"no answer in time|timed out"):  # in all, or a read
            server.check()
        server.close()
        assert not server.running


@pytest.mark.full
def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerUnavailable, match=r"exit code 2; it said: (.|\n)*nowhere"),
        serving(tmp_path / "nowhere"),
    ):
        raise AssertionError("it started")


@pytest.mark.full
@pytest.mark.slow
def test_a_server_ends_with_its_replica_however_that_dies(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from upriver.cluster.child import ServerProcess\n"
        "document = {'stores': {'default': sys.argv[1]}, 'threads': 1}\n"
        "server = ServerProcess(document, host='127.0.0.1', grace_s=1)\n"
        "print(server.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, tmp_path.as_uri()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as replica:
        assert replica.stdout is not None
        pid = int(replica.stdout.readline())
        family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        replica.kill()
        replica.wait()
        until(lambda: not any(map(_lives, family)))


def _lives(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
