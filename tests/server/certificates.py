"""Make certificates for tests with the openssl command."""

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command is not here")

_CONFIG = """
[req]
distinguished_name = name
prompt = no
[name]
CN = unused
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[leaf]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {alternatives}
"""

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True)
class Identity:
    """Certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """Issue certificates into a folder of its own."""

    def __init__(self, folder):
        folder.mkdir()
        self._folder = folder
        self.certificate, self._key = folder / "authority.pem", folder / "authority.key"
        _openssl(
            *("req", "-x509", "-new", *_NEW_KEY, "-config", self._config("DNS:unused")),
            *("-extensions", "authority", "-subj", "/CN=test authority", "-days", "2"),
            *("-keyout", self._key, "-out", self.certificate),
        )

    def issue(self, name, *, alternatives="IP:127.0.0.1,DNS:localhost"):
        """Issue a certificate with this common name and these alternative names."""
        found = Identity(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        asked = self._folder / f"{name}.csr"
        config = self._config(alternatives)
        _openssl(
            *("req", "-new", *_NEW_KEY, "-config", config, "-subj", f"/CN={name}"),
            *("-keyout", found.key, "-out", asked),
        )
        _openssl(
            *("x509", "-req", "-in", asked, "-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial"),
            *("-extfile", config, "-extensions", "leaf", "-days", "2", "-out", found.certificate),
        )
        return found

    def client(self, identity=None):
        """Return a client context that trusts this authority, and shows a certificate where one is given."""
        context = ssl.create_default_context(cafile=self.certificate)
        if identity is not None:
            context.load_cert_chain(identity.certificate, identity.key)
        return context

    def _config(self, alternatives):
        path = self._folder / "openssl.cnf"
        path.write_text(_CONFIG.format(alternatives=alternatives))
        return path


def _openssl(*arguments):
    done = subprocess.run(
        ["openssl", *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
