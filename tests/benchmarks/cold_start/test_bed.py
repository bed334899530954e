"""Test `cold_start`'s processes, its link, and the environment of its peers."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cold_start import __main__ as cold_start
from benchmarks.cold_start import bed as cold_bed
from benchmarks.cold_start import peers as cold_peers
from benchmarks.cold_start.bed import Jobs, Local, Namespaces, told
from benchmarks.cold_start.peers import Peers
from benchmarks.cold_start.settings import (
    OURS,
    PLAIN,
    WAYS,
)
from benchmarks.harness import testbed
from benchmarks.harness.children import Failed, module_command


def test_moments_are_seconds_since_a_process_was_asked_for() -> None:
    said = {"imported": 13.0, "callable": 13.5, "answered": 15.0, "whole": 15.5, "equal": True, "cpu_s": 2.0}
    found = told(said, 10.0, 15.25)
    assert found["imported_s"] == 3.0 and found["whole_s"] == 5.5
    assert found["total_s"] == 5.25, "the parent's clock"
    assert found["after_imports_s"] == 2.0 and found["equal"] is True and "answered" not in found


JOB = """
import json, os, sys, time
spec = json.loads(sys.argv[-1])
if spec["says"]:
    print("answered")
more = {"folder": os.getcwd(), "cache": os.environ["UPRIVER_CACHE"]}
print(json.dumps({**spec["says"], **more}), flush=True)
time.sleep(spec["lingers"])
"""


def jobs_that_say(folder: Path) -> Jobs:
    """Return jobs whose processes print what they are asked to."""
    package = folder / "benchmarks" / "cold_start"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "job.py").write_text(JOB)
    place = Local()  # the store is not used
    place.bucket, place.options = "none", {}
    return Jobs(place, Peers(without=True), folder, folder)


def test_what_a_run_learns_of_a_link_is_for_the_same_run_alone(tmp_path: Path) -> None:
    jobs = jobs_that_say(tmp_path)

    def cache(run: str, link: str, knob: int) -> str:
        spec = {"model": "gpt2", "knob": knob, "says": {}, "lingers": 0}
        return str(jobs.ask("parts", run, way=WAYS[OURS], cores=1, link=link, **spec)["cache"])

    first = cache(OURS, "fast", 1)
    others = {cache("pisel", "fast", 1), cache(OURS + PLAIN, "fast", 1), cache(OURS, "thin", 1)}
    others.add(cache(OURS, "fast", 4))
    assert cache(OURS, "fast", 1) == first and len(others - {first}) == 4


def test_a_process_that_has_answered_and_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_bed, "END_LIMIT_S", 0.1)
    jobs = jobs_that_say(tmp_path)
    said = {"imported": 1.0, "callable": 1.0, "answered": 1.0, "whole": 1.0, "equal": True}

    def asked(says: dict[str, Any], lingers: float) -> dict[str, Any]:
        spec = {"model": "gpt2", "knob": 1, "says": says, "lingers": lingers}
        return jobs.ask("run", OURS, way=WAYS[OURS], cores=1, link="none", **spec)

    found = asked(said, 600)
    assert found["equal"] and found["ended"] is False
    assert not jobs._place._processes, "it is at an end"  # type: ignore[attr-defined]
    assert Path(found["folder"]).parent == tmp_path, "no module lies where it is begun"
    monkeypatch.setattr(cold_bed, "END_LIMIT_S", 60)
    assert "ended" not in asked(said, 0)
    with pytest.raises(Failed, match="run upriver: 'imported'"):
        asked({"equal": True}, 0)


def test_a_link_that_failed_its_check_is_checked_again() -> None:
    class Bed:
        busy, asked = True, list[float | None]()

        def set_rate(self, rate: float | None) -> None:
            self.asked.append(rate)

        def check(self) -> testbed.Rates:
            if self.busy:
                raise testbed.TestbedError("it carries too little")
            return testbed.Rates(from_storage=1.25e8, from_compute=1e8)

    place, bed = Namespaces(), Bed()
    place.over(bed)  # type: ignore[arg-type]
    with pytest.raises(testbed.TestbedError, match="too little"):
        place.shape(1.2e8)
    bed.busy = False
    assert place.shape(1.2e8) == 1.25e8 and bed.asked == [1.2e8, 1.2e8]
    assert place.shape(1.2e8) == 1.25e8 and len(bed.asked) == 2, "what has passed holds"
    place.shape(None)
    place.shape(1.2e8)
    assert bed.asked[2:] == [None, 1.2e8]


# ------------------------------------------------------------------------------------------------ peers


def test_peers_that_are_not_installed_are_left_out_if_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cold_peers.VARIABLE, str(tmp_path / "nothing"))
    peers = Peers()
    assert peers.ways() == ("upriver", "pisel", "layers", "sequential")
    assert set(peers.left_out()) == set(WAYS) - set(peers.ways())
    assert all(part in peers.hint() for part in ("pip install", "tensorizer", cold_peers.VARIABLE))
    with pytest.raises(Failed, match=r"boto3-torch.* cannot be run: make .* by --no-peers"):
        peers.check()


@pytest.mark.full
def test_nothing_begins_without_peers_but_by_an_option(tmp_path: Path) -> None:
    command = module_command("cold_start", "--out", tmp_path)
    done = subprocess.run(
        command,
        env={**os.environ, cold_peers.VARIABLE: str(tmp_path / "nothing")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "error: boto3-safetensors" in done.stderr and not list(tmp_path.iterdir())


def test_what_an_environment_has_is_asked_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cold_peers.VARIABLE, str(tmp_path))
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()

    def has(versions: dict[str, str]) -> Peers:
        python.write_text(f"#!/bin/sh\necho '{json.dumps(versions)}'\n")
        python.chmod(0o755)
        return Peers()

    peers = has({"boto3": "1.2"})
    assert peers.versions == {"boto3": "1.2"}
    assert {"boto3-torch", "boto3-safetensors"} <= set(peers.ways())
    assert peers.lacks(WAYS["tensorizer"]) == ("tensorizer",)
    assert Peers(without=True).versions == {}
    every = {package: "1.0" for way in WAYS.values() for package in way.needs}
    ours = importlib.metadata.version("torch")
    has({**every, "torch": ours}).check()
    with pytest.raises(Failed, match=r"has torch 1\.0\+other, and ours is"):
        has({**every, "torch": "1.0+other"}).check()
    python.write_text("#!/bin/sh\necho it is broken >&2; exit 3\n")
    with pytest.raises(Failed, match="it is broken"):
        Peers()


def test_the_environment_is_made_with_the_same_build_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_peers, "_torch", lambda: "2.0.0+cpu")
    assert "'torch==2.0.0+cpu'" in Peers(without=True).hint()


def test_one_host_has_no_link() -> None:
    with pytest.raises(Failed, match="no link"):
        Local().shape(1e6)


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cold_start.parsed([]).only == [""]
    assert cold_start.parsed(["--only", "gpt2", "bert", "--repeats", "3"]).repeats == 3
    with pytest.raises(SystemExit):
        cold_start.parsed(["--repeats", "0"])
    assert "at least 1" in capsys.readouterr().err
