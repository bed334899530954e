"""Check servers over TLS: the certificates that a client trusts and shows, and invalid files."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

import upriver
from tests.finetune.children import ended, fork
from tests.finetune.conftest import Reference
from tests.finetune.training import run, same
from tests.rpc.scripted_http import Exchange, scripted
from tests.rpc.test_client import INFO
from tests.server.running import running, wait_for
from upriver.errors import ConfigError, ServerUnavailable
from upriver.pipeline import Dataset
from upriver.rpc.client import ServerClient
from upriver.rpc.tls import client_context


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder: ``ca.pem`` signed ``server.pem`` and ``job.pem``, ``other.pem`` signed neither."""
    if shutil.which("openssl") is None:
        pytest.skip("the program openssl is not here")
    folder = tmp_path_factory.mktemp("certificates")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]

    def openssl(*command: str) -> None:
        subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True)

    for name in ("ca", "other"):
        made = ["-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2", "-subj", f"/CN={name}"]
        openssl("req", "-x509", *key, *made)
    for name in ("server", "job"):
        asked = ["-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"]
        openssl("req", *key, *asked)
        signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"]
        openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")
    openssl("ec", "-in", "job.key", "-aes256", "-passout", "pass:secret", "-out", "locked.key")
    return folder


@contextmanager
def serving(files: Path, *, asks: bool = False) -> Iterator[str]:
    """Run a server that describes itself over TLS; it may ask its clients for a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files / "server.pem", files / "server.key")
    if asks:
        context.load_verify_locations(files / "ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED

    def respond(exchange: Exchange) -> None:
        exchange.plain(200, msgspec.json.encode(INFO))

    with scripted(respond, tls=context) as url:
        yield url


def test_only_the_authorities_that_are_named_are_trusted(files: Path) -> None:
    with serving(files) as url:
        with ServerClient(url, tls=client_context(ca=files / "ca.pem")) as client:
            assert client.info() == INFO
        for context in (None, client_context(ca=str(files / "other.pem"))):
            with (
                ServerClient(url, tls=context) as client,
                pytest.raises(ServerUnavailable, match="certificate verify failed"),
            ):
                client.info()


def test_a_certificate_is_shown_to_a_server_that_asks(files: Path) -> None:
    ca, certificate, key = files / "ca.pem", files / "job.pem", files / "job.key"
    with serving(files, asks=True) as url:
        with ServerClient(url, tls=client_context(ca=ca, certificate=certificate, key=key)) as client:
            assert client.info() == INFO
        with ServerClient(url, tls=client_context(ca=ca)) as client, pytest.raises(ServerUnavailable):
            client.info()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="here nothing is forked")
def test_a_forked_child_has_a_session_of_its_own(files: Path) -> None:
    with serving(files) as url, ServerClient(url, tls=client_context(ca=files / "ca.pem")) as client:
        assert client.info() == INFO
        children = [fork(lambda: client.info() == INFO and client.info() == INFO) for _ in range(2)]
        assert [ended(child) for child in children] == [0, 0]
        (kept,) = client._connections.idle
        assert client.info() == INFO
        assert client._connections.idle == [kept]


def test_nothing_given_is_nothing_set_up() -> None:
    assert client_context() is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ca": "nothing.pem"}, "cannot read the authorities .*nothing.pem: No such file"),
        ({"ca": "names"}, "names holds no certificates in PEM"),
        ({"certificate": "job.pem"}, "certificate was given without key"),
        ({"key": "job.key"}, "key was given without certificate"),
        (
            {"certificate": "nothing.pem", "key": "job.key"},
            "cannot read the certificate .*nothing.pem or its key .*job.key: No such file",
        ),
        (
            {"certificate": "job.pem", "key": "nothing.key"},
            "cannot read the certificate .*job.pem or its key .*nothing.key: No such file",
        ),
        ({"certificate": "job.pem", "key": "server.key"}, "no certificate with its private key"),
        ({"certificate": "names", "key": "names"}, "no certificate with its private key"),
        ({"certificate": "job.pem", "key": "locked.key"}, "without a password"),
    ],
)
def test_files_that_are_not_what_they_should_be_are_named(
    files: Path, given: dict[str, str], message: str
) -> None:
    paths = {name: str(files / value) for name, value in given.items()}
    with pytest.raises(ConfigError, match=message):
        upriver.connect("https://127.0.0.1:9", **paths)


@pytest.mark.parametrize("bad", [3, b"ca.pem", "", True])
def test_what_is_no_path_is_named(bad: object) -> None:
    with pytest.raises(ConfigError, match="ca must be the path of a file"):
        upriver.connect("https://127.0.0.1:9", ca=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("urls", [(), ("http://127.0.0.1:9",)])
def test_what_would_be_of_no_use_is_refused(files: Path, urls: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="are for servers at https"):
        upriver.connect(*urls, ca=files / "ca.pem")


@pytest.mark.slow
@pytest.mark.full
def test_a_job_over_tls_with_a_certificate_has_the_bits_of_the_plain_way(
    files: Path, data: Dataset, plain: Reference
) -> None:
    settings = {
        "tls_certificate": str(files / "server.pem"),
        "tls_key": str(files / "server.key"),
        "tls_client_ca": str(files / "ca.pem"),
    }
    shown = {"certificate": files / "job.pem", "key": files / "job.key"}
    with running(data.store.uri, workers=1, **settings) as server:
        assert server.url.startswith("https://")
        with ServerClient(server.url, tls=client_context(ca=files / "ca.pem", **shown)) as client:
            wait_for(client.ready)
        with upriver.connect(server.url, ca=files / "ca.pem", **shown) as near:
            losses, model, job = run(near, data, policy="freeze")
        assert same((losses, model), plain)
        assert job.report.samples == {server.url: 400}
        with upriver.connect(server.url, ca=files / "ca.pem") as near:
            losses, model, job = run(near, data, policy="freeze")
        assert same((losses, model), plain)
        assert job.report.samples == {"local": 400}
        assert "no server could be used when the job started" in job.plan.why
