"""Test log lines: each names its request, and none holds a secret."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.running import SERVE, Running, ask, run, wait_for
from upriver.errors import ConfigError
from upriver.server.execution.worker_output import WorkerOutput
from upriver.server.observability import logging as logs
from upriver.server.observability.logging import (
    MAX_CHARS,
    JsonFormatter,
    TextFormatter,
    configure,
    redacted,
    request_context,
    request_id,
)
from upriver.server.observability.tracing import TracingMiddleware

SECRET = "sEkReT-0123.abc"


@contextmanager
def written(formatter):
    """Return a logger and its output."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    log = logging.getLogger("upriver.test_logs")
    log.addHandler(handler)
    log.propagate = False
    try:
        yield log, stream
    finally:
        log.removeHandler(handler)
        log.propagate = True


@pytest.fixture
def root():
    """Restore the root logger after a test."""
    logger, ours = logging.getLogger(), logging.getLogger("upriver")
    # A command that another test ran in this process may have left a handler with a closed stream.
    handlers = [
        each for each in logger.handlers if not getattr(getattr(each, "stream", None), "closed", False)
    ]
    logger.handlers[:] = handlers
    level, our_level = logger.level, ours.level
    yield logger
    logging.captureWarnings(False)
    logger.handlers[:] = handlers
    logger.setLevel(level)
    ours.setLevel(our_level)
    logs._handler, logs._hidden = None, ()


# --------------------------------------------------------------------------------------------- lines


def test_json_is_one_object_a_line_with_what_is_known():
    with written(JsonFormatter()) as (log, stream):
        log.warning("worker %d is gone", 7)
        with request_context(tenant="anna", request_id="5f0c"):
            log.error("line\nbreak")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first == {"level": "WARNING", "logger": "upriver.test_logs", "message": "worker 7 is gone"}
    assert (second["request_id"], second["tenant"]) == ("5f0c", "anna")
    assert second["message"] == "line\nbreak"


def test_an_exception_is_one_string():
    with written(JsonFormatter()) as (log, stream):
        try:
            raise ValueError("too bad")
        except ValueError:
            log.exception("failed")
    [line] = stream.getvalue().splitlines()
    said = json.loads(line)
    assert said["message"] == "failed"
    assert said["exception"].startswith("Traceback") and said["exception"].endswith("ValueError: too bad")


def test_text_says_the_same_in_a_line_for_people():
    with written(TextFormatter()) as (log, stream), request_context(tenant="anna", request_id="5f0c"):
        log.warning("worker %d is gone", 7)
    line = stream.getvalue().rstrip("\n").partition(" ")[2]
    assert line == "WARNING upriver.test_logs: worker 7 is gone [request 5f0c, tenant anna]"


@given(st.text(max_size=200))
def test_whatever_is_said_stays_one_line(text):
    for formatter in (JsonFormatter(), TextFormatter()):
        with written(formatter) as (log, stream):
            log.warning("%s", text)
        assert stream.getvalue().endswith("\n") and stream.getvalue().count("\n") == 1
    assert stream.getvalue().rstrip("\n").isprintable()  # also for a terminal


def test_a_name_that_is_no_text_can_be_said():
    with written(JsonFormatter()) as (log, stream):
        log.warning("no file %s", os.fsdecode(b"caf\xe9"))
    assert "caf" in json.loads(stream.getvalue())["message"]


# ------------------------------------------------------------------------------------------ requests


def test_requests_at_once_keep_their_ids():
    async def one(log, tenant):
        with request_context(tenant=tenant) as mine:
            for _ in range(3):
                await asyncio.sleep(0)
                assert request_id() == mine
                log.warning("%s", mine)
                # Tasks that a request starts belong to it.
                await asyncio.create_task(asyncio.to_thread(log.warning, "%s", mine))
            return mine

    async def both(log):
        return await asyncio.gather(one(log, "anna"), one(log, "ben"))

    with written(JsonFormatter()) as (log, stream):
        ids = asyncio.run(both(log))
    assert len(set(ids)) == 2 and request_id() == ""
    said = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(said) == 12
    assert all(line["request_id"] == line["message"] for line in said)
    assert {(line["tenant"], line["request_id"]) for line in said} == set(
        zip(["anna", "ben"], ids, strict=True)
    )


def test_an_inner_context_ends_with_its_block():
    with request_context(request_id="outer"):
        with request_context(request_id="inner"):
            assert request_id() == "inner"
        assert request_id() == "outer"


# ------------------------------------------------------------------------------------------- secrets


@pytest.mark.parametrize(
    "line",
    [
        f"Authorization: Bearer {SECRET}",
        f"authorization: {SECRET}",
        f"{{'Authorization': 'Bearer {SECRET}', 'Host': 'a'}}",
        f"[(b'authorization', b'Bearer {SECRET}')]",
        f"sent Bearer {SECRET}, refused",
        "sent Basic " + SECRET.replace("-", "+"),
        f"token={SECRET}",
        f"token: '{SECRET}'",
        f'"token": "{SECRET}"',
        rf"{{\"secret\": \"{SECRET}\"}}",
        f"secret_access_key={SECRET}&region=a",
        f"aws_secret_access_key = {SECRET}",
        f"AWS_ACCESS_KEY_ID={SECRET}",
        f"options {{'access_key_id': '{SECRET}', 'region': 'eu'}}",
        f"client_secret: {SECRET}",
        f"password={SECRET};",
        f"s3://key:{SECRET}@host/bucket",
        f"GET https://host/a?X-Amz-Credential={SECRET}&b=1",
    ],
)
def test_secrets_are_taken_out_by_their_form(line):
    assert SECRET not in redacted(line) and SECRET.replace("-", "+") not in redacted(line)
    assert "***" in redacted(line)
    for formatter in (JsonFormatter(), TextFormatter()):
        with written(formatter) as (log, stream):
            log.warning("before %s after", line)
            try:
                raise ValueError(line)
            except ValueError:
                log.exception("failed")
        assert SECRET not in stream.getvalue()
        assert "before" in stream.getvalue() and "after" in stream.getvalue()


@pytest.mark.parametrize(
    "line",
    [
        "the token is not valid here",
        "sample 3 in object 'a/b.png': not an image",
        "worker 7 is gone: it was ended by SIGKILL; starting another",
        "num_tokens=512, tokens: 3",
        "cannot read 'x' in store 'images' (s3://bucket/prefix): timed out",
    ],
)
def test_what_is_no_secret_stays(line):
    assert redacted(line) == line


def test_the_token_of_a_request_never_appears_wherever_it_stands():
    with written(JsonFormatter()) as (log, stream), request_context(hidden=[SECRET, ""]):
        log.warning("the client said %s twice: %s", SECRET, SECRET)
        log.warning("in the middle:x%sx", SECRET)
    assert SECRET not in stream.getvalue()
    assert stream.getvalue().count("***") == 3


@pytest.mark.parametrize(
    "header", [f"Bearer {SECRET}", f"bearer  {SECRET}", "Basic YW55Ym9keTpzRWtSZVQtMDEyMy5hYmM="]
)
def test_the_front_hides_what_a_request_came_with(header):
    async def answer(scope, receive, send):
        log.warning("it came with %s and %s", SECRET, header)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": request_id().encode()})

    sent = []

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/",
        "headers": [(b"authorization", header.encode())],
    }
    with written(JsonFormatter()) as (log, stream):
        asyncio.run(TracingMiddleware(answer)(scope, None, send))
    assert SECRET not in stream.getvalue() and header.split()[1] not in stream.getvalue()
    assert dict(sent[0]["headers"])[b"x-request-id"] == sent[1]["body"]
    assert json.loads(stream.getvalue())["request_id"].encode() == sent[1]["body"]
    assert json.loads(stream.getvalue())["tenant"] == "anyone"


def test_a_secret_at_the_end_of_a_long_line_is_not_cut_in_half():
    with request_context(hidden=[SECRET]):
        short = redacted("x" * (MAX_CHARS - 5) + SECRET + "y" * 100)
    assert SECRET[:4] not in short
    assert len(short) <= MAX_CHARS + 1


def test_a_log_line_can_be_as_long_as_it_likes():
    assert len(redacted("secret" * 1_000_000)) <= MAX_CHARS + 1


# -------------------------------------------------------------------------------------------- set-up


def test_configuring_twice_writes_once(root, capsys):
    configure("text")
    configure("json", secrets=[SECRET])
    logging.getLogger("upriver.server").info("ready with %s", SECRET)
    logging.getLogger("other").info("not this")
    logging.getLogger("other").warning("but this")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["message"], first["level"]) == ("ready with ***", "INFO")
    assert second["message"] == "but this"


def test_warnings_go_into_the_log(root, capsys):
    configure("json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)  # catch_warnings has restored its own handler
        warnings.warn("mind the gap", stacklevel=1)
    assert "mind the gap" in json.loads(capsys.readouterr().err)["message"]


def test_what_workers_print_stands_in_json_too(root, capsys):
    configure("json", secrets=[SECRET])
    read, write = os.pipe()
    output = WorkerOutput(os.fdopen(read, "rb"))  # which closes it
    output.pass_on()
    with open(write, "wb") as worker:
        worker.write(f"a library warns\n\n{{}} with {SECRET}\n".encode())
    assert output.last_line(timeout_s=60) == f"{{}} with {SECRET}"
    messages = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert messages == ["a worker printed: a library warns", "a worker printed: {} with ***"]


@pytest.mark.parametrize("settings", [{"format": "xml"}, {"level": "LOUD"}, {"level": None}])
def test_settings_that_cannot_be_meant(root, settings):
    before = list(root.handlers)
    with pytest.raises(ConfigError):
        configure(**settings)
    assert root.handlers == before


# ------------------------------------------------------------------------------------- a real server


LOGGED = f"""
import logging
from upriver.server.observability import logging as logs
logs.configure("json", logging.WARNING, secrets=[{SECRET!r}])
"""
"""Script that logs as ``upriver serve`` does first."""


@contextmanager
def logged(store_uri, **settings):
    """Start a server; yield it with the lines of its stderr as they come."""
    config = {"stores": {"default": store_uri}, "port": 0, "threads": 1, "grace_s": 2, **settings}
    process = subprocess.Popen(
        [sys.executable, "-c", LOGGED + SERVE, json.dumps(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stderr.readline, b"")))
    reader.start()
    try:
        yield Running(process, json.loads(process.stdout.readline())["listening"]), lines
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()
        process.stderr.close()


@pytest.mark.slow
def test_a_server_logs_json_without_its_token(world):
    with logged(world.store.uri, token=SECRET, log_format="json") as (server, lines):
        for token in (SECRET, SECRET[:-1]):
            ask(server, "GET", "/v1/info", headers={"Authorization": f"Bearer {token}"})
            ask(server, "PUT", f"/v1/programs/{token}", b"x", headers={"Authorization": f"Bearer {token}"})
        [worker] = server.workers()
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: any(b"is gone" in line for line in lines))
        gone = next(json.loads(line) for line in lines if b"is gone" in line)
    assert (gone["level"], gone["logger"]) == ("WARNING", "upriver.server.execution.worker_pool")
    assert str(worker) in gone["message"] and "SIGKILL" in gone["message"]
    assert not any(SECRET[:-1].encode() in line for line in lines)


def test_every_request_has_an_id_of_its_own(server, world):
    answers = [ask(server, "GET", "/v1/info")[1]["x-request-id"] for _ in range(3)]
    assert len(set(answers)) == 3
    assert all(re.fullmatch(r"[0-9a-f]{16}", answer) for answer in answers)
    assert run(server, world.request((0,)))  # a stream has room for it too
