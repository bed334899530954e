"""Test files with secrets: their permissions, and the warning about readable ones."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.certificates import Authority, needs_openssl
from upriver.cli.serve import config_file
from upriver.cli.serve.options import read_token
from upriver.cluster.replica_config import portable
from upriver.dataloader.options import RemoteWorkers
from upriver.errors import ConfigError
from upriver.finetune.session import connect
from upriver.rpc.tls import client_context
from upriver.secret_files import open_to_others, read_secret, token_fault
from upriver.server import ServerConfig
from upriver.server.http.tls import server_context

ROOT, US, ANOTHER = 0, 1000, 1001

TENANT = 'stores.a = "file:///data"\ntenants.alice.token_file = "secret"\n'
STORE = '[stores.a]\nuri = "s3://b"\n'


def test_a_file_is_its_owners_and_of_roots_its_group_may_read() -> None:
    for mode in range(0o1000):
        for owner, user in ((US, US), (ROOT, ROOT), (US, ROOT), (ANOTHER, US)):
            assert open_to_others(mode, owner=owner, user=user) == bool(mode & 0o077), oct(mode)
        assert open_to_others(mode, owner=ROOT, user=US) == bool(mode & 0o037), oct(mode)


def served(folder: Path, text: str) -> None:
    path = folder / "server.toml"
    path.write_text(text)
    config_file.settings(config_file.check(config_file.load(path), where="server.toml"))


READERS: dict[str, Callable[[Path], object]] = {
    "a token": lambda path: read_token(path),
    "a token that travels as its hash": lambda path: portable({"token_file": str(path)}),
    "a tenant's token": lambda path: served(path.parent, TENANT),
    "a tenant's token that travels as its hash": lambda path: portable(
        {"tenants": {"alice": {"token_file": str(path)}}}
    ),
    "credentials of a store": lambda path: served(path.parent, f'{STORE}credentials_file = "secret"\n'),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, reader: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text('secret_access_key="0123456789abcdef"')
    for mode in (0o600, 0o400):
        secret.chmod(mode)
        READERS[reader](secret)
    for mode in (0o644, 0o640, 0o604, 0o660, 0o620, 0o601):
        secret.chmod(mode)
        said = f"{secret} is open to others (mode {mode:o}); say chmod 600 {secret}"
        with pytest.raises(ConfigError, match=re.escape(said)) as caught:
            READERS[reader](secret)
        assert "0123456789abcdef" not in str(caught.value)


def test_a_configuration_is_a_secret_where_it_holds_keys_of_a_store(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    for options, secret in (
        ('{ endpoint = "http://x" }', False),
        ('{ secret_access_key = "hush" }', True),
        ('{ session_token = "hush" }', True),
    ):
        path.write_text(f"{STORE}options = {options}\n")
        for mode in (0o600, 0o644):
            path.chmod(mode)
            if not secret or mode == 0o600:
                config_file.load(path)
                continue
            with pytest.raises(ConfigError, match=f"chmod 600 {re.escape(str(path))}") as caught:
                config_file.load(path)
            assert "hush" not in str(caught.value)


def test_of_a_link_the_file_counts_that_it_leads_to(tmp_path: Path) -> None:
    """Kubernetes mounts secrets so: ``token`` leads to ``..data/token``, and ``..data`` to a folder."""
    version = tmp_path / "..2026_01_01"
    version.mkdir()
    (version / "token").write_text("sesame")
    (tmp_path / "..data").symlink_to(version.name)
    (tmp_path / "token").symlink_to("..data/token")
    for mode, may in ((0o400, True), (0o600, True), (0o440, False), (0o644, False)):
        (version / "token").chmod(mode)
        if may:
            assert read_secret(tmp_path / "token", "the token file") == b"sesame"
            continue
        with pytest.raises(ConfigError, match=f"mode {mode:o}"):
            read_secret(tmp_path / "token", "the token file")


def test_token_fault_names_a_line_break_at_the_end() -> None:
    assert not token_fault("sesame")
    for text in ("sesame\n", "sesame\r\n"):
        assert "ends with a line break" in token_fault(text)
    for text in ("", "\n", "open sesame", "open sesame\n", "\nsesame", "sésame"):
        fault = token_fault(text)
        assert fault.startswith("a token must be") and "line break" not in fault


def test_a_token_is_refused_at_each_border_with_the_line_break_named() -> None:
    for give in (
        lambda token: RemoteWorkers(["http://127.0.0.1:9"], token=token),
        lambda token: connect("http://127.0.0.1:9", token=token),
        lambda token: ServerConfig(stores={"default": "memory://"}, token=token),
    ):
        with pytest.raises(ConfigError, match="line break") as caught:
            give("sesame\n")
        assert "sesame" not in str(caught.value)


def test_a_secret_may_come_through_a_pipe() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"sesame\n")
    os.close(writer)
    assert read_token(Path(f"/dev/fd/{reader}")) == "sesame"
    os.close(reader)


@needs_openssl
def test_a_private_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    found = Authority(tmp_path / "authority").issue("both")
    certificate, key, both = found.certificate, found.key, tmp_path / "both.pem"
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    ways: list[tuple[Path, Callable[[], object]]] = [
        (key, lambda: server_context(_config(certificate, key))),
        (both, lambda: server_context(_config(both, None))),
        (key, lambda: client_context(certificate=certificate, key=key)),
    ]
    for path, load in ways:
        path.chmod(0o600)
        certificate.chmod(0o644)
        load()
        path.chmod(0o640)
        said = f"the private key {path} is open to others (mode 640); say chmod 600 {path}"
        with pytest.raises(ConfigError, match=re.escape(said)):
            load()


def _config(certificate: Path, key: Path | None) -> ServerConfig:
    return ServerConfig(
        stores={"a": "file:///data"},
        tls_certificate=str(certificate),
        tls_key=None if key is None else str(key),
    )
