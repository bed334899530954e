import os
import select
import threading

import pytest

from tests.finetune.children import ended, fork
from upriver.errors import ConfigError, ServerUnavailable
from upriver.rpc.child_server import Lifeline
from upriver.rpc.local_server import EmbeddedServer


@pytest.fixture(autouse=True)
def no_thread_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before  # a thread of another test may have ended


def test_memory_stores_cannot_be_embedded():
    with pytest.raises(ConfigError, match=r"'default' \(memory://a\)"):
        EmbeddedServer.start({"default": "memory://a"})


def test_some_store_is_needed():
    with pytest.raises(ConfigError, match="at least one store"):
        EmbeddedServer.start({})


def test_cores_must_be_ours(tmp_path):
    with pytest.raises(ConfigError, match="99999"):
        EmbeddedServer.start({"default": tmp_path.as_uri()}, cpu={99999})


@pytest.mark.slow
def test_a_server_that_dies_says_why(tmp_path):
    with pytest.raises(ServerUnavailable, match=r"exit code 2(.|\n)*nowhere"):
        EmbeddedServer.start({"default": (tmp_path / "nowhere").as_uri()})


@pytest.mark.slow
def test_a_server_that_says_nothing_is_given_up(tmp_path):
    with pytest.raises(ServerUnavailable, match="not ready in time"):
        EmbeddedServer.start({"default": tmp_path.as_uri()}, timeout_s=0.01)


def test_lifeline_with_a_forked_child_ends_with_its_owner():
    """Otherwise a server that reads the lifeline would live as long as any fork of its owner."""
    line = Lifeline()
    hold, release = os.pipe()
    child = fork(lambda: os.read(hold, 1) == b"x")
    try:
        assert not select.select([line.reader], [], [], 0)[0]
        line.close()
        assert select.select([line.reader], [], [], 60)[0] and os.read(line.reader, 1) == b""
    finally:
        os.write(release, b"x")
        assert ended(child) == 0
        for descriptor in (line.reader, hold, release):
            os.close(descriptor)


def test_lifeline_closed_twice_closes_no_one_elses_descriptor():
    line = Lifeline()
    line.close()
    line.hand_over()
    reader, writer = os.pipe()
    line.close()
    os.write(writer, b"x")
    assert os.read(reader, 1) == b"x"
    for descriptor in (reader, writer):
        os.close(descriptor)
