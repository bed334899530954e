"""Check that a server accepts the configuration in docs/operate.md, and reads it as described there."""

from __future__ import annotations

import json
import re
from pathlib import Path

from upriver.cli.serve import config_file
from upriver.server import ServerConfig
from upriver.server.tenants import Tenants, hash_token

PAGE = Path(__file__).parents[2] / "docs" / "operate.md"
TOKENS = {"vision": "token-of-vision", "maps": "token-of-maps"}


def server_file() -> str:
    """Return the configuration, with whole hashes in place of shortened ones."""
    blocks = (part.split("```")[0] for part in PAGE.read_text(encoding="utf-8").split("```toml\n"))
    [text] = [block for block in blocks if "[tenants." in block]
    hashes = iter(hash_token(token) for token in TOKENS.values())
    return re.sub(r'"[0-9a-f]+…"', lambda _: f'"{next(hashes)}"', text)


def test_the_server_of_the_page_has_two_tenants_with_their_folders(tmp_path: Path) -> None:
    (tmp_path / "server.toml").write_text(server_file(), encoding="utf-8")
    credentials = tmp_path / "photos.json"
    credentials.write_text(json.dumps({"access_key_id": "key", "secret_access_key": "secret"}))
    credentials.chmod(0o600)
    document = config_file.load(tmp_path / "server.toml")
    config = ServerConfig(**config_file.settings(config_file.check(document, where="server.toml")))
    assert config.host == "0.0.0.0"
    assert config.tls_certificate == str(tmp_path / "tls" / "server.pem")
    assert config.audit_log == "/var/log/upriver/audit.jsonl"
    assert list(config.stores) == ["photos"]
    tenants = Tenants(config.tenants)
    found = {name: tenants.by_token(token) for name, token in TOKENS.items()}
    assert {name: tenant.name for name, tenant in found.items() if tenant is not None} == {
        "vision": "vision",
        "maps": "maps",
    }
    vision, maps = config.tenants
    assert vision.stores == {"photos": ("train", "heldout")} and maps.stores == {"photos": ("aerial",)}
    assert vision.weight == 2 * maps.weight
