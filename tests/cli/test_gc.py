"""Test how `upriver gc` shows and removes kept features; `tests/coldstart` tests the rest of the command."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from upriver.cli import main
from upriver.program.graph.artifact_paths import graph_path, weights_path
from upriver.store import Store

ALICE = ".upriver/tenants/alice"
P, W, F, G = (f"{number:064x}" for number in range(1, 5))


def shard(stretch: str, number: int, *, folder: str = ALICE) -> str:
    return f"{folder}/features/{stretch}/rows-{number}-{number:016x}.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a file store with an old program, its weights and old features, and features of today."""
    store = Store.open(tmp_path.as_uri())
    objects = {
        graph_path(ALICE, P): json.dumps({"weights_digest": W}).encode(),
        weights_path(ALICE, W): bytes(5_000),
        shard(F, 1): bytes(70_000),
        shard(F, 2): bytes(2_000),
    }
    for path, data in objects.items():
        store.put(path, data)
        os.utime(tmp_path / path, (1e9, 1e9))
    store.put(shard(G, 1), bytes(10))
    return store


def stored(store: Store) -> set[str]:
    return {info.path.removeprefix(f"{ALICE}/") for info in store.list(ALICE)}


def test_gc_shows_the_kind_and_the_bytes_of_each(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    before = stored(store)
    assert main(["gc", store.uri, "--dry-run"]) == 0
    captured = capsys.readouterr()
    head, _, *rows = [re.split(r"\s{2,}", line.strip()) for line in captured.out.splitlines()]
    assert head == ["kind", "object", "size", "days unused"]
    assert [row[:3] for row in rows] == [
        ["program", graph_path(ALICE, P), "86 B"],
        ["weights", weights_path(ALICE, W), "5 kB"],
        ["features", f"{ALICE}/features/{F}", "72 kB"],
    ]
    assert "77.1 kB in 3 objects would be removed" in captured.err
    assert stored(store) == before


def test_gc_as_json_names_the_kind_and_removes_all_shards(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gc", store.uri, "--json", "--digest", F]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["bytes"] == 72_000
    assert document["removed"] == [
        {
            "kind": "features",
            "path": f"{ALICE}/features/{F}",
            "digest": F,
            "bytes": 72_000,
            "last_used": "2001-09-09T01:46:40+00:00",
        }
    ]
    assert stored(store) == {
        path.removeprefix(f"{ALICE}/") for path in (graph_path(ALICE, P), weights_path(ALICE, W), shard(G, 1))
    }


def test_gc_of_features_that_were_used_since_says_why_they_stay(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.put(f"{ALICE}/used/{F}", b"used\n")
    for stretch in (F, G):
        assert main(["gc", store.uri, "--digest", stretch]) == 0
        assert f"{stretch} under {ALICE!r} stays: it was used 0.0 h ago" in capsys.readouterr().err
    assert {f"features/{F}", f"features/{G}"} == {
        path.rpartition("/")[0] for path in stored(store) if path.startswith("features")
    }


def test_gc_of_features_elsewhere_names_the_option(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ".upriver/tenants/bob"
    store.put(shard(G, 1, folder=folder), b"rows")
    assert main(["gc", store.uri, "--tenant", "bob", "--digest", F]) == 0
    assert f"{F} lies under {ALICE!r}, which was not looked at; add --tenant alice" in capsys.readouterr().err


def test_gc_of_a_folder_without_shards_finds_no_features(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.put(f"{ALICE}/features/{W[::-1]}/notes.txt", b"mine")
    assert main(["gc", store.uri, "--digest", W[::-1]]) == 0
    assert "no program, no weights and no features under" in capsys.readouterr().err
