"""Short questions to our own servers and to the directory: one GET, one small answer."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit

from upriver.errors import ServerUnavailable

ANSWER_BYTES = 1 << 20
"""Longest answer read; those asked for have some hundred bytes."""


def get(
    url: str,
    path: str,
    *,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> tuple[int, bytes]:
    """Status and body of a GET.

    Args:
        url: ``http://host:port`` or ``https://host:port``.
        path: On that server.
        timeout_s: For connecting and for each read.
        headers: Sent along.
        tls: For https.

    Raises:
        ServerUnavailable: If nobody answers in time.
    """
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.netloc, timeout=timeout_s)
    if address.scheme == "https":
        connection = http.client.HTTPSConnection(address.netloc, timeout=timeout_s, context=tls)
    try:
        connection.request("GET", path, headers=dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read(ANSWER_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise ServerUnavailable(f"{url}{path}: {error or type(error).__name__}") from error
    finally:
        connection.close()


def own_server(certificate: str | None = None, key: str | None = None) -> ssl.SSLContext:
    """TLS to a server that this machine has started itself, at the address that it has just told us.

    Its certificate names what clients call it, which need not be that address, so it is not checked.

    Args:
        certificate: Shown to servers that ask for one, with its ``key``.
        key: Of the certificate.

    Raises:
        OSError: If certificate or key cannot be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if certificate is not None:
        context.load_cert_chain(certificate, key)
    return context
