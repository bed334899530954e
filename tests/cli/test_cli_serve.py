"""Test ``upriver serve`` as a process: one line when it listens, a clean end, no life after its parent."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.examples import some
from tests.server.running import wait_for
from upriver.cli import app, main
from upriver.cli.serve.options import leave, split_store
from upriver.errors import ConfigError

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def serving(
    *arguments: str,
    pass_fds: tuple[int, ...] = (),
    token: str | None = None,
    stderr: int = subprocess.DEVNULL,
) -> Iterator[tuple[subprocess.Popen[str], dict[str, object]]]:
    """Yield a server process and the line that it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "UPRIVER_TOKEN"}
    if token is not None:
        environment["UPRIVER_TOKEN"] = token
    command = [sys.executable, "-m", "upriver", "serve", "--port", "0", "--threads", "1", *arguments]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environment,
        pass_fds=pass_fds,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def get(url: object, path: str, token: str | None = None) -> tuple[int, bytes]:
    """Return status and body of one GET."""
    connection = http.client.HTTPConnection(urlsplit(str(url)).netloc, timeout=60)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def wait_until_ready(url: object) -> None:
    """Wait until the server reports ready; one worker was ready when it said that it listens."""
    for _ in range(600):
        if get(url, "/readyz")[0] == 200:
            return
        time.sleep(0.1)
    raise AssertionError("the server did not become ready within 60 s")


def test_it_says_where_it_listens_and_ends_with_0_on_sigterm(tmp_path: Path) -> None:
    with serving("--store", f"photos={tmp_path.as_uri()}") as (process, said):
        assert said["pid"] == process.pid
        wait_until_ready(said["listening"])
        status, body = get(said["listening"], "/v1/info")
        assert status == 200
        assert json.loads(body)["stores"] == ["photos"]
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
        assert rest == ""
        assert process.returncode == 0


@pytest.mark.full
def test_it_ends_with_its_parents_pipe(tmp_path: Path) -> None:
    theirs, ours = os.pipe()
    try:
        with serving("--store", tmp_path.as_uri(), "--parent-pipe", str(theirs), pass_fds=(theirs,)) as (
            process,
            said,
        ):
            assert get(said["listening"], "/livez")[0] == 200
            os.close(ours)
            ours = -1
            assert process.wait(timeout=60) == 0
    finally:
        os.close(theirs)
        if ours >= 0:
            os.close(ours)


@pytest.mark.parametrize("where", [pytest.param("environment", marks=pytest.mark.full), "file"])
def test_token_from_the_environment_or_a_file(tmp_path: Path, where: str) -> None:
    arguments = ["--store", tmp_path.as_uri()]
    if where == "file":
        (tmp_path / "token").touch(0o600)
        (tmp_path / "token").write_text("sesame\n")
        arguments += ["--token-file", str(tmp_path / "token")]
    with serving(*arguments, token="sesame" if where == "environment" else None) as (_, said):
        wait_until_ready(said["listening"])
        assert get(said["listening"], "/v1/info")[0] == 401
        assert get(said["listening"], "/v1/info", token="sesame")[0] == 200


@pytest.mark.full
def test_a_file_and_options_together(tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    uri = tmp_path.as_uri()
    config.write_text(f'port = 1\nworkers = 1\n[stores]\na = "{uri}"\n[stores.b]\nuri = "{uri}"\n')
    with serving("--config", str(config), "--store", f"c={tmp_path.as_uri()}") as (_, said):
        assert str(said["listening"]).startswith("http://127.0.0.1:")
        assert not str(said["listening"]).endswith(":1")
        wait_until_ready(said["listening"])
        assert sorted(json.loads(get(said["listening"], "/v1/info")[1])["stores"]) == ["a", "b", "c"]


def test_refuses_to_listen_to_others_without_a_token(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "upriver", "serve", "--store", tmp_path.as_uri(), "--host", "0.0.0.0"],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "UPRIVER_TOKEN"},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "0.0.0.0" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value", "said"),
    some(
        2,
        [
            ("--threads", "0", "threads must be a whole number >= 1, got 0"),
            ("--workers", "0", "workers must be a whole number >= 1, got 0"),
            ("--workers", "-1", "workers must be a whole number >= 1, got -1"),
            ("--device", "cuda:99", "device 'cuda:99' is not available here; torch sees: cpu"),
            ("--device", "toaster", "device 'toaster' is none that torch knows; it sees here: cpu"),
            ("--threads", str(2**40), "threads are at most "),
        ],
    ),
)
def test_what_can_never_work_is_one_line_and_no_server(
    tmp_path: Path, option: str, value: str, said: str
) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "upriver",
            "serve",
            "--store",
            tmp_path.as_uri(),
            "--port",
            "0",
            option,
            value,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.startswith(f"error: {said}")
    assert done.stderr.count("\n") == 1
    assert (done.returncode, done.stdout) == (2, "")


ENDS = [(signal.SIGTERM, 0), (signal.SIGINT, 130)]


@contextlib.contextmanager
def half_a_request(url: str) -> Iterator[None]:
    """Run a server in the middle of a request, waiting for the rest."""
    address = urlsplit(url)
    head = f"POST /v1/run HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: 100\r\n\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(head.encode() + b"UPRV")
        wait_for(lambda: b'bytes_in_total{tenant="anyone"} 4.0' in get(url, "/metrics")[1])
        yield


@pytest.mark.parametrize(("number", "code"), ENDS, ids=["TERM", "INT"])
def test_a_signal_before_there_is_a_server_ends_it_as_one_later(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    config = tmp_path / "server.toml"
    os.mkfifo(config)
    command = [sys.executable, "-m", "upriver", "serve", "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        with config.open("w", encoding="utf-8"):  # it reads, but nothing has been written yet
            process.send_signal(number)
            assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == code


def test_sigterm_is_an_end_and_no_interruption_before_the_options_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    monkeypatch.setattr(app, "app", lambda *_, **__: found.append(signal.getsignal(signal.SIGTERM)))
    before = signal.getsignal(signal.SIGTERM)
    assert [main([command]) for command in ("serve", "worker", "train")] == [0, 0, 0]
    assert found == [leave, leave, signal.default_int_handler]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.full
@pytest.mark.parametrize(
    ("second", "code"), [ENDS[0], pytest.param(*ENDS[1], marks=pytest.mark.full)], ids=["TERM", "INT"]
)
def test_a_second_signal_while_somebody_is_served_ends_it_quietly(
    tmp_path: Path, second: signal.Signals, code: int
) -> None:
    with serving("--store", tmp_path.as_uri(), stderr=subprocess.PIPE) as (process, said):
        url = str(said["listening"])
        with half_a_request(url):
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: get(url, "/readyz")[0] == 503)
            process.send_signal(second)
            assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == code


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "code"), [ENDS[0], pytest.param(*ENDS[1], marks=pytest.mark.full)], ids=["TERM", "INT"]
)
def test_who_is_served_when_the_grace_is_over_is_cut_off_quietly(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    config = tmp_path / "server.toml"
    config.write_text("grace_s = 0.5\n", encoding="utf-8")
    arguments = ("--store", f"{tmp_path}/../{tmp_path.name}", "--config", str(config))
    with serving(*arguments, stderr=subprocess.PIPE) as (process, said):
        with half_a_request(str(said["listening"])):
            process.send_signal(number)
            assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == code


def test_names_of_stores() -> None:
    assert split_store("file:///data") == ("default", "file:///data")
    assert split_store("photos=s3://bucket/a=b") == ("photos", "s3://bucket/a=b")
    assert split_store("s3://bucket/a=b") == ("default", "s3://bucket/a=b")
    assert split_store("./a=b") == ("default", "./a=b")
    assert split_store("photos=./a=b") == ("photos", "./a=b")
    assert split_store("photos") == ("default", "photos")
    with pytest.raises(ConfigError, match="NAME"):
        split_store("=file:///data")
