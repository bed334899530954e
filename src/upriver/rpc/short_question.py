"""Ask a server short questions without PyTorch: one GET, one small answer. Replicas on Ray import no more."""

from __future__ import annotations

import http.client
import ssl
from urllib.parse import urlsplit

from upriver.errors import ServerUnavailable

ANSWER_BYTES = 1 << 20
"""Most bytes of an answer that are read; usual answers have some hundred."""


def get(
    url: str,
    path: str,
    *,
    timeout_s: float,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> tuple[int, bytes]:
    """Return the status and the body of a GET.

    Args:
        url: ``http://host:port`` or ``https://host:port``.
        timeout_s: Timeout of the connection and of each read.
        token: Sent with the request.
        tls: TLS settings for https; None uses the system's authorities.

    Raises:
        ServerUnavailable: If the server does not answer in time.
    """
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.netloc, timeout=timeout_s)
    if address.scheme == "https":
        connection = http.client.HTTPSConnection(address.netloc, timeout=timeout_s, context=tls)
    try:
        connection.request("GET", path, headers={} if token is None else {"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        return answer.status, answer.read(ANSWER_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise ServerUnavailable(f"{url}{path}: {error or type(error).__name__}") from error
    finally:
        connection.close()
