"""Write the configuration of a Swift with five processes: addresses, users, and the folder of objects."""

from __future__ import annotations

import os
import pwd
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from _swift.problems import Problem

SERVERS = ("account", "container", "object", "proxy")
"""Servers in the order of their start."""

INSIDE = "127.0.0.1"
"""Address of all servers except the proxy, which have no other clients."""

REGION = "us-east-1"
"""Region that s3api uses by default. It is part of every signature."""

PIPELINE = (
    "catch_errors gatekeeper healthcheck cache listing_formats bulk tempurl s3api tempauth "
    "copy slo dlo versioned_writes symlink proxy-server"
)
"""Filters of the proxy. s3api precedes the filter that checks signatures, and slo, which joins parts of an
upload."""

SLOW_S = 60
"""Seconds that servers wait for each other. Swift's own 0.5 to 3 s are for racks of idle machines. On a busy
machine they would store an object and never update its listing."""

READ_S = 10
"""Seconds that the proxy waits for an object server before it answers 503: shorter than clients wait."""

_ACCESS = re.compile(r"([A-Za-z0-9-]+):([A-Za-z0-9-]+)=([A-Za-z0-9_.~+/=-]+)")
_BUCKET = re.compile(r"([A-Za-z0-9-]+):([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])")


@dataclass(frozen=True, kw_only=True, slots=True)
class User:
    """A user who may read and write one account.

    Attributes:
        account: The account of the user's buckets. Each account has its own bucket names.
        name: Name of the user within the account.
        key: The secret.
    """

    account: str
    name: str
    key: str = field(repr=False)

    @property
    def access_key(self) -> str:
        """Return the access key for S3 clients."""
        return f"{self.account}:{self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The settings of all configuration files.

    Attributes:
        data: The folder of all files.
        bind: Address of the proxy.
        ports: Ports of the servers and ``memcached``, by name.
        users: Users who may log in.
        workers: Processes of the proxy and of the object server.
    """

    data: Path
    bind: str
    ports: Mapping[str, int]
    users: Sequence[User]
    workers: int

    @property
    def etc(self) -> Path:
        """Return the folder of configuration files and rings."""
        return self.data / "etc"

    def address(self, server: str) -> tuple[str, int]:
        """Return the address of a server."""
        return (self.bind if server == "proxy" else INSIDE, self.ports[server])


def parse_user(text: str) -> User:
    """Parse ``ACCOUNT:USER=KEY``.

    Raises:
        Problem: If the text has another form. The message omits the key.
    """
    match = _ACCESS.fullmatch(text)
    if match is None:
        raise Problem(
            f"--user must be ACCOUNT:USER=KEY, got {text.partition('=')[0]!r}=…; accounts and users have "
            "letters, digits and '-', keys also '_', '.', '~', '+', '/', '='"
        )
    return User(account=match[1], name=match[2], key=match[3])


def parse_bucket(text: str) -> tuple[str, str]:
    """Parse ``ACCOUNT:BUCKET``.

    Raises:
        Problem: If the text has another form.
    """
    match = _BUCKET.fullmatch(text)
    if match is None:
        raise Problem(
            f"--bucket must be ACCOUNT:BUCKET, a bucket with 3 to 63 of a-z, 0-9, '.', '-', got {text!r}"
        )
    return match[1], match[2]


def write(setup: Setup) -> None:
    """Write every file except the rings. Only this user may read them, because they hold keys."""
    setup.etc.mkdir(mode=0o700, parents=True, exist_ok=True)
    (setup.data / "disks" / "d1").mkdir(parents=True, exist_ok=True)
    _write_swift_conf(setup.etc / "swift.conf")
    for server in SERVERS:
        text = _proxy(setup) if server == "proxy" else _storage(setup, server)
        _put(setup.etc / f"{server}-server.conf", text)


def _write_swift_conf(path: Path) -> None:
    """Write the file once for a folder: every path on its disks depends on it."""
    if not path.exists():
        _put(path, f"[swift-hash]\nswift_hash_path_suffix = {secrets.token_hex(16)}\n")


def _storage(setup: Setup, server: str) -> str:
    workers = setup.workers if server == "object" else 1
    lines = {
        **_common(setup, server, workers=workers),
        "devices": str(setup.data / "disks"),
        "mount_check": "false",
        "conn_timeout": str(SLOW_S),
        "node_timeout": str(SLOW_S),
    }
    if server == "object":
        lines["container_update_timeout"] = str(SLOW_S)
    return (
        _section("DEFAULT", lines)
        + _section("pipeline:main", {"pipeline": f"healthcheck {server}-server"})
        + _section(f"app:{server}-server", {"use": f"egg:swift#{server}"})
        + _section("filter:healthcheck", {"use": "egg:swift#healthcheck"})
    )


def _proxy(setup: Setup) -> str:
    app = {
        "use": "egg:swift#proxy",
        "account_autocreate": "true",
        "conn_timeout": str(SLOW_S),
        "node_timeout": str(SLOW_S),
        "recoverable_node_timeout": str(READ_S),
        # Each kind has one node. Avoiding it after errors would only make more of them.
        "error_suppression_interval": "0",
    }
    filters: dict[str, dict[str, str]] = {
        "cache": {"use": "egg:swift#memcache", "memcache_servers": f"{INSIDE}:{setup.ports['memcached']}"},
        "s3api": {"use": "egg:swift#s3api", "location": REGION},
        "tempauth": {
            "use": "egg:swift#tempauth",
            **{f"user_{user.account}_{user.name}": f"{user.key} .admin" for user in setup.users},
        },
    }
    names = [name for name in PIPELINE.split() if name != "proxy-server"]
    return (
        _section("DEFAULT", _common(setup, "proxy", workers=setup.workers))
        + _section("pipeline:main", {"pipeline": PIPELINE})
        + _section("app:proxy-server", app)
        + "".join(
            _section(f"filter:{name}", filters.get(name, {"use": f"egg:swift#{name}"})) for name in names
        )
    )


def _common(setup: Setup, server: str, *, workers: int) -> dict[str, str]:
    host, port = setup.address(server)
    return {
        "bind_ip": host,
        "bind_port": str(port),
        "bind_timeout": "5",
        "workers": "0" if workers == 1 else str(workers),  # 0: the process serves by itself, without forks
        "user": pwd.getpwuid(os.geteuid()).pw_name,  # the user of forked processes: the present one
        "swift_dir": str(setup.etc),
        "log_level": "WARNING",
        # Logs go to stderr, but Swift also requires a syslog. The discard port has no listener.
        "log_udp_host": INSIDE,
        "log_udp_port": "9",
    }


def _section(name: str, lines: Mapping[str, str]) -> str:
    return f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in lines.items()) + "\n"


def _put(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
