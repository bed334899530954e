"""Try a fresh Swift with one request of each kind that upriver sends to an S3 store."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from _swift import s3
from _swift.cluster import Cluster
from _swift.config import User
from _swift.problems import Problem

ALICE = User(account="alice", name="reader", key="alices-key")
BOB = User(account="bob", name="reader", key="bobs-key")
STRANGER = User(account="alice", name="reader", key="another-key")
BUCKET, PATH = "check", "/check/folder/object"
CONTENT = bytes(range(256)) * 64

Answer = s3.Answer
Ask = Callable[..., Answer]


def check(folder: Path, tell: Callable[[str], None]) -> None:
    """Start a Swift in a temporary folder, try it, and end it.

    Raises:
        Problem: If it does not start, or answers wrongly.
    """
    with tempfile.TemporaryDirectory(prefix="upriver-swift-") as data:
        with Cluster(folder, Path(data), users=(ALICE, BOB)) as cluster:
            tell(f"running   {cluster.endpoint}")
            for what in _tries(cluster):
                tell(f"ok        {what}")
            pids = list(cluster.pids.values())
        left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        if left:
            raise Problem(f"processes {left} did not end")
        tell("ended     nothing is left")


def _tries(cluster: Cluster) -> Iterator[str]:
    def ask(user: User, method: str, path: str = PATH, **more: object) -> Answer:
        return s3.request(cluster.endpoint, user, method, path, **more)  # type: ignore[arg-type]

    cluster.make_bucket(ALICE.account, BUCKET)
    put = ask(ALICE, "PUT", body=CONTENT)
    _must("PUT", put, 200)
    got = ask(ALICE, "GET")
    _must("GET", got, 200, body=CONTENT)
    yield f"put and get of {len(CONTENT)} bytes"
    part = ask(ALICE, "GET", headers={"Range": "bytes=1000-1999"})
    _must("GET with Range", part, 206, body=CONTENT[1000:2000])
    yield "a range of it"
    etag = got.headers["etag"]
    _must("GET with If-Match", ask(ALICE, "GET", headers={"If-Match": etag}), 200, body=CONTENT)
    _must("PUT", ask(ALICE, "PUT", body=CONTENT[::-1]), 200)
    _must("GET with an old If-Match", ask(ALICE, "GET", headers={"If-Match": etag}), 412)
    yield "a changed object is refused under If-Match"
    _must("GET as another tenant", ask(BOB, "GET"), 403, 404)
    _must("GET with a wrong key", ask(STRANGER, "GET"), 403)
    yield "another tenant and a wrong key are refused"
    _must("DELETE", ask(ALICE, "DELETE"), 204)
    _must("GET after DELETE", ask(ALICE, "GET"), 404)
    yield "a deleted object is gone"


def _must(what: str, answer: Answer, *allowed: int, body: bytes | None = None) -> None:
    if answer.status not in allowed:
        said = answer.body[:200].decode(errors="replace")
        raise Problem(f"{what}: status {answer.status}, {' or '.join(map(str, allowed))} expected: {said}")
    if body is not None and answer.body != body:
        raise Problem(f"{what}: {len(answer.body)} bytes that differ from the {len(body)} expected")
