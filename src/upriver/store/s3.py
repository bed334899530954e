"""Open S3-compatible stores from a URI, the operator's options and the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from obstore.store import S3Store

from upriver.errors import ConfigError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig  # exist for the type checker only

CONNECT_TIMEOUT_S = 5.0
"""Connection timeout. Two lost SYN packets (1 s and 2 s on Linux) fit into it."""

READ_TIMEOUT_S = 15.0
"""Silence after which a body counts as stalled and is requested again."""

TIMEOUT_S = 300.0
"""Timeout of one whole attempt. It is generous, since a stall is noticed sooner: 500 MB of weights take 200 s
at 20 Mbit/s."""

MAX_RETRIES = 6
"""Most retries. With backoff from 0.1 s to 5 s a store that refuses connections fails after about 15 s."""

_TEXT = {
    "endpoint": "endpoint",
    "region": "region",
    "access_key_id": "access_key_id",
    "secret_access_key": "secret_access_key",
    "session_token": "session_token",
}
_FLAGS = {"virtual_hosted_style": "virtual_hosted_style_request", "anonymous": "skip_signature"}
_NUMBERS = {
    "connect_timeout_s": CONNECT_TIMEOUT_S,
    "read_timeout_s": READ_TIMEOUT_S,
    "timeout_s": TIMEOUT_S,
    "max_retries": float(MAX_RETRIES),
}
_FILES = ("ca_file",)
_ALLOWED = tuple(sorted({*_TEXT, *_FLAGS, *_NUMBERS, *_FILES}))
_TOKEN_VARIABLES = ("AWS_SESSION_TOKEN", "AWS_TOKEN")
_TRUE = ("true", "1", "yes", "y", "on")
"""Values that obstore reads as true in a variable."""

_SECRET_OPTIONS = ("access_key_id", "secret_access_key", "session_token")
_SECRET_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", *_TOKEN_VARIABLES)


def open_s3(bucket: str, prefix: str, options: Mapping[str, str]) -> S3Store:
    """Open a bucket. Options that are absent come from the usual ``AWS_…`` variables.

    Args:
        options: ``endpoint``, ``region``, ``access_key_id``, ``secret_access_key``, ``session_token``,
            ``virtual_hosted_style`` and ``anonymous`` (``true`` or ``false``), ``connect_timeout_s``,
            ``read_timeout_s``, ``timeout_s``, ``max_retries``, ``ca_file`` (trusted certificates in PEM, in
            addition to the system's).

    Raises:
        ConfigError: If an option is unknown, its value is invalid, or credentials would mix options and
            environment. The message never repeats secrets.
    """
    unknown = sorted(set(options) - set(_ALLOWED))
    if unknown:
        raise ConfigError(f"unknown s3 store option {unknown[0]!r}; allowed: {', '.join(_ALLOWED)}")
    _check_one_identity(options)
    config: dict[str, Any] = {key: options[name] for name, key in _TEXT.items() if name in options}
    config |= {key: _flag(name, options[name]) for name, key in _FLAGS.items() if name in options}
    return _opened(bucket, prefix, options, config)


def patient(store: S3Store, options: Mapping[str, str]) -> S3Store:
    """Return the same bucket with a longer timeout, for uploads.

    The HTTP client counts ``read_timeout_s`` from a request's first byte to the response's. So an upload in
    progress counts as silent. Here it may last ``timeout_s``, as a whole attempt may.

    Args:
        options: Options with which the bucket was opened.
    """
    return _again(store, {**options, "read_timeout_s": str(_numbers(options)["timeout_s"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Access:
    """Access to a bucket's objects without obstore.

    Attributes:
        signing: Function that returns a store which signs the bucket's URLs.
        anonymous: True if objects are read without a signature.
        trusted: The operator's own certificates, in PEM.
        connect_timeout_s: Timeout of a connection.
        read_timeout_s: Silence after which a body counts as stalled.
    """

    signing: Callable[[], S3Store]
    anonymous: bool
    trusted: str
    connect_timeout_s: float
    read_timeout_s: float


def access_to(store: S3Store, options: Mapping[str, str]) -> S3Access:
    """Return the access to a bucket that was opened with these options."""

    def with_keys() -> S3Store:
        """Return a store with placeholder keys. obstore makes a URL only with keys.

        The URL is the same.
        """
        return _again(store, options, access_key_id="anyone", secret_access_key="none", skip_signature=False)

    told = str(store.config.get("skip_signature", os.environ.get("AWS_SKIP_SIGNATURE", "")))
    anonymous = told.lower() in _TRUE
    numbers = _numbers(options)
    return S3Access(
        signing=with_keys if anonymous else lambda: store,
        anonymous=anonymous,
        trusted=str(_trusted(options).get("root_certificate", "")),
        connect_timeout_s=numbers["connect_timeout_s"],
        read_timeout_s=numbers["read_timeout_s"],
    )


def _again(store: S3Store, options: Mapping[str, str], **changed: Any) -> S3Store:
    """Open the same bucket with other options or another configuration."""
    config = {name: value for name, value in store.config.items() if name != "bucket"}
    return _opened(str(store.config["bucket"]), store.prefix or "", options, {**config, **changed})


def _opened(bucket: str, prefix: str, options: Mapping[str, str], config: Mapping[str, Any]) -> S3Store:
    numbers = _numbers(options)
    told = {"disable_bulk_delete": True}  # one object a request: not every server knows bulk deletes
    store: S3Store = S3Store(
        bucket,
        prefix=prefix or None,
        client_options=_client_options(numbers, _endpoint(options)) | _trusted(options),
        retry_config=_retry_config(numbers),
        **{**config, **told},
    )
    return store


def _numbers(options: Mapping[str, str]) -> dict[str, float]:
    return {name: _number(name, options.get(name, str(default))) for name, default in _NUMBERS.items()}


def site_of(store: S3Store) -> str:
    """Return endpoint and bucket, from either source."""
    config: Mapping[str, str] = {str(name): str(value) for name, value in store.config.items()}
    return f"{_endpoint(config)} {config.get('bucket', '')}"


def secrets_of(options: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values that no error message may repeat, plain and as in a URL.

    They come from the options and the environment. The longest come first, since one may be part of another.
    """
    values = [options.get(name, "") for name in _SECRET_OPTIONS]
    values += [os.environ.get(name, "") for name in _SECRET_VARIABLES]
    written = {form for value in values if value for form in (value, quote(value, safe=""))}
    return tuple(sorted(written, key=len, reverse=True))


def _check_one_identity(options: Mapping[str, str]) -> None:
    """Check that keys and session token come from one source; a store refuses a token with other keys.

    Raises:
        ConfigError: If the keys would come from the options and the token from the environment.
    """
    if "access_key_id" not in options or "session_token" in options:
        return
    for variable in _TOKEN_VARIABLES:
        if os.environ.get(variable):
            raise ConfigError(
                f"s3 store option access_key_id is given, and the session token would be that of {variable}: "
                f"give session_token as well, or unset {variable}"
            )


def _trusted(options: Mapping[str, str]) -> ClientConfig:
    """Return the operator's own certificates."""
    if "ca_file" not in options:
        return {}
    try:
        return {"root_certificate": Path(options["ca_file"]).read_text(encoding="ascii")}
    except (OSError, ValueError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "it is no PEM file"
        raise ConfigError(f"s3 store option ca_file: cannot read {options['ca_file']!r}: {why}") from None


def _endpoint(options: Mapping[str, str]) -> str:
    variables = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    return options.get("endpoint", variables)


def _client_options(numbers: Mapping[str, float], endpoint: str) -> ClientConfig:
    return {
        "allow_http": endpoint.startswith("http://"),  # the operator chooses a plain endpoint
        "connect_timeout": timedelta(seconds=numbers["connect_timeout_s"]),
        "read_timeout": timedelta(seconds=numbers["read_timeout_s"]),
        "timeout": timedelta(seconds=numbers["timeout_s"]),
    }


def _retry_config(numbers: Mapping[str, float]) -> RetryConfig:
    return {
        "max_retries": int(numbers["max_retries"]),
        # Counted from the first attempt: a timeout of one attempt would allow no retry.
        "retry_timeout": timedelta(seconds=2 * numbers["timeout_s"]),
        "backoff": {
            "init_backoff": timedelta(seconds=0.1),
            "max_backoff": timedelta(seconds=5),
            "base": 2,
        },
    }


def _flag(name: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise ConfigError(f"s3 store option {name} must be 'true' or 'false', got {value!r}")
    return value == "true"


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    smallest = 0.0 if name == "max_retries" else 0.001
    if not smallest <= number <= 86400:
        raise ConfigError(
            f"s3 store option {name} must be a number from {smallest:g} to 86400, got {value!r}"
        )
    return number
