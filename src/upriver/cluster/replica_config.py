"""Carry a server's configuration from the operator's file to replicas on other machines.

The document is the server's TOML file as plain values. Ray carries it, and keeps it. So tokens are replaced
by their hashes first, and credentials of stores may only be named, not included. On the replica's machine the
document becomes a file again that only its user can read.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import math
from collections.abc import Mapping
from pathlib import Path

from upriver.errors import ConfigError
from upriver.secret_files import read_token_file

SECRET_OPTIONS = ("access_key_id", "secret_access_key", "session_token")
"""Options of stores that must not travel."""

OF_THE_CLUSTER = ("host", "port", "token_file")
"""Keys that replicas set anew, or not at all."""

ANYONE = "anyone"
"""Only tenant of a server with one token; a server without tenants uses the same name."""

KEEPER = "replica-keeper"
"""Tenant with which a replica asks its own server for its load; it may read no store."""

LOOPBACK = "127.0.0.1"


def portable(document: Mapping[str, object], *, token: str | None = None) -> dict[str, object]:
    """Return the document without secrets, and without the settings that each replica makes itself.

    Args:
        document: Contents of the operator's file, merged with the options of the command line.
        token: The one token that clients must send if there are no tenants.

    Raises:
        ConfigError: If it holds credentials, or both a token and tenants, or a token's file cannot be read.
    """
    _refuse_credentials(_table(document, "stores"))
    found = {key: value for key, value in document.items() if key not in OF_THE_CLUSTER}
    tenants = {name: _hashed(name, tenant) for name, tenant in _table(document, "tenants").items()}
    if token is None and (path := document.get("token_file")) is not None:
        token = read_token_file(Path(str(path)))
    if token is not None and tenants:
        raise ConfigError("a server has either one token or tenants, got both")
    if token is not None:
        tenants = {ANYONE: {"token_hashes": [token_hash(token)]}}
    return {**found, "tenants": tenants} if tenants else found


def for_replica(
    document: Mapping[str, object], *, host: str, keeper_token: str
) -> tuple[dict[str, object], bool]:
    """Return the configuration of one replica's server, and whether the server authenticates its clients.

    Args:
        document: Result of `portable`.
        keeper_token: Token of the replica at its own server, if the server authenticates.
    """
    found = {**document, "host": host, "port": 0}
    if not (tenants := _table(document, "tenants")):
        return found, False
    if KEEPER in tenants:
        raise ConfigError(f"the tenant {KEEPER!r} is the replica itself; give yours another name")
    keeper = {"token_hashes": [token_hash(keeper_token)], "stores": {}}
    return {**found, "tenants": {**tenants, KEEPER: keeper}}, True


def bind_host(document: Mapping[str, object], *, local: bool, token: str | None = None) -> str | None:
    """Return the address that servers bind; None for that of their machine.

    Args:
        local: Whether the cluster is started here, on this machine alone.
        token: The one token that clients must send if there are no tenants.

    Raises:
        ConfigError: If other machines could reach servers that do not authenticate clients.
    """
    host = document.get("host")
    if host is None and local:
        return LOOPBACK
    if host is not None and is_loopback(str(host)):
        return str(host)
    asks = token is not None or document.get("token_file") is not None or _table(document, "tenants")
    if not (asks or "client_ca" in tls_files(document)):
        raise ConfigError(
            "replicas on a cluster can be reached by others: set a token, tenants or a client_ca, or bind a "
            f"loopback address ({LOOPBACK})"
        )
    return None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def token_hash(token: str) -> str:
    """Return the hash that a server keeps of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def whole(document: Mapping[str, object], name: str, default: int) -> int:
    """Return a count of the document.

    Raises:
        ConfigError: If it is not a whole number >= 1.
    """
    value = document.get(name, default)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} must be a whole number >= 1, got {value!r}")
    return value


def seconds(document: Mapping[str, object], name: str, default: float) -> float:
    """Return a duration of the document.

    Raises:
        ConfigError: If it is not a finite number >= 0.
    """
    value = document.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"{name} must be a finite number >= 0, got {value!r}")
    return float(value)


def tls_files(document: Mapping[str, object]) -> dict[str, str]:
    """Return those of ``certificate``, ``key`` and ``client_ca`` that are set."""
    return {name: str(path) for name, path in _table(document, "tls").items() if path is not None}


def toml_text(document: Mapping[str, object]) -> str:
    """Return the document as TOML, without values of None, which TOML cannot express.

    Raises:
        ConfigError: If a value is of a type that TOML does not have.
    """
    return "".join(
        f"{_key(name)} = {_value(name, value)}\n" for name, value in document.items() if value is not None
    )


def _value(name: str, value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _text(value)
        case int() | float():
            return repr(value)  # inf and nan as TOML writes them; an exponent without a dot is allowed
        case Mapping():
            inside = (f"{_key(k)} = {_value(k, v)}" for k, v in value.items() if v is not None)
            return "{" + ", ".join(inside) + "}"
        case list() | tuple():
            return "[" + ", ".join(_value(name, each) for each in value) + "]"
    raise ConfigError(f"{name} must be text, a number, true or false, a list or a table, got {value!r}")


def _key(name: object) -> str:
    return _text(str(name))


def _text(text: str) -> str:
    """Return a TOML string: JSON's form, with the one control character escaped that JSON allows."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _table(document: Mapping[str, object], name: str) -> Mapping[str, object]:
    table = document.get(name)
    if table is None:
        return {}
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name} must be a table, got {table!r}")
    return table


def _refuse_credentials(stores: Mapping[str, object]) -> None:
    for name, store in stores.items():
        options = _table(store, "options") if isinstance(store, Mapping) else {}
        given = next((option for option in SECRET_OPTIONS if option in options), None)
        if given is not None:
            raise ConfigError(
                f"store {name!r} has {given} in its options, which would travel through Ray; put it into a "
                "file on each machine (credentials_file) or name variables (environment)"
            )


def _hashed(name: str, tenant: object) -> object:
    """Return a tenant with the hash of its token in place of the token's file."""
    if not isinstance(tenant, Mapping) or tenant.get("token_file") is None:
        return tenant
    hashes = tenant.get("token_hashes") or []
    if not isinstance(hashes, list | tuple):
        raise ConfigError(f"token_hashes of tenant {name!r} must be a list, got {hashes!r}")
    rest = {key: value for key, value in tenant.items() if key not in ("token_file", "token_hashes")}
    return {**rest, "token_hashes": [*hashes, token_hash(read_token_file(Path(str(tenant["token_file"]))))]}
