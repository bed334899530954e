"""Make and try a bucket with a minimal S3 client, by the standard library alone."""

from __future__ import annotations

import hashlib
import hmac
import http.client
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit

from _swift.config import REGION, User
from _swift.problems import Problem

TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Answer to a request.

    Attributes:
        status: HTTP status.
        headers: By lower-case name.
        body: The whole body.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes


def request(
    endpoint: str,
    user: User,
    method: str,
    path: str,
    *,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Send one signed request.

    Args:
        endpoint: ``http://host:port``.
        user: User who signs it.
        method: HTTP method.
        path: ``/bucket`` or ``/bucket/object``.
        body: Body of the request.
        headers: Such as Range and If-Match; these are not signed.
    """
    netloc = urlsplit(endpoint).netloc
    path = quote(path)
    signed = _signed(user, method, path, netloc, body)
    connection = http.client.HTTPConnection(netloc, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, body=body, headers={**signed, **(headers or {})})
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Answer(status=response.status, headers=found, body=response.read())
    finally:
        connection.close()


def make_bucket(endpoint: str, user: User, bucket: str) -> None:
    """Make a bucket. An existing bucket is accepted.

    Raises:
        Problem: If it cannot be made.
    """
    answer = request(endpoint, user, "PUT", f"/{bucket}")
    if answer.status not in (200, 409):
        said = answer.body[:200].decode(errors="replace")
        raise Problem(f"bucket {bucket!r} of {user.access_key}: status {answer.status}: {said}")


def _signed(user: User, method: str, path: str, netloc: str, body: bytes) -> dict[str, str]:
    """Return headers with AWS's signature, version 4, over host, time and body."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    digest = hashlib.sha256(body).hexdigest()
    headers = {"host": netloc, "x-amz-content-sha256": digest, "x-amz-date": stamp}
    names = ";".join(headers)
    canonical = "\n".join(
        [method, path, "", *(f"{name}:{value}" for name, value in headers.items()), "", names, digest]
    )
    scope = f"{stamp[:8]}/{REGION}/s3/aws4_request"
    to_sign = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{user.key}".encode()
    for part in (*scope.split("/"), to_sign):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    credential = f"Credential={user.access_key}/{scope}"
    authorization = f"AWS4-HMAC-SHA256 {credential}, SignedHeaders={names}, Signature={key.hex()}"
    return {**headers, "Authorization": authorization}
