"""Check that strangers, and tenants who only look, use a bounded share of the front."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest
import torch

from tests.server.configured import bearer, post_run, read_run, tenant
from tests.server.running import Running, ask
from upriver.server.config import ServerConfig
from upriver.server.device_group import DeviceGroups
from upriver.server.http.auth import Authenticator
from upriver.server.http.light_requests import MAX_STRANGERS, SHARE, LightRequests
from upriver.server.http.limits import ABORT, HeldConnection, make_room
from upriver.server.observability.audit_log import AuditLog
from upriver.server.observability.logging import AT_ONCE, JsonFormatter, RateLimitFilter, TextFormatter
from upriver.server.sandbox import rlimits
from upriver.server.sandbox.rlimits import FRONT_FILES, connections
from upriver.server.tenants import Tenant, hash_token
from upriver.types import MicroBatch

FILES = 128
STRANGERS = 300
ASKING = b"GET /v1/info HTTP/1.1\r\nHost: server\r\n\r\n"


# ------------------------------------------------------------------------------------ a server with few files


@pytest.fixture(scope="module")
def crowded(world, tmp_path_factory):
    """Start a server that may open few files; its log shows every import."""
    folder = tmp_path_factory.mktemp("crowded")
    text = 'port = 0\nthreads = 1\nmemory_budget_bytes = "700 MB"\n[caps]\nbody_bytes = "4 GB"\n'
    text += f'[stores.default]\nuri = "{world.store.uri}"\n'
    (folder / "server.toml").write_text(text + tenant("alice", "token-a", default=[""]))
    command = [sys.executable, "-X", "importtime", "-m", "upriver", "serve", "--config", "server.toml"]
    limited = ["sh", "-c", f'ulimit -n {FILES} && exec "$@"', "sh", *command]
    log = folder / "log"
    with (
        log.open("wb") as stderr,
        subprocess.Popen(limited, cwd=folder, stdout=subprocess.PIPE, stderr=stderr) as process,
    ):
        try:
            server = Running(process, json.loads(process.stdout.readline())["listening"]).wait_ready()
            yield server, log
        finally:
            process.kill()


def connected(server, stack):
    host, port = server.address.split(":")
    connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
    return connection


def test_strangers_without_end_leave_a_good_request_its_answer_its_connection_and_a_readable_log(
    crowded, world
):
    server, log = crowded
    started = log.read_text()
    assert f"may open {FILES} files" in started
    began = time.monotonic()
    kept = http.client.HTTPConnection(server.address, timeout=60)
    kept.request("GET", "/v1/info", headers=bearer("token-a"))
    kept.getresponse().read()
    before = kept.sock
    with ExitStack() as stack:
        strangers = [connected(server, stack) for _ in range(STRANGERS)]
        for each in strangers:
            with suppress(ConnectionError):
                each.sendall(ASKING)
        status, body = post_run(server, world.request((0, 1, 2, 3)), "token-a")
        assert status == 200
        (answer,) = [found for found in read_run(body) if isinstance(found, MicroBatch)]
        wanted = world.here((0, 1, 2, 3), 0)
        assert all(map(torch.equal, answer.tensors, wanted.tensors))
        for each in strangers:
            with suppress(ConnectionError):
                assert each.recv(12) in (b"", b"HTTP/1.1 401")
        kept.request("GET", "/v1/info", headers=bearer("token-a"))
        assert kept.getresponse().status == 200
        assert kept.sock is before
    kept.close()
    told = log.read_text()[len(started) :]
    refusals = [line for line in told.splitlines() if not line.startswith("import time:")]
    assert {line.partition("auth: ")[2] for line in refusals} <= {
        "refused a request from 127.0.0.1: it sent no token"
    }
    assert len(refusals) <= 2 + (time.monotonic() - began) // 60, "one in a minute"


def test_refusing_strangers_imports_nothing(crowded):
    server, log = crowded
    started = len(log.read_bytes())
    for method, path in (("GET", "/v1/info"), ("POST", "/v1/run"), ("GET", "/nowhere"), ("PUT", "/livez")):
        assert ask(server, method, path)[0] in (401, 405)
    with ExitStack() as stack:
        for sent in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nh: " + bytes(1 << 17)):
            stranger = connected(server, stack)
            with suppress(ConnectionError):
                stranger.sendall(sent)
                stranger.recv(1 << 16)
    assert b"import time:" not in log.read_bytes()[started:]


def test_a_body_that_never_fits_is_refused_before_it_comes(crowded):
    server, _ = crowded
    with ExitStack() as stack:
        connection = connected(server, stack)
        head = ["POST /v1/run HTTP/1.1", "Host: server", "Content-Length: 2000000000"]
        head += [f"{name}: {value}" for name, value in bearer("token-a").items()]
        connection.sendall("\r\n".join([*head, "", ""]).encode())
        response = http.client.HTTPResponse(connection)
        response.begin()
        error = json.loads(response.read())["error"]
        assert (response.status, error["code"]) == (413, "does_not_fit")
        assert "takes 2 GB of memory, and the server has" in error["message"]
        assert response.headers["Retry-After"] is None


# --------------------------------------------------------------------------------------------- descriptors


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "held", "raised"),
    [
        (4096, 4096, 512, 512, None),
        (256, 4096, 512, 512, 512 + FRONT_FILES),
        (256, resource.RLIM_INFINITY, 512, 512, 512 + FRONT_FILES),
        (256, 600, 512, 600 - FRONT_FILES, 600),
        (128, 128, 512, 64, None),
        (1, 1, 512, 1, None),
        (128, 128, 32, 32, None),
    ],
)
def test_as_many_connections_as_there_are_descriptors_for(
    monkeypatch, caplog, soft, hard, wanted, held, raised
):
    told = []
    monkeypatch.setattr(rlimits.resource, "getrlimit", lambda number: (soft, hard))
    monkeypatch.setattr(rlimits.resource, "setrlimit", lambda number, pair: told.append(pair))
    assert connections(wanted) == held
    assert told == ([] if raised is None else [(raised, hard)])
    assert [str(wanted) in record.getMessage() for record in caplog.records] == [True] * (held < wanted)


class Here(HeldConnection):
    """Connection that a test can end."""

    def __init__(self, since, *, known=False, busy=False):
        self.since, self.known, self._busy = since, known, busy
        self.transport = SimpleNamespace(abort=lambda: None)

    @property
    def busy(self):
        return self._busy


def test_strangers_go_before_tenants_and_who_works_stays():
    newcomer = Here(9)
    held = [
        Here(1, known=True, busy=True),
        Here(2, known=True),
        Here(3, busy=True),
        Here(5),
        Here(4),
    ]
    went = []
    while make_room([*held, newcomer], newcomer):
        went += [each.since for each in held if each.given_up and each.since not in went]
    assert went == [4, 5, 3, 2]


# --------------------------------------------------------------------------------------------------- turns


STORE = {"default": "memory://"}
TENANTS = tuple(Tenant(name=name, token_hashes=(hash_token(f"token-{name}"),)) for name in ("alice", "bob"))


class Asked:
    """Send requests through the door to an application that spends some time on each.

    Attributes:
        through: The answered requests with their status, in order.
    """

    def __init__(self, *, looks=None, max_connections=512, **status):
        self.through = []
        self._status = status
        config = ServerConfig(stores=STORE, tenants=TENANTS, max_connections=max_connections)
        self._access = Authenticator(self._answer, config, AuditLog(None), looks=looks)

    async def _answer(self, scope, receive, send):
        if scope["path"] == "/v1/run":
            for _ in range(3):
                await asyncio.sleep(0)
        until = time.thread_time() + 0.002
        while time.thread_time() < until:
            pass
        status = self._status.get(scope["token"], 200)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def ask(self, method, path, token, abort=lambda: None):
        async def send(message):
            if message["type"] == "http.response.start":
                self.through.append((token, message["status"]))

        headers = [(b"authorization", f"Bearer token-{token}".encode())]
        scope = {"type": "http", "method": method, "path": path, "headers": headers, "token": token}
        await self._access({**scope, "state": {ABORT: abort}}, None, send)


async def _many(asked, method, path, token, count, **more):
    await asyncio.gather(*(asked.ask(method, path, token, **more) for _ in range(count)))


@pytest.mark.parametrize(
    ("method", "path", "token", "status"),
    [
        ("GET", "/metrics", "bob", 200),
        ("GET", "/nowhere", "bob", 404),
        ("HEAD", "/v1/programs/0", "bob", 200),
        ("POST", "/v1/probe", "bob", 200),
        ("GET", "/livez", "anyone", 200),
        ("GET", "/v1/info", "stranger", 401),
    ],
)
def test_of_many_who_only_look_few_go_before_one_who_works(method, path, token, status):
    asked = Asked(**{token: status})

    async def crowd():
        looking = asyncio.create_task(_many(asked, method, path, token, 16))
        await asyncio.sleep(0)
        await asked.ask("POST", "/v1/run", "alice")
        await looking

    asyncio.run(crowd())
    assert sorted(asked.through) == sorted([("alice", 200), *[(token, status)] * 16])
    assert asked.through.index(("alice", 200)) <= 4


def test_of_many_who_ask_for_what_cannot_be_done_few_are_told_before_one_is_answered():
    asked = Asked(bob=404)

    async def crowd():
        await asked.ask("POST", "/v1/run", "alice")
        failing = asyncio.create_task(_many(asked, "POST", "/v1/run", "bob", 16))
        await asyncio.sleep(0)
        await asked.ask("POST", "/v1/run", "alice")
        await failing

    asyncio.run(crowd())
    assert asked.through[0] == ("alice", 200)
    assert asked.through[1:].index(("alice", 200)) <= 4


def test_a_tenant_who_looks_once_waits_for_one_look_of_another():
    order = []

    async def crowd():
        looks = LightRequests()

        async def look(who):
            await looks.turn(who)
            order.append(who)

        await asyncio.gather(*(look("bob") for _ in range(16)), look("alice"))

    asyncio.run(crowd())
    assert order.index("alice") <= 2


def test_looking_takes_its_share_while_anyone_works_and_all_there_is_else():
    async def seconds(*, working):
        looks, loop = LightRequests(), asyncio.get_running_loop()
        with ExitStack() as stack:
            if working:
                stack.enter_context(looks.works())
            looks.charge("bob", 0.05)
            began = loop.time()
            await asyncio.wait_for(looks.turn("bob"), 60)
            return loop.time() - began

    assert asyncio.run(seconds(working=True)) >= 0.05 * (1 / SHARE - 1) - 0.01
    assert asyncio.run(seconds(working=False)) < 0.05


def test_time_that_a_look_waits_is_not_charged():
    async def charged():
        looks = LightRequests()

        async def work():
            await asyncio.sleep(0.2)

        await looks.look("bob", work())
        with looks.works():
            await looks.turn("alice")  # at once
        return looks._next_at - time.monotonic()

    assert asyncio.run(charged()) < 0.1


def test_an_error_and_an_end_reach_what_looks():
    seen = []

    async def work(*, failing):
        try:
            await asyncio.sleep(0 if failing else 3600)
            raise KeyError("of its own")
        except BaseException as error:
            seen.append(type(error))
            raise

    async def both():
        looks = LightRequests()
        with pytest.raises(KeyError):
            await looks.look("bob", work(failing=True))
        task = asyncio.create_task(looks.look("bob", work(failing=False)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(both())
    assert seen == [KeyError, asyncio.CancelledError]


def test_strangers_beyond_those_who_wait_are_cut_off_without_an_answer():
    asked, cut = Asked(), []

    async def crowd():
        more = {"abort": lambda: cut.append(1)}
        await _many(asked, "GET", "/v1/info", "stranger", MAX_STRANGERS + 20, **more)

    asyncio.run(crowd())
    answered = asked.through.count(("stranger", 401))
    assert MAX_STRANGERS <= answered <= MAX_STRANGERS + 1
    assert len(cut) == MAX_STRANGERS + 20 - answered


def test_a_tenant_beyond_its_places_is_turned_away_at_once_and_cut_off_where_that_takes_too_long():
    cut = []

    async def crowd():
        looks = LightRequests()
        asked = Asked(looks=looks, max_connections=1)
        with looks.works():
            working = asyncio.create_task(asked.ask("POST", "/v1/run", "alice"))
            await asyncio.sleep(0)
            await asked.ask("GET", "/metrics", "bob", lambda: cut.append(1))
            looks.charge("bob", 10.0)
            await asked.ask("GET", "/metrics", "bob", lambda: cut.append(1))
            await working
        return asked.through

    assert asyncio.run(crowd()) == [("bob", 503), ("alice", 200)]
    assert cut == [1]


def test_memory_is_looked_at_once_however_many_ask():
    looks = []

    def used():
        looks.append(1)
        return 7

    async def ask_all():
        units = DeviceGroups([SimpleNamespace(pool=SimpleNamespace(used_bytes=used))])
        return await asyncio.gather(*(units.used_bytes() for _ in range(16)))

    assert asyncio.run(ask_all()) == [7] * 16
    assert looks == [1]


# ----------------------------------------------------------------------------------------------- log lines


def _record(line, message="a client did something"):
    return logging.LogRecord("upriver.some", logging.WARNING, "some.py", line, message, (), None)


def test_lines_of_one_place_are_spared_and_counted_and_others_are_not():
    clock = [0.0]
    spare = RateLimitFilter(now=lambda: clock[0])
    passed = [spare(_record(1)) for _ in range(AT_ONCE + 200)]
    assert passed == [True] * AT_ONCE + [False] * 200
    other, again = _record(2), _record(2)
    assert spare(other)
    assert spare(again)
    assert (other.left_out, again.left_out) == (200, 0)
    assert "200 lines left out before it" in TextFormatter().format(other)
    assert json.loads(JsonFormatter().format(other))["left_out"] == 200
    assert "left" not in TextFormatter().format(again) + JsonFormatter().format(again)
    clock[0] = 1.0
    assert [spare(_record(1)) for _ in range(3)] == [True, False, False]
