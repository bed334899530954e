"""Define and read the TOML file of ``upriver serve`` and ``upriver worker``.

The file need not hold secrets: it may give tokens as hashes, and credentials as names of variables or files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from upriver.cli.config import load_toml, parse, toml_values
from upriver.errors import ConfigError
from upriver.secret_files import check_secret, read_secret, read_token_file
from upriver.text import parse_bytes

if TYPE_CHECKING:
    from upriver.protocol import Caps
    from upriver.server.tenants import Tenant

CREDENTIALS = ("access_key_id", "secret_access_key", "session_token")
"""Options of a store that grant access to it; a credentials file or the environment may hold them."""

SECRETS = ("secret_access_key", "session_token")
"""Credentials that are secret."""

TOKEN_VARIABLE = "UPRIVER_TOKEN"
"""Variable that may hold the single token, in place of a file."""

TABLES = ("stores", "tenants", "caps", "tls")
"""Keys that are tables; each is checked by itself, so that an error can name it."""

_PATHS = ("token_file", "audit_log")

Size = int | str
"""Bytes: a whole number, or text with a unit."""


class StoreSection(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """``[stores.NAME]``: address of a store, and how to reach it.

    Attributes:
        uri: ``file://``, ``s3://``, or the path of a folder.
        options: Endpoint and the like.
        credentials_file: JSON or TOML file of `CREDENTIALS` that only its owner may read.
        environment: Variable that holds an option's value, by option.
    """

    uri: str
    options: dict[str, str] = {}
    credentials_file: str | None = None
    environment: dict[str, str] = {}


class TenantSection(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """``[tenants.NAME]``: see `upriver.server.tenants.Tenant`; ``token_file`` holds a token in plain text."""

    token_hashes: list[str] = []
    token_file: str | None = None
    certificates: list[str] = []
    stores: dict[str, list[str]] | None = None
    weight: float = 1.0
    max_requests: int | None = None
    max_waiting_bytes: Size | None = None
    memory_share: float = 1.0
    program_bytes: Size | None = None
    stored_bytes: Size | None = None


class CapsSection(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """``[caps]``: see `upriver.protocol.Caps`."""

    header_bytes: Size | None = None
    payload_bytes: Size | None = None
    tensors: int | None = None
    dims: int | None = None
    micro_batches: int | None = None
    samples: int | None = None
    body_bytes: Size | None = None
    program_bytes: Size | None = None
    pixels: int | None = None


class TlsSection(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """``[tls]``: PEM files."""

    certificate: str
    key: str | None = None
    client_ca: str | None = None


class ServeFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The whole file; the server's own defaults apply to missing keys."""

    stores: dict[str, Any] = {}
    tenants: dict[str, Any] | None = None
    caps: dict[str, Any] = {}
    tls: dict[str, Any] | None = None
    host: str | None = None
    port: int | None = None
    token_file: str | None = None
    workers: int | None = None
    threads: int | None = None
    device: str | None = None
    prefix: str | None = None
    sandbox: str | None = None
    admission: str | None = None
    memory_budget_bytes: Size | None = None
    memory_reserve: float | None = None
    collect_s: float | None = None
    min_batch: int | None = None
    max_admitted: int | None = None
    max_waiting: int | None = None
    max_waiting_bytes: Size | None = None
    max_requests: int | None = None
    max_datasets: int | None = None
    program_budget_bytes: Size | None = None
    stored_bytes: Size | None = None
    deadline_s: float | None = None
    job_timeout_s: float | None = None
    stall_timeout_s: float | None = None
    head_timeout_s: float | None = None
    idle_timeout_s: float | None = None
    max_connections: int | None = None
    grace_s: float | None = None
    load_window_s: float | None = None
    load_watch_s: float | None = None
    load_free_below: float | None = None
    audit_log: str | None = None
    log_format: str | None = None
    trace_endpoint: str | None = None
    allow: list[str] | None = None
    cold_start: str | None = None
    cold_bytes_per_s: Size | None = None
    code_bytes: Size | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A file with valid keys and types.

    Attributes:
        plain: Values outside tables.
    """

    plain: ServeFile
    stores: Mapping[str, str | StoreSection]
    tenants: Mapping[str, TenantSection]
    caps: CapsSection
    tls: TlsSection | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreAt:
    """Address of a store with its credentials, which the representation hides."""

    uri: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)


def load(path: Path) -> dict[str, Any]:
    """Read a file as plain values, with paths made absolute: they are relative to the file's folder.

    Raises:
        ConfigError: If the file cannot be read, is not TOML, or holds credentials and is open to others.
    """
    document: dict[str, Any] = dict(load_toml(path))
    folder = path.absolute().parent
    _locate(document, _PATHS, folder)
    if isinstance(document.get("stores"), dict):
        document["stores"] = {name: _located(store, folder) for name, store in document["stores"].items()}
    stores, tenants = _tables(document.get("stores")), _tables(document.get("tenants"))
    for store in stores:
        _locate(store, ("credentials_file",), folder)
    for options in _tables({number: store.get("options") for number, store in enumerate(stores)}):
        _locate(options, ("ca_file",), folder)
        check_options(options, path)
    for tenant in tenants:
        _locate(tenant, ("token_file",), folder)
    for tls in _tables({"tls": document.get("tls")}):
        _locate(tls, ("certificate", "key", "client_ca"), folder)
    return document


def check(document: Mapping[str, Any], *, where: str) -> Checked:
    """Check keys and types.

    Args:
        document: Result of `load`.
        where: Name of the source, for errors.

    Raises:
        ConfigError: If a key is unknown, a value is of the wrong type, or a table of tenants is empty.
    """
    file = parse(document, ServeFile, where=where)
    if file.tenants is not None and not file.tenants:
        raise ConfigError(
            f"{where}: [tenants] is empty, and a server with tenants serves nobody else: name one, or leave "
            "the table out"
        )
    return Checked(
        plain=file,
        stores={
            name: section
            if isinstance(section, str)
            else parse(section, StoreSection, where=f"{where}, [stores.{name}]")
            for name, section in file.stores.items()
        },
        tenants={
            name: parse(section, TenantSection, where=f"{where}, [tenants.{name}]")
            for name, section in (file.tenants or {}).items()
        },
        caps=parse(file.caps, CapsSection, where=f"{where}, [caps]"),
        tls=None if file.tls is None else parse(file.tls, TlsSection, where=f"{where}, [tls]"),
    )


def settings(file: Checked) -> dict[str, Any]:
    """Return the file's keyword arguments of `upriver.server.ServerConfig`, without the token.

    Raises:
        ConfigError: If a value is invalid, or a file or variable that it names cannot be used.
    """
    said = {name: getattr(file.plain, name) for name in file.plain.__struct_fields__}
    found: dict[str, Any] = {
        name: size(name, value) if name.endswith("_bytes") else value
        for name, value in said.items()
        if value is not None and name not in (*TABLES, "token_file", "allow")
    }
    found["stores"] = {name: _store(name, section) for name, section in file.stores.items()}
    found["allow"] = tuple(file.plain.allow or ())
    found["hidden_variables"] = _variables(file.stores)
    found["tenants"] = tuple(_tenant(name, section) for name, section in file.tenants.items())
    found["caps"] = _caps(file.caps)
    if file.tls is not None:
        found |= {f"tls_{name}": getattr(file.tls, name) for name in file.tls.__struct_fields__}
    return found


def size(name: str, value: Size) -> int:
    """Parse bytes from a number or from text: ``4 GiB`` (binary), ``500 MB`` (decimal).

    Raises:
        ConfigError: If it is other text; the message names the key.
    """
    if isinstance(value, int):
        return value
    try:
        return parse_bytes(value)
    except ValueError:
        raise ConfigError(
            f"{name} must be a number of bytes, or text such as '512 MiB' or '4 GB', got {value!r}"
        ) from None


def check_options(options: Mapping[str, object], path: Path) -> None:
    """Check that a file that holds a store's keys is not open to others."""
    if any(name in options for name in SECRETS):
        check_secret(path, "the configuration with a store's keys")


def _tables(value: object) -> list[dict[str, Any]]:
    return [table for table in value.values() if isinstance(table, dict)] if isinstance(value, dict) else []


def _locate(table: dict[str, Any], keys: tuple[str, ...], folder: Path) -> None:
    for key in keys:
        if isinstance(table.get(key), str):
            table[key] = str(folder / table[key])


def _located(store: Any, folder: Path) -> Any:
    """Return a store, or its table, with the URI of its folder in place of a path relative to the file."""
    from upriver.store import local_path, store_uri

    if isinstance(store, dict):
        return {**store, "uri": _located(store["uri"], folder)} if "uri" in store else store
    path = local_path(store) if isinstance(store, str) and store else None
    return store if path is None else store_uri(folder / path)


def _store(name: str, section: str | StoreSection) -> str | StoreAt:
    if isinstance(section, str):
        return section
    options = dict(section.options)
    if section.credentials_file is not None:
        _add(options, _read_credentials(Path(section.credentials_file)), name)
    _add(options, _from_environment(section.environment, name), name)
    return StoreAt(uri=section.uri, options=options)


def _variables(stores: Mapping[str, str | StoreSection]) -> tuple[str, ...]:
    """Return the names of variables that hold credentials."""
    named = (store.environment.values() for store in stores.values() if isinstance(store, StoreSection))
    return tuple(variable for variables in named for variable in variables)


def _add(options: dict[str, str], more: Mapping[str, str], store: str) -> None:
    twice = sorted(set(options) & set(more))
    if twice:
        raise ConfigError(
            f"store {store!r}: {twice[0]} is given twice; options, credentials_file and environment must not "
            "say the same"
        )
    options.update(more)


def _from_environment(names: Mapping[str, str], store: str) -> dict[str, str]:
    for option in names:
        if option not in CREDENTIALS:
            raise ConfigError(
                f"store {store!r}: environment may name {', '.join(CREDENTIALS)}, got {option!r}; others are "
                "options"
            )
    missing = next((variable for variable in names.values() if not os.environ.get(variable)), None)
    if missing is not None:
        raise ConfigError(f"store {store!r}: the variable {missing!r} is not set")
    return {option: os.environ[variable] for option, variable in names.items()}


class _Credentials(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    access_key_id: str | None = None
    secret_access_key: str | None = None
    session_token: str | None = None


def _read_credentials(path: Path) -> dict[str, str]:
    data = read_secret(path, "the credentials file")
    values = _json(data, path) if path.suffix == ".json" else toml_values(data, path)
    found = parse(values, _Credentials, where=str(path))
    said = {name: getattr(found, name) for name in CREDENTIALS}
    return {name: value for name, value in said.items() if value is not None}


def _json(data: bytes, path: Path) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):  # the parser's message may repeat a part of the file
        raise ConfigError(f"{path} is not JSON") from None


def _tenant(name: str, found: TenantSection) -> Tenant:
    from upriver.server.tenants import Tenant, hash_token

    hashes = list(found.token_hashes)
    if found.token_file is not None:
        hashes.append(hash_token(read_token_file(Path(found.token_file))))
    sizes = {
        key: size(f"tenant {name!r}: {key}", value)
        for key in ("max_waiting_bytes", "program_bytes", "stored_bytes")
        if (value := getattr(found, key)) is not None
    }
    return Tenant(
        name=name,
        token_hashes=tuple(hashes),
        certificates=tuple(found.certificates),
        stores={store: tuple(prefixes) for store, prefixes in found.stores.items()}
        if found.stores is not None
        else None,
        weight=found.weight,
        max_requests=found.max_requests,
        memory_share=found.memory_share,
        **sizes,
    )


def _caps(section: CapsSection) -> Caps:
    from upriver.protocol import Caps

    said = {name: getattr(section, name) for name in section.__struct_fields__}
    return Caps(**{name: size(f"caps: {name}", value) for name, value in said.items() if value is not None})
