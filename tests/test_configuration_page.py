"""Check that the configuration page lists every key with its default."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from upriver.cli.serve.config_file import CapsSection, ServeFile, StoreSection, TenantSection, TlsSection
from upriver.cli.stages import input_stages
from upriver.cli.train.command import FREE_TO_CHANGE, TrainFile
from upriver.pipeline.stages.registry import STAGES
from upriver.protocol import DEFAULT_CAPS
from upriver.server import ServerConfig

PAGE = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text(encoding="utf-8")
SECTIONS = {part.split("\n", 1)[0]: part for part in PAGE.split("\n## ")}
SERVE = SECTIONS["`upriver serve --config server.toml`"]
TRAIN = SECTIONS["`upriver train train.toml`"]
INPUT = SECTIONS["Input stages"]


def rows(section: str) -> dict[str, str]:
    """Return the second column of a table by the first."""
    lines = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    return {cells[1].strip().strip("`"): cells[2].strip() for cells in lines}


def written(value: Any) -> str:
    return f"`{json.dumps(value)}`"


def test_every_key_of_a_training_run_is_there_with_its_default() -> None:
    expected = {}
    for field in msgspec.structs.fields(TrainFile):
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if default is msgspec.NODEFAULT:
            expected[field.name] = "needed"
        else:
            expected[field.name] = "none" if default is None else written(default)
    expected["num_workers"] = "cores, at least 2"  # None in the file: the job decides
    assert rows(TRAIN) == expected


def test_what_a_resumed_run_may_change_is_there() -> None:
    said = TRAIN.split("decides no trained bit:")[1]
    assert {word.strip(" `.\n") for word in said.split(",")} == FREE_TO_CHANGE


def test_every_key_of_a_server_is_there_with_its_default() -> None:
    config = ServerConfig(stores={"default": "file:///tmp"})
    known = {
        "stores": "none, needed",
        "tenants": "none",
        "caps": "as below",
        "tls": "none",
        "token_file": "none",
        "threads": "cores / workers",
        "memory_budget_bytes": "worked out",
    }
    expected = {}
    for field in msgspec.structs.fields(ServeFile):
        default = getattr(config, field.name, None)
        expected[field.name] = known.get(field.name) or ("none" if default is None else written(default))
    assert rows(SERVE) == expected


@pytest.mark.parametrize(
    ("section", "schema", "known"),
    [
        ("Stores of a server", StoreSection, {}),
        ("Tenants of a server", TenantSection, {"stores": "every store", "stored_bytes": "the server's"}),
        ("TLS of a server", TlsSection, {}),
    ],
)
def test_every_key_of_a_servers_tables_is_there(section: str, schema: Any, known: dict[str, str]) -> None:
    expected = {}
    for field in msgspec.structs.fields(schema):
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        said = "needed" if default is msgspec.NODEFAULT else "none" if default is None else written(default)
        expected[field.name] = known.get(field.name, said)
    assert rows(SECTIONS[section]) == expected


def test_every_cap_is_there_and_can_be_set() -> None:
    caps = {field.name for field in msgspec.structs.fields(CapsSection)}
    assert caps == set(DEFAULT_CAPS.__struct_fields__)
    expected = {name: written(getattr(DEFAULT_CAPS, name)) for name in caps}
    assert rows(SECTIONS["Caps of a server"]) == expected


def test_every_input_stage_is_there_with_its_fields() -> None:
    table = rows(INPUT)
    assert set(table) == set(STAGES)
    for name, stage in STAGES.items():
        for field in fields(stage):
            assert f"`{field.name}" in table[name]
            if field.default not in (MISSING, None) and name != "normalize":
                value = json.dumps(list(field.default) if isinstance(field.default, tuple) else field.default)
                assert f"`{field.name} = {value}`" in table[name]


@pytest.mark.parametrize("page", ["docs/guides/finetune.md", "docs/configuration.md"])
def test_the_stages_of_ready_tensors_are_read_as_written(page: str, tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent / page).read_text(encoding="utf-8")
    [block] = [
        part.split("```")[0] for part in text.split("```toml\n") if "load_tensor" in part.split("```")[0]
    ]
    (tmp_path / "ready.toml").write_text(block)
    [stage] = input_stages(str(tmp_path / "ready.toml")).stages
    assert stage.name == "load_tensor"
