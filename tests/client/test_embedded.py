import threading

import pytest

from upriver.client.embedded import EmbeddedServer
from upriver.errors import ConfigError, ServerUnavailable


@pytest.fixture(autouse=True)
def no_thread_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before  # another test's may have ended


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
