"""Test ``upriver worker`` as a process: the user's datasets, allowed by name, made in its folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.test_cli_serve import get
from tests.examples import some
from tests.server import allowing
from tests.server.running import has_loaded
from upriver import resources
from upriver.cli import main, worker
from upriver.cli.serve import config_file
from upriver.errors import CodeFailed, Forbidden, NotAuthorized, QuotaExceeded
from upriver.protocol import CodeRef, RunRequest
from upriver.protocol.tree import build
from upriver.rpc.client import ServerClient
from upriver.server.tenants import hash_token
from upriver.types import DONE, START

BIRDS = """
import os
import time


class Birds:
    def __init__(self, wings=2, password=""):
        self.wings = wings
        if password:
            raise PermissionError(f"not with {password}")

    def __getitem__(self, index):
        time.sleep(self.wings > 2)
        print("a bird is made")
        return {"bird": index, "wings": self.wings, "token": os.environ.get("UPRIVER_TOKEN")}
"""

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "UPRIVER_TOKEN"}


def asking(*micro_batches: tuple[int, ...], name: str = "birds:Birds", **arguments: Any) -> RunRequest:
    return RunRequest(
        code=CodeRef(name=name, arguments=arguments),
        micro_batches=micro_batches,
        micro_batch=max(map(len, micro_batches)),
        start=START,
        stop=DONE,
    )


def made(client: ServerClient, request: RunRequest) -> list[Any]:
    return [build(batch.tree, batch.tensors) for batch, _ in client.run(request)]


@contextlib.contextmanager
def working(
    folder: Path, *arguments: str, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """Yield a worker started in a folder with a module in it, its address, and the file of its stderr."""
    (folder / "birds.py").write_text(BIRDS)
    # Unlike ``python -m``, the installed script does not look for modules in the current folder.
    script = "import sys; sys.path[0] = '/'; from upriver.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "worker", "--port", "0", *arguments]
    log = folder / "stderr"
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=folder,
            env={**ENVIRONMENT, **environment},
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, log.read_text()
            said = json.loads(line)
            assert said["pid"] == process.pid
            yield process, said["listening"], log
        finally:
            process.kill()


MODULES = ("birds.py", "flock/__init__.py", "flock/data.py", "ns/inner/deep.py")
"""Modules in the folder in which a worker starts; each ends the test that imports it."""


@pytest.mark.parametrize(
    ("allow", "missing"),
    some(
        2,
        [
            ("aviary", "aviary"),
            ("aviary.data:Owls", "aviary"),
            ("flock.nest:Owls", "flock.nest"),
            ("flock.data.deeper", "flock.data.deeper"),
            ("ns.inner.nest", "ns.inner.nest"),
            ("ns.nest.deep", "ns.nest"),
            ("torch.utils.daata", "torch.utils.daata"),
        ],
    ),
)
def test_worker_that_allows_what_is_not_here_does_not_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    allow: str,
    missing: str,
) -> None:
    for name in MODULES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('imported by the front')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UPRIVER_TOKEN", raising=False)
    monkeypatch.setattr("upriver.server.serve", lambda config, **rest: None)
    assert main(["worker", "--allow", "birds", "--allow", allow]) == 2
    said = capsys.readouterr().err
    assert f"allow names {allow!r}, and there is no module {missing!r} here" in said
    for name in ("birds:Birds", "flock.data:Owls", "ns.inner.deep", "ns", "torch.utils.data", "math"):
        assert main(["worker", "--allow", name]) == 0, name


@pytest.mark.slow
def test_it_makes_what_lies_where_it_was_started_and_ends_with_0_on_sigterm(tmp_path: Path) -> None:
    with working(tmp_path, "--allow", "birds") as (process, url, log):
        info = json.loads(get(url, "/v1/info")[1])
        assert (info["allow"], info["stores"], info["threads"]) == (["birds"], [], 1)
        assert info["workers"] == resources.available_cpus()
        with ServerClient(url) as client:
            assert made(client, asking((3, 4))) == [
                [{"bird": number, "wings": 2, "token": None} for number in (3, 4)]
            ]
            with pytest.raises(CodeFailed, match="not with open-sesame"):
                made(client, asking((3,), password="open-sesame"))
        below = [child.pid for child in psutil.Process(process.pid).children()]
        assert not has_loaded(process.pid, "libtorch") and has_loaded(process.pid, "httptools")
        assert below and not any(has_loaded(pid, "httptools") for pid in below)
        assert any(has_loaded(pid, "libtorch") for pid in below)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[0] == ""
        assert process.returncode == 0
        logged = log.read_text()
        assert "a bird is made" in logged
        assert "Traceback" in logged and "PermissionError: not with ***" in logged
        assert "open-sesame" not in logged


@pytest.mark.slow
@pytest.mark.full
def test_a_token_is_asked_for_and_datasets_do_not_see_it(tmp_path: Path) -> None:
    arguments = ("--allow", "birds:Birds", "--host", "0.0.0.0", "--workers", "1")
    with working(tmp_path, *arguments, UPRIVER_TOKEN="sesame") as (_, url, _):
        url = url.replace("0.0.0.0", "127.0.0.1")
        with ServerClient(url) as client, pytest.raises(NotAuthorized):
            made(client, asking((3,)))
        with ServerClient(url, token="sesame") as client:
            assert made(client, asking((3,))) == [[{"bird": 3, "wings": 2, "token": None}]]


@pytest.mark.slow
def test_a_module_that_is_allowed_opens_what_it_defines_and_nothing_that_it_imports(tmp_path: Path) -> None:
    allowing.write(tmp_path)
    diary = tmp_path / "diary"
    options = [option for name in allowing.ALLOW for option in ("--allow", name)]
    with (
        working(tmp_path, *options, "--workers", "1", DIARY=str(diary)) as (_, url, _),
        ServerClient(url) as client,
    ):
        assert made(client, asking((1,), name="shop.data:make")) == [[1]]
        diary.unlink(missing_ok=True)  # code that the import runs is the module's own affair
        kinds = [
            "shell",
            "forged_shell",
            "Admin",
            "tool",
            "partial_command",
            "partial_run",
            "mock",
            "child",
            "Lying",
        ]
        names = [
            f"shop.data:{way.format(kind)}" for kind in kinds for way in ("{}", "Held.{}", "Held.static_{}")
        ]
        for name in (
            *names,
            "shop.data:admin.shell",
            "shop.database:make",
            "shop.bomb:Data",
            "shop.named:book",
        ):
            with pytest.raises(Forbidden, match=name):
                made(client, asking((1,), name=name))
        for name, sample in (
            ("shop.data:Birds.Small.made", -1),
            ("shop.data:kept", 1),
            ("shop.named:bell", 1),
        ):
            assert made(client, asking((1,), name=name)) == [[sample]]
    assert not diary.exists()


@pytest.mark.full
def test_tenants_of_a_file_have_their_quotas(tmp_path: Path) -> None:
    (tmp_path / "worker.toml").write_text(
        f'allow = ["birds"]\nworkers = 1\n[tenants.one]\ntoken_hashes = ["{hash_token("token-1")}"]\n'
        f'max_requests = 1\n[tenants.two]\ntoken_hashes = ["{hash_token("token-2")}"]\n'
    )
    with (
        working(tmp_path, "--config", "worker.toml") as (_, url, _),
        ServerClient(url, token="token-1") as one,
        ServerClient(url, token="token-2") as two,
    ):
        slow = asking(*((number,) for number in range(6)), wings=3)
        with one.run(slow) as answer:
            next(answer)
            with pytest.raises(QuotaExceeded):
                made(one, asking((1,)))
            assert made(two, asking((1,)))[0][0]["bird"] == 1
            assert [build(batch.tree, batch.tensors)[0]["bird"] for batch, _ in answer] == [1, 2, 3, 4, 5]


# ------------------------------------------------------------------------------------- server settings


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what the server would be told; no server starts."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(worker, "serve_here", lambda settings, token: found.update(settings, token=token))
    monkeypatch.delenv("UPRIVER_TOKEN", raising=False)
    return found


@pytest.mark.parametrize(
    ("cpus", "admitted", "requests"), [(1, 8, 128), (4, 8, 128), (16, 32, 256), (48, 96, 512)]
)
def test_as_many_processes_as_cpus_and_requests_for_all_of_them(
    told: dict[str, Any], monkeypatch: pytest.MonkeyPatch, cpus: int, admitted: int, requests: int
) -> None:
    monkeypatch.setattr(resources, "available_cpus", lambda: cpus)
    assert main(["worker", "--allow", "a.b", "--allow", "c:d"]) == 0
    expected = {
        "allow": ("a.b", "c:d"),
        "port": 7001,
        "workers": cpus,
        "threads": 1,
        "max_admitted": admitted,
        "max_waiting": requests,
        "max_requests": requests,
    }
    assert {name: told[name] for name in expected} == expected
    assert (told["stores"], told["token"]) == ({}, None)


def test_a_file_and_options_that_win(told: dict[str, Any], tmp_path: Path) -> None:
    config = tmp_path / "worker.toml"
    config.write_text(
        'allow = ["a"]\ncode_bytes = "1 MiB"\nmax_admitted = 3\nthreads = 2\nport = 1\n[stores.photos]\n'
        'uri = "s3://photos"\nenvironment = { access_key_id = "HOME", secret_access_key = "PATH" }\n'
    )
    assert main(["worker", "--config", str(config)]) == 0
    expected = {"allow": ("a",), "code_bytes": 1 << 20, "max_admitted": 3, "threads": 2, "port": 1}
    assert {name: told[name] for name in expected} == expected
    assert told["hidden_variables"] == ("HOME", "PATH")
    arguments = ["--allow", "b", "--port", "2", "--workers", "9", "--store", "more=file:///tmp"]
    assert main(["worker", "--config", str(config), *arguments]) == 0
    assert (told["allow"], told["port"], told["workers"]) == (("b",), 2, 9)
    assert set(told["stores"]) == {"photos", "more"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--allow"),
        (["--allow", "_a"], "underscore"),
        (["--allow", "a b"], "allow"),
        (["--allow", "a", "--host", "0.0.0.0"], "token"),
        (["--allow", "a", "--workers", "0"], "workers"),
        (["--allow", "a", "--threads", "0"], "threads"),
        (["--allow", "a", "--port", "70000"], "70000"),
        (["--allow", "a", "--store", "=x"], "--store"),
        (["--allow", "a", "--token-file", "/does/not/exist"], "/does/not/exist"),
        (["--allow", "a", "--parent-pipe", "987"], "987"),
        (["--allow", "a", "--config", "/does/not/exist.toml"], "/does/not/exist.toml"),
    ],
)
def test_what_cannot_be_meant_is_one_line(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UPRIVER_TOKEN", raising=False)
    assert main(["worker", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert named in captured.err


def test_a_server_beside_a_store_runs_no_code_and_says_what_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "server.toml"
    config.write_text('allow = ["a"]\n[stores]\na = "file:///tmp"\n')
    assert main(["serve", "--config", str(config)]) == 2
    assert "upriver worker" in capsys.readouterr().err
    assert config_file.check(config_file.load(config), where="file").plain.allow == ["a"]
