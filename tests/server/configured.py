"""Start a server from a TOML file, as an operator does, and send requests with a token."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager

from tests.server.running import Running, ask, body_of, messages
from upriver.server.tenants import hash_token


@contextmanager
def configured(folder, text, **environment):
    """Start a server process from a configuration file; remove everything afterwards."""
    path = folder / "server.toml"
    path.write_text(text)
    known = {name: value for name, value in os.environ.items() if name != "UPRIVER_TOKEN"}
    process = subprocess.Popen(
        [sys.executable, "-m", "upriver", "serve", "--config", str(path), "--port", "0", "--threads", "1"],
        stdout=subprocess.PIPE,
        env={**known, **environment},
    )
    try:
        line = process.stdout.readline()
        assert line, "the server ended before it listened"
        yield Running(process, json.loads(line)["listening"])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def tenant(name, token, **stores):
    """Return a tenant's part of the file: the prefixes that it may read, by store."""
    lines = [f"[tenants.{name}]", f'token_hashes = ["{hash_token(token)}"]', f"[tenants.{name}.stores]"]
    lines += [f"{store} = {json.dumps(prefixes)}" for store, prefixes in stores.items()]
    return "\n".join([*lines, ""])


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def post_run(server, request, token):
    """Return status and body of a run request."""
    status, _, body = ask(server, "POST", "/v1/run", body_of(request), bearer(token))
    return status, body


def read_run(body):
    """Return the messages in the body of an answer."""
    return messages(Whole(body))


class Whole:
    """Body that is complete, served as if it arrived."""

    def __init__(self, body):
        self._rest = memoryview(body)

    def readinto(self, buffer):
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def read(self):
        rest, self._rest = bytes(self._rest), memoryview(b"")
        return rest
