"""Check that damage to a cache file or its folder never stops the work."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import upriver
from tests.conftest import fill
from tests.examples import often
from tests.profile.latency.test_predictor import timed
from tests.profile.test_profile_cache import CLUSTER, KEY, profile
from tests.profile.test_throughput_cache import ALL as FIGURES
from tests.profile.test_throughput_cache import KEY as FIGURES_KEY
from upriver.cache import Cache, cache_folder
from upriver.coldstart import link_cache, publish_model
from upriver.coldstart.format.checkpoint import find
from upriver.coldstart.grouping import grouping_cache as groupings
from upriver.coldstart.link_cache import StoreLink
from upriver.coldstart.roofline import CORE, DevicePace, keep_pace, pace_of
from upriver.errors import StoreError
from upriver.profile.latency import serialization
from upriver.profile.latency.predictor import Predictor, place_of
from upriver.profile.latency.regression import OwnModel, PaperModel
from upriver.profile.profile_cache import load_profile, save_profile
from upriver.profile.throughput_cache import KnownThroughput, MetricsStore
from upriver.program.capture.prefix import capture
from upriver.program.example_inputs import TensorSource
from upriver.program.graph.executor import Program
from upriver.program.split.freeze_point import CrossingTensor, FreezePoint
from upriver.program.split.frozen_name import frozen_name, known_name, remember_trained, trained_by_others
from upriver.program.split.module_trace import Shape
from upriver.program.split.proof_cache import is_proven, remember
from upriver.store import Store

pytestmark = pytest.mark.timeout(60)  # a read from a pipe would wait for ever


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a user id without an entry in the password file, and unset the variables that name a folder."""

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "UPRIVER_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)


@pytest.mark.usefixtures("no_home")
def test_cache_folder_without_a_home_is_one_where_nothing_can_lie() -> None:
    with pytest.raises(OSError, match=os.devnull):
        Cache("proofs").write("a", "{}")
    assert Cache("proofs").load("a", bytes) is None


@pytest.mark.usefixtures("no_home")
@pytest.mark.parametrize(
    ("name", "folder"), [("UPRIVER_CACHE", ""), ("XDG_CACHE_HOME", "upriver"), ("HOME", ".cache/upriver")]
)
def test_cache_folder_with_a_variable_is_the_folder_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, folder: str
) -> None:
    monkeypatch.setenv(name, str(tmp_path))
    assert cache_folder() == tmp_path / folder


# ------------------------------------------------------------------------------------------- saved results


@dataclass(frozen=True)
class Kept:
    """One kind of cached result, by the functions that save and load it.

    Attributes:
        save: Saves it, and raises nothing.
        load: Returns the saved result.
        nothing: The return value of ``load`` where nothing is saved.
    """

    save: Callable[[], object]
    load: Callable[[], Any]
    nothing: Callable[[], Any] = lambda: None

    @property
    def absent(self) -> Any:
        return self.nothing()


CPU = torch.device("cpu")
LINK = StoreLink(latency_s=0.0, bandwidth_bytes_per_s=3e6, requests=4)
PACE = DevicePace(flops_per_s=3e10, moved_bytes_per_s=4e9)
POINT = FreezePoint(
    name="all",
    ships=(
        CrossingTensor(
            source=TensorSource(path=""), shape=Shape(dtype=torch.float32, base=(0, 4), slope=(1, 0))
        ),
    ),
)
ASKING = {True: (True,), False: (False,)}


@lru_cache
def program() -> Program:
    return capture(nn.Linear(3, 4), torch.randn(2, 3))


@lru_cache
def models() -> Predictor:
    """Return latency models of two kinds, one with a correction."""
    measured = timed("conv") + timed("activation.relu")
    return Predictor(
        place=place_of("cpu"),
        fitted_at="2026-01-02T03:04:05+00:00",
        configurations=len(measured),
        papers={"edge": PaperModel.fit(measured, "edge"), "device": PaperModel.fit(measured, "device")},
        ours=OwnModel.fit(measured),
        errors=(),
    )


def keep_models() -> None:
    with suppress(OSError):  # ``upriver calibrate`` reports this
        serialization.keep(models())


def kept_models() -> str | None:
    found = serialization.kept("cpu")
    return None if found is None else serialization.predictor_to_json(found)


def keep_a_pace() -> None:
    with suppress(OSError):
        keep_pace(CPU, PACE, threads=torch.get_num_threads())


def store() -> Store:
    return Store.open(Path("/").as_uri())


KEPT = {
    "proofs": Kept(
        save=lambda: remember("ab" * 32, program(), ASKING),
        load=lambda: is_proven("ab" * 32, program(), POINT),
    ),
    "names": Kept(
        save=lambda: frozen_name("cd" * 32),
        load=lambda: known_name("cd" * 32),
    ),
    "freeze_points": Kept(
        save=lambda: remember_trained(nn.Linear(3, 4), ""),
        load=lambda: trained_by_others(nn.Linear(3, 4)),
        nothing=list,
    ),
    "profiles": Kept(
        save=lambda: save_profile(KEY, profile(), CLUSTER),
        load=lambda: load_profile(KEY, stages=("a", "b"), input_stages=("decode",)),
    ),
    "latency": Kept(save=keep_models, load=kept_models),
    "paces": Kept(save=keep_a_pace, load=lambda: pace_of(CPU), nothing=lambda: usual_pace()),
    "links": Kept(
        save=lambda: link_cache.keep(store(), LINK, nbytes=1 << 30),
        load=lambda: link_cache.last_known(store()),
        nothing=lambda: link_cache.UNKNOWN,
    ),
    "metrics": Kept(
        save=lambda: MetricsStore().save(FIGURES_KEY, FIGURES),
        load=lambda: MetricsStore().load(FIGURES_KEY),
        nothing=lambda: KnownThroughput(),
    ),
}
"""Everything that upriver keeps in the cache folder but the demo's images, by the folder."""


def usual_pace() -> DevicePace:
    return replace(CORE, flops_per_s=CORE.flops_per_s * torch.get_num_threads())


def test_no_cache_is_missing_here() -> None:
    """Find every `Cache` that the package makes."""
    source = Path(upriver.__file__).parent
    found = {
        name for path in source.rglob("*.py") for name in re.findall(r'Cache\("(\w+)"', path.read_text())
    }
    assert found == KEPT.keys()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache folder, which does not exist yet."""
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(params=KEPT)
def kept(request: pytest.FixtureRequest) -> Kept:
    return KEPT[request.param]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log lines of upriver."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("upriver")]


def files_of(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*.json") if path.parent.parent == root)


# ------------------------------------------------------------------------------------------------ damage


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound, inside(path.parent):
        bound.bind(path.name)


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Enter a folder: names of sockets are short, so they are bound from their own folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


INSTEAD: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "socket": _socket,
    "empty": Path.touch,
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 4),
    "surrogate": lambda path: path.write_text('{"schema": "\\ud800"}'),
    "null": lambda path: path.write_text("null"),
    "list": lambda path: path.write_text("[1, 2]"),
    "no number": lambda path: path.write_text("NaN"),
    "huge number": lambda path: path.write_text("1e999"),
    "long number": lambda path: path.write_text("9" * 100_000),
    "deep": lambda path: path.write_text("[" * 1_000_000),
    "deep objects": lambda path: path.write_text('{"asking":' * 100_000),
    "a terabyte": _sparse,
}
"""Damages by name: each replaces a file by something else."""


@pytest.mark.parametrize(
    "damage", often(INSTEAD, "pipe", "folder", "link to itself", "binary", "list", "deep")
)
def test_a_file_that_cannot_be_used_is_as_none_and_is_replaced(
    root: Path, kept: Kept, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept.save()
    whole = kept.load()
    assert whole != kept.absent
    files = files_of(root)
    for path in files:
        path.unlink()
        INSTEAD[damage](path)
    with caplog.at_level(logging.DEBUG, "upriver"):
        assert kept.load() == kept.absent
        kept.save()
        again = kept.load()
    assert again == (kept.absent if damage == "folder" else whole)
    assert len(said(caplog)) <= 1, caplog.text
    assert all(path.is_dir() if damage == "folder" else path.is_file() for path in files)
    assert files_of(root) == files and not list(root.rglob(".*"))


@pytest.mark.full
@pytest.mark.parametrize("damage", INSTEAD)
def test_groupings_in_a_store_that_cannot_be_used_are_as_none(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """This cache alone lies next to the weights, for all clients that load them."""
    weights = Store.open(tmp_path.as_uri())
    publish_model(
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), weights, "net.safetensors", (torch.ones(1, 3),)
    )
    source = find(weights, "net")
    known = {"pisel": [range(1), range(1, len(source.tensors))]}
    groupings.keep(source, known)
    assert groupings.kept(source) == known
    path = tmp_path / groupings.path_of(source)
    path.unlink()
    INSTEAD[damage](path)
    with caplog.at_level(logging.INFO, "upriver"):
        assert groupings.kept(source) == {}
    assert len(said(caplog)) <= 1, caplog.text
    with suppress(StoreError):  # a load ignores this error
        groupings.keep(source, known)
        assert groupings.kept(source) == known


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -1, 0, 2**63, 1e308, math.nan, math.inf])
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["storage", "compute.cpu", "training", "inf"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


def _changed(document: Any, data: st.DataObject) -> Any:
    """Return a document in which one element is removed, duplicated under another name, or changed."""
    if not isinstance(document, dict | list) or not document or not data.draw(st.integers(0, 5)):
        return data.draw(values)
    where = data.draw(st.sampled_from(list(document) if isinstance(document, dict) else range(len(document))))
    document = document.copy()
    match data.draw(st.sampled_from(["inside", "gone", "more"])):
        case "gone":
            del document[where]
        case "more" if isinstance(document, dict):
            document[data.draw(st.text(max_size=4))] = document[where]
        case "more":
            document.append(document[where])
        case _:
            document[where] = _changed(document[where], data)
    return document


@pytest.mark.full
@pytest.mark.parametrize("name", KEPT)
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_other_shape_is_an_error(root: Path, name: str, data: st.DataObject) -> None:
    kept = KEPT[name]
    kept.save()
    whole = kept.load()
    path = data.draw(st.sampled_from(files_of(root)))
    path.write_text(json.dumps(_changed(json.loads(path.read_text()), data)))
    assert type(kept.load()) in (type(whole), type(kept.absent))
    kept.save()
    assert kept.load() == whole


def test_a_file_that_its_owner_may_not_read_is_replaced_by_one_that_he_may(root: Path, kept: Kept) -> None:
    kept.save()
    for path in files_of(root):
        path.write_text("damaged")
        path.chmod(0)
    kept.save()
    assert kept.load() != kept.absent
    assert {path.stat().st_mode & 0o777 for path in files_of(root)} == {0o600}


# ---------------------------------------------------------------------------------------------- folders


def _full(folder: Path) -> None:
    folder.mkdir()
    mount(folder, "size=64k")
    fill(folder)


def _read_only(folder: Path) -> None:
    folder.mkdir()
    mount(folder, "ro")


def mount(folder: Path, options: str) -> None:
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"a file system of its own needs a user who may mount: {done.stderr.strip()}")


FOLDERS: dict[str, Callable[[Path], object]] = {
    "file": Path.touch,
    "pipe": os.mkfifo,
    "dangling link": lambda path: path.symlink_to("nowhere/else"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "socket": _socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "full disk": _full,
    "read-only disk": _read_only,
}


@pytest.fixture
def unmounted(tmp_path: Path) -> Iterator[None]:
    yield
    for mounted in [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]:
        if Path(mounted).is_relative_to(tmp_path):
            subprocess.run(["umount", "--lazy", mounted], check=True)


@pytest.mark.usefixtures("unmounted")
@pytest.mark.parametrize("below", [False, True], ids=["all", "one kind"])
@pytest.mark.parametrize("damage", often(FOLDERS, "file", "pipe", "full disk", "read-only disk"))
def test_a_folder_that_cannot_be_used_keeps_nothing(
    root: Path, kept: Kept, damage: str, below: bool, caplog: pytest.LogCaptureFixture
) -> None:
    place = root / next(name for name, each in KEPT.items() if each is kept) if below else root
    place.parent.mkdir(exist_ok=True)
    FOLDERS[damage](place)
    before = os.lstat(place)
    with caplog.at_level(logging.DEBUG, "upriver"):
        for _ in range(2):
            kept.save()
            assert kept.load() == kept.absent
    assert len(said(caplog)) <= 1, caplog.text
    assert os.path.samestat(before, os.lstat(place))
    assert place.is_symlink() or not place.is_dir() or not list(place.rglob("*.json*"))


@pytest.mark.usefixtures("no_home")
def test_without_a_home_nothing_is_kept_and_nothing_said(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    kept.save()
    assert kept.load() == kept.absent
    assert not said(caplog)


@pytest.mark.parametrize("variable", ["UPRIVER_CACHE", "XDG_CACHE_HOME"])
def test_a_relative_folder_whose_current_one_is_gone_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: Kept, variable: str
) -> None:
    monkeypatch.delenv("UPRIVER_CACHE")
    monkeypatch.setenv(variable, "relative")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    kept.save()
    assert kept.load() == kept.absent


def test_what_was_there_stays_on_a_full_disk_and_is_replaced_when_there_is_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UPRIVER_CACHE", str(small_disk / "cache"))
    kept.save()
    whole = kept.load()
    before = {path: path.read_bytes() for path in small_disk.rglob("*.json")}
    filler = fill(small_disk)
    with caplog.at_level(logging.DEBUG, "upriver"):
        for _ in range(2):
            kept.save()
            assert kept.load() == whole
    assert {path: path.read_bytes() for path in small_disk.rglob("*.json")} == before
    assert not list(small_disk.rglob(".*"))
    assert len(said(caplog)) <= 1, caplog.text
    filler.unlink()
    for path in before:
        path.write_text("damaged")
    kept.save()
    assert kept.load() == whole
