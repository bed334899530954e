"""Ask own servers and the directory short questions: one GET, one small answer."""

from __future__ import annotations

import http.client
import ssl
from urllib.parse import urlsplit

from upriver.errors import ServerUnavailable
from upriver.rpc.tls import client_context

ANSWER_BYTES = 1 << 20
"""Most bytes of an answer that are read; usual answers have some hundred."""


def get(
    url: str,
    path: str,
    *,
    timeout_s: float,
    tls: ssl.SSLContext | None = None,
) -> tuple[int, bytes]:
    """Return the status and the body of a GET.

    Args:
        url: ``http://host:port`` or ``https://host:port``.
        timeout_s: Timeout of the connection and of each read.

    Raises:
        ServerUnavailable: If the server does not answer in time.
    """
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.netloc, timeout=timeout_s)
    if address.scheme == "https":
        connection = http.client.HTTPSConnection(address.netloc, timeout=timeout_s, context=tls)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read(ANSWER_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise ServerUnavailable(f"{url}{path}: {error or type(error).__name__}") from error
    finally:
        connection.close()


def own_server(certificate: str | None = None, key: str | None = None) -> ssl.SSLContext:
    """Return TLS settings for a server that this machine started, at the address it just announced.

    Its certificate names the address that clients use, which may be another, so the certificate is not
    checked.

    Args:
        certificate: Shown to servers that ask for one, with its ``key``.
        key: Key of the certificate.

    Raises:
        ConfigError: If certificate or key cannot be used.
    """
    context = client_context(certificate=certificate, key=key) or ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
