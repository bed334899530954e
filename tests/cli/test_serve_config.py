"""Test the file of ``upriver serve``: its settings, and a one-line error that names each fault."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.server.configured import bearer, configured
from tests.server.configured import tenant as tenant_text
from tests.server.running import ask
from upriver.cli import main
from upriver.cli.serve import config_file
from upriver.cli.serve.options import token_of
from upriver.errors import ConfigError
from upriver.protocol import Caps
from upriver.server import ServerConfig
from upriver.server.tenants import Tenant, hash_token

DIGEST = hash_token("token-a")
STORES = '[stores]\nimages = "file:///data"\n'

WHOLE = f"""
host = "0.0.0.0"
port = 7001
workers = 2
threads = 3
device = "cpu"
prefix = ".near"
sandbox = "none"
admission = "adaptive"
memory_budget_bytes = "12 GiB"
memory_reserve = 0.2
collect_s = 0
min_batch = 8
max_admitted = 4
max_waiting = 16
max_waiting_bytes = "500 MB"
max_requests = 32
max_datasets = 2
program_budget_bytes = 1000000
deadline_s = 60
job_timeout_s = 30
stall_timeout_s = 20
head_timeout_s = 5
idle_timeout_s = 10.5
max_connections = 64
grace_s = 3
load_window_s = 30
load_watch_s = 2.5
load_free_below = 0.8
audit_log = "logs/audit.jsonl"
log_format = "json"
trace_endpoint = "http://localhost:4318"
allow = ["my_package.data", "other:birds"]
code_bytes = "32 MiB"

[stores]
plain = "file:///data"

[stores.images]
uri = "s3://bucket/data"
options.endpoint = "https://swift.example.org"
options.ca_file = "swift.pem"
credentials_file = "images.json"

[stores.other]
uri = "s3://other"
environment = {{ access_key_id = "OTHER_KEY", secret_access_key = "OTHER_SECRET" }}

[tenants.alice]
token_hashes = ["{DIGEST}"]
certificates = ["alice"]
weight = 2
max_requests = 8
max_waiting_bytes = "64 MiB"
memory_share = 0.5
program_bytes = "2 GiB"

[tenants.alice.stores]
images = ["alice/", "shared"]
plain = [""]

[tenants.bob]
token_file = "bob.token"

[caps]
body_bytes = "8 MiB"
samples = 64
pixels = 1000000

[tls]
certificate = "server.pem"
key = "/etc/upriver/server.key"
client_ca = "clients.pem"
"""


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a file and returns its path."""

    def write(text: str) -> Path:
        path = tmp_path / "server.toml"
        path.write_text(text)
        return path

    return write


@pytest.fixture(autouse=True)
def of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset our token, and keep the log as other tests expect it."""
    monkeypatch.delenv("UPRIVER_TOKEN", raising=False)
    monkeypatch.setattr("upriver.server.observability.logging.configure", lambda *arguments, **options: None)


def read(path: Path) -> ServerConfig:
    return ServerConfig(**config_file.settings(config_file.check(config_file.load(path), where=str(path))))


def private(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)


def test_everything_that_may_stand_in_it(
    tmp_path: Path, written: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    private(tmp_path / "images.json", '{"access_key_id": "key", "secret_access_key": "hush"}')
    private(tmp_path / "bob.token", "token-b\n")
    monkeypatch.setenv("OTHER_KEY", "other-key")
    monkeypatch.setenv("OTHER_SECRET", "other-hush")
    found = read(written(WHOLE))
    assert (found.stores["plain"], found.token) == ("file:///data", None)
    images: Any = found.stores["images"]
    assert images.uri == "s3://bucket/data"
    assert images.options == {
        "endpoint": "https://swift.example.org",
        "ca_file": str(tmp_path / "swift.pem"),
        "access_key_id": "key",
        "secret_access_key": "hush",
    }
    other: Any = found.stores["other"]
    assert other.options == {"access_key_id": "other-key", "secret_access_key": "other-hush"}
    assert found.tenants == (
        Tenant(
            name="alice",
            token_hashes=(DIGEST,),
            certificates=("alice",),
            stores={"images": ("alice/", "shared"), "plain": ("",)},
            weight=2.0,
            max_requests=8,
            max_waiting_bytes=64 << 20,
            memory_share=0.5,
            program_bytes=2 << 30,
        ),
        Tenant(name="bob", token_hashes=(hash_token("token-b"),)),
    )
    assert found.caps == Caps(body_bytes=8 << 20, samples=64, pixels=1_000_000)
    expected = {
        "host": "0.0.0.0",
        "port": 7001,
        "workers": 2,
        "threads": 3,
        "device": "cpu",
        "prefix": ".near",
        "sandbox": "none",
        "admission": "adaptive",
        "memory_budget_bytes": 12 << 30,
        "memory_reserve": 0.2,
        "collect_s": 0.0,
        "min_batch": 8,
        "max_admitted": 4,
        "max_waiting": 16,
        "max_waiting_bytes": 500_000_000,
        "max_requests": 32,
        "max_datasets": 2,
        "program_budget_bytes": 1_000_000,
        "deadline_s": 60.0,
        "job_timeout_s": 30.0,
        "stall_timeout_s": 20.0,
        "head_timeout_s": 5.0,
        "idle_timeout_s": 10.5,
        "max_connections": 64,
        "grace_s": 3.0,
        "load_window_s": 30.0,
        "load_watch_s": 2.5,
        "load_free_below": 0.8,
        "audit_log": str(tmp_path / "logs" / "audit.jsonl"),
        "log_format": "json",
        "trace_endpoint": "http://localhost:4318",
        "allow": ("my_package.data", "other:birds"),
        "code_bytes": 32 << 20,
        "hidden_variables": ("OTHER_KEY", "OTHER_SECRET"),
        "tls_certificate": str(tmp_path / "server.pem"),
        "tls_key": "/etc/upriver/server.key",
        "tls_client_ca": str(tmp_path / "clients.pem"),
    }
    assert {name: getattr(found, name) for name in expected} == expected
    assert "hush" not in repr(found)


def test_what_is_left_out_is_the_servers_own_default(written: Callable[[str], Path]) -> None:
    assert read(written(STORES)) == ServerConfig(stores={"images": "file:///data"})


def test_folder_of_a_store_is_relative_to_the_file(tmp_path: Path, written: Callable[[str], Path]) -> None:
    text = '[stores]\nimages = "./photos"\n[stores.more]\nuri = "a b"\n[stores.whole]\nuri = "/data"\n'
    found: Any = read(written(text)).stores
    assert found["images"] == (tmp_path / "photos").as_uri()
    assert found["more"].uri == (tmp_path / "a b").as_uri()
    assert found["whole"].uri == "file:///data"


@pytest.mark.parametrize("name", ["images.json", "images.toml", "images"])
def test_credentials_in_a_file(tmp_path: Path, written: Callable[[str], Path], name: str) -> None:
    text = 'access_key_id = "key"\nsession_token = "hush"\n'
    private(
        tmp_path / name,
        '{"access_key_id": "key", "session_token": "hush"}' if name.endswith("json") else text,
    )
    place: Any = read(written(f'[stores.a]\nuri = "s3://b"\ncredentials_file = "{name}"\n')).stores["a"]
    assert place.options == {"access_key_id": "key", "session_token": "hush"}
    assert "hush" not in repr(place)


# ----------------------------------------------------------------------------------------- wrong settings

TENANT = f'[tenants.alice]\ntoken_hashes = ["{DIGEST}"]\n'
S3 = '[stores.a]\nuri = "s3://bucket"\n'

WRONG = {
    "an unknown key": ("prot = 1\n" + STORES, ["prot", "near are port", "the keys are stores"]),
    "a wrong type": ('port = "7000"\n' + STORES, ["port", "str"]),
    "a table that is none": ("stores = 5\n", ["stores"]),
    "no store": ("port = 0\n", ["--store"]),
    "an unknown key of a store": (S3 + 'url = "x"\n', ["stores.a", "url", "uri"]),
    "a store that is a number": ("[stores]\na = 5\n", ["stores.a"]),
    "a store without a place": ("[stores.a]\noptions = {}\n", ["stores.a", "uri"]),
    "an unknown key of a tenant": (STORES + TENANT + "wieght = 2\n", ["tenants.alice", "wieght", "weight"]),
    "a wrong type of a tenant": (STORES + TENANT + 'weight = "2"\n', ["tenants.alice", "weight"]),
    "a hash that is none": (STORES + '[tenants.alice]\ntoken_hashes = ["abc"]\n', ["alice", "hash"]),
    "a tenant's store that is not there": (
        STORES + TENANT + '[tenants.alice.stores]\nimgaes = [""]\n',
        ["alice", "imgaes", "images"],
    ),
    "a tenant that reads out of a store": (
        STORES + TENANT + '[tenants.alice.stores]\nimages = ["../x"]\n',
        ["alice", "images"],
    ),
    "a tenant that reads the server's own": (
        STORES + TENANT + '[tenants.alice.stores]\nimages = [".upriver/"]\n',
        ["alice", "images", ".upriver", "programs"],
    ),
    "a tenant that reads another's programs": (
        'prefix = "near"\n' + STORES + TENANT + '[tenants.alice.stores]\nimages = ["near/tenants/bob"]\n',
        ["alice", "images", "near/tenants/bob", "programs"],
    ),
    "a tenant without a way in": (STORES + "[tenants.alice]\nweight = 2\n", ["alice", "token"]),
    "tenants of whom there are none": (STORES + "[tenants]\n", ["[tenants]", "nobody else"]),
    "two tenants with one hash": (
        STORES + TENANT + f'[tenants.bob]\ntoken_hashes = ["{DIGEST}"]\n',
        ["alice", "bob", "hash"],
    ),
    "a certificate that nobody shows": (
        STORES + '[tenants.alice]\ncertificates = ["alice"]\n',
        ["alice", "tls.client_ca"],
    ),
    "a token beside tenants": ('token_file = "token"\n' + STORES + TENANT, ["token", "tenants"]),
    "a token file that is not there": ('token_file = "none"\n' + STORES, ["none"]),
    "a tenant's token file that is not there": (
        STORES + '[tenants.alice]\ntoken_file = "nothing"\n',
        ["nothing"],
    ),
    "a token with a space": ('token_file = "spaced"\n' + STORES, ["spaced", "spaces"]),
    "text that is no size": ('max_waiting_bytes = "4 apples"\n' + STORES, ["max_waiting_bytes", "4 apples"]),
    "a size of a tenant": (STORES + TENANT + 'program_bytes = "2 GG"\n', ["alice", "program_bytes"]),
    "an unknown cap": (STORES + "[caps]\nsample = 1\n", ["caps", "sample", "samples"]),
    "a cap of nothing": (STORES + "[caps]\nsamples = 0\n", ["samples"]),
    "no certificate": (STORES + '[tls]\nkey = "server.key"\n', ["tls", "certificate"]),
    "an empty table": (STORES + "[tls]\n", ["tls", "certificate"]),
    "a certificate that is not there": (STORES + '[tls]\ncertificate = "none.pem"\n', ["none.pem"]),
    "a certificate that is none": (STORES + '[tls]\ncertificate = "spaced"\n', ["spaced is no certificate"]),
    "a certificate and a key that are none": (
        STORES + '[tls]\ncertificate = "spaced"\nkey = "odd.json"\n',
        ["spaced and ", "odd.json are no certificate"],
    ),
    "credentials that are not there": (S3 + 'credentials_file = "none.json"\n', ["none.json"]),
    "credentials that others may read": (
        S3 + 'credentials_file = "open.json"\n',
        ["open.json", "644", "chmod"],
    ),
    "credentials that are no JSON": (S3 + 'credentials_file = "odd.json"\n', ["odd.json", "JSON"]),
    "a token that others can read": (
        'token_file = "open.json"\n' + STORES,
        ["the token file", "open.json", "644", "chmod 600"],
    ),
    "credentials of another form": (S3 + 'credentials_file = "other.json"\n', ["other.json", "key_id"]),
    "credentials given twice": (
        S3 + 'credentials_file = "good.json"\noptions.access_key_id = "x"\n',
        ["'a'", "access_key_id", "twice"],
    ),
    "a variable that is not set": (S3 + 'environment = { access_key_id = "NO_SUCH" }\n', ["'a'", "NO_SUCH"]),
    "an option from the environment": (S3 + 'environment = { region = "HOME" }\n', ["'a'", "region"]),
    "an audit log that cannot be": ('audit_log = "none/audit"\n' + STORES, ["none/audit"]),
    "too many workers": ("workers = 100000\n" + STORES, ["workers", "64", "core", "100000"]),
    "too many workers over devices": (
        'workers = 1000\ndevice = "cpu,cpu"\n' + STORES,
        ["workers", "64", "1000 for each of 2"],
    ),
    "too many threads": ("threads = 1000000\n" + STORES, ["threads", "64", "core", "1000000"]),
    "a prefix of nothing": ('prefix = ""\n' + STORES, ["prefix", "empty"]),
    "a prefix out of the store": ('prefix = "../x"\n' + STORES, ["prefix", "'../x'"]),
    "an admission that is none": ('admission = "greedy"\n' + STORES, ["admission", "greedy"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line_that_names_it(
    tmp_path: Path, written: Callable[[str], Path], capsys: pytest.CaptureFixture[str], case: str
) -> None:
    text, named = WRONG[case]
    (tmp_path / "images").mkdir()
    private(tmp_path / "token", "token-z")
    private(tmp_path / "spaced", "two words")
    for name, content in {
        "open.json": "{}",
        "odd.json": '{"secret_access_key": "hush',
        "other.json": '{"key_id": "hush"}',
        "good.json": '{"access_key_id": "hush"}',
    }.items():
        private(tmp_path / name, content)
    (tmp_path / "open.json").chmod(0o644)
    path = written(text.replace("file:///data", (tmp_path / "images").as_uri()))
    assert main(["serve", "--config", str(path), "--port", "0"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    for name in named:
        assert name in captured.err
    assert "hush" not in captured.err
    assert "token-z" not in captured.err


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0),
        (4096, 4096),
        ("4096 B", 4096),
        ("4GB", 4 * 10**9),
        ("4 kB", 4000),
        ("4 KiB", 4096),
        ("1.5 MiB", 3 << 19),
        (" 2 TiB ", 2 << 40),
    ],
)
def test_sizes(value: int | str, expected: int) -> None:
    assert config_file.size("some_bytes", value) == expected


@pytest.mark.parametrize(
    "value", ["", "4", "4 Gib", "4 gb", "-1 B", "1e3 B", "4 iB", "9" * 5000 + " B", "٤ B"]
)
def test_what_is_no_size_is_named(value: str) -> None:
    with pytest.raises(ConfigError, match="some_bytes"):
        config_file.size("some_bytes", value)


# ---------------------------------------------------------------------------------- options, environment


def test_the_one_token_of_the_environment_is_for_servers_without_tenants(
    written: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPRIVER_TOKEN", "a-clients-own")
    for text, expected in ((STORES, "a-clients-own"), (STORES + TENANT, None)):
        assert token_of(config_file.check(config_file.load(written(text)), where="file")) == expected


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--engine", "threads"], "--engine"),
        (["--replicas", "2"], "--replicas"),
        (["--address", "auto"], "--address"),
        (["--engine", "ray", "--replicas", "0"], "--replicas"),
        (["--engine", "ray", "--replicas", "2", "--max-replicas", "3"], "--replicas"),
        (["--engine", "ray", "--min-replicas", "2"], "--max-replicas"),
        (["--engine", "ray", "--min-replicas", "3", "--max-replicas", "2"], "--max-replicas"),
        (["--queue-bytes", "1 GiB"], "--queue-bytes"),
        (["--engine", "ray", "--max-replicas", "2", "--queue-bytes", "0"], "--queue-bytes"),
        (["--engine", "ray", "--max-replicas", "2", "--queue-bytes", "4 apples"], "--queue-bytes"),
        (["--engine", "ray", "--replicas", "2", "--queue-bytes", "1 GiB"], "--max-replicas"),
    ],
)
def test_options_of_a_cluster_that_cannot_be_meant(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--store", "file:///tmp", *arguments]) == 2
    assert named in capsys.readouterr().err


def test_a_cluster_is_told_what_the_file_and_the_options_say(
    tmp_path: Path, written: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}

    def run(document: dict[str, Any], **options: Any) -> None:
        told.update(options, document=document)

    monkeypatch.setattr("upriver.cli.serve.ray.run", run)
    path = written('token_file = "token"\nworkers = 2\n[stores.a]\nuri = "file:///data"\n')
    private(tmp_path / "token", "token-a")
    common = [
        "serve",
        "--config",
        str(path),
        "--workers",
        "3",
        "--store",
        "b=file:///more",
        "--engine",
        "ray",
    ]
    assert main([*common, "--address", "local", "--min-replicas", "1", "--max-replicas", "4"]) == 0
    assert told == {
        "address": "local",
        "queue_bytes": None,
        "replicas": (1, 4),
        "token": "token-a",
        "document": {
            "token_file": str(tmp_path / "token"),
            "workers": 3,
            "stores": {"a": {"uri": "file:///data"}, "b": "file:///more"},
        },
    }
    assert main([*common, "--replicas", "2"]) == 0
    assert (told["replicas"], told["address"]) == (2, None)
    assert main([*common, "--max-replicas", "2", "--queue-bytes", "64 MiB"]) == 0
    assert (told["replicas"], told["queue_bytes"]) == ((1, 2), 64 << 20)


# ------------------------------------------------------------------------------------------------ tokens


def test_a_new_token_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    made = []
    for _ in range(2):
        assert main(["token", "--json"]) == 0
        made.append(json.loads(capsys.readouterr().out))
    assert made[0]["token"] != made[1]["token"]
    for document in made:
        assert set(document) == {"token", "token_hash"}
        assert re.fullmatch(r"[A-Za-z0-9_-]{43}", document["token"])
        assert document["token_hash"] == hash_token(document["token"])
    assert main(["token"]) == 0
    (_, token), (_, digest) = (line.split() for line in capsys.readouterr().out.splitlines())
    assert sha256(token.encode()).hexdigest() == digest


def test_the_hash_of_a_token_that_exists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = "0123456789abcdef"
    private(tmp_path / "token", f"{token}\n")
    assert main(["token", "--file", str(tmp_path / "token"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"token_hash": hash_token(token)}
    assert main(["token", "--file", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


def test_a_token_that_can_be_guessed_from_its_hash_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private(tmp_path / "token", "0123456789abcde\n")
    assert main(["token", "--file", str(tmp_path / "token")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "has 15 characters" in captured.err and "16" in captured.err
    assert "0123456789" not in captured.err


# --------------------------------------------------------------------------------------- a real process


@pytest.mark.slow
@pytest.mark.full
def test_a_server_of_tenants_from_a_file(tmp_path: Path) -> None:
    text = f'log_format = "json"\n[stores]\ndefault = "{tmp_path.as_uri()}"\n'
    text += tenant_text("alice", "token-a", default=[""]) + "[caps]\nsamples = 64\n"
    with configured(tmp_path, text) as server:
        server.wait_ready()
        assert ask(server, "GET", "/v1/info")[0] == 401
        assert ask(server, "GET", "/v1/info", headers=bearer("token-b"))[0] == 401
        status, _, body = ask(server, "GET", "/v1/info", headers=bearer("token-a"))
        assert (status, json.loads(body)["caps"]["samples"]) == (200, 64)
        assert server.stop() == 0
