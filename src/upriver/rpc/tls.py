"""Set up HTTPS for clients: the trusted authorities, and the certificate for servers that ask for one."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from upriver.errors import ConfigError
from upriver.secret_files import check_secret
from upriver.text import printable, said

FilePath = str | os.PathLike[str]
"""Path of a file."""


def client_context(
    *, ca: FilePath | None = None, certificate: FilePath | None = None, key: FilePath | None = None
) -> ssl.SSLContext | None:
    """Return the TLS context for connections to servers; None if the system's defaults apply.

    Args:
        ca: Authorities that vouch for the servers, in PEM; only these are trusted then.
        certificate: Shown to servers that ask for one, in PEM.
        key: The certificate's private key, in PEM and without a password.

    Raises:
        ConfigError: If a file cannot be read or has the wrong content, if other users can read the key, or if
            only one of certificate and key is given.
    """
    authorities, shown, private = _path("ca", ca), _path("certificate", certificate), _path("key", key)
    if (shown is None) != (private is None):
        given, missing = ("certificate", "key") if private is None else ("key", "certificate")
        raise ConfigError(f"{given} was given without {missing}: a server is shown both or none")
    if authorities is None and shown is None:
        return None
    context = _trusting(authorities)
    if shown is not None and private is not None:
        _show(context, shown, private)
    return context


def _path(name: str, value: object) -> str | None:
    if value is None:
        return None
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{name} must be the path of a file, got {printable(repr(value), 100)}")
    return path


def _trusting(ca: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except ssl.SSLError as error:
        raise ConfigError(f"{ca} holds no certificates in PEM: {_why(error)}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the authorities {ca}: {error.strerror}") from None


def _show(context: ssl.SSLContext, certificate: str, key: str) -> None:
    try:
        # A key with a password must raise an error instead of asking on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        raise ConfigError(
            f"{certificate} and {key} are no certificate with its private key, in PEM and without a "
            f"password: {_why(error)}"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot read the certificate {certificate} or its key {key}: {error.strerror}"
        ) from None
    check_secret(Path(key), "the private key")


def _why(error: ssl.SSLError) -> str:
    return said(error.reason or str(error)).replace("_", " ").lower()
