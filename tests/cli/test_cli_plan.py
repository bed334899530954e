"""Test ``upriver plan``: the documents of the contract, every wrong input, atomic file writes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file

from tests.examples import examples, some
from tests.planning import alexnet, cluster, stage
from upriver.cli import main
from upriver.cli.options import parse_sweep
from upriver.cli.output import write_whole
from upriver.cli.train.checkpoint import save_tensors
from upriver.errors import ConfigError, StoreError
from upriver.policies import POLICIES, REQUEST_POLICIES
from upriver.profile import cluster_from_json, cluster_to_json, profile_from_json, profile_to_json
from upriver.report.plan import to_dict
from upriver.text import parse_rate, rate_text
from upriver.types import Cluster, ComputeTier, Link, StorageTier, Workload

EPOCH = Workload(batch_size=1000, num_samples=10_000)
ROWS = {"cut", "feasible", "why_not", "bytes", "storage_s", "network_s", "compute_s", "epoch_s"}

Files = list[str]
Run = Callable[..., tuple[int, str, str]]


def no_memory() -> Cluster:
    return replace(cluster(), compute=ComputeTier(memory_bytes=1000), storage=StorageTier(memory_bytes=0))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Write a profile and a cluster; return them as arguments."""
    return written(tmp_path, cluster(concurrency=4))


def written(folder: Path, machines: Cluster) -> Files:
    (folder / "p.json").write_text(profile_to_json(alexnet(storage_s=6e-5)))
    (folder / "c.json").write_text(cluster_to_json(machines))
    return [
        *("--profile", str(folder / "p.json"), "--cluster", str(folder / "c.json")),
        *("--batch-size", str(EPOCH.batch_size), "--num-samples", str(EPOCH.num_samples)),
    ]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def plan(*arguments: str) -> tuple[int, str, str]:
        status = main(["plan", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return plan


def refused(run: Run, *arguments: str) -> str:
    """Return the one line of the error."""
    status, out, err = run(*arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    return err


# ------------------------------------------------------------------------------------ the documents


@pytest.mark.parametrize("policy", POLICIES)
def test_one_policy_answers_the_document_of_its_plan(policy: str, files: Files, run: Run) -> None:
    status, out, err = run(*files, "--policy", policy, "--json")
    document = json.loads(out)
    assert (status, err) == (0, "")
    question = (profile_from_json(Path(files[1]).read_text()), cluster_from_json(Path(files[3]).read_text()))
    assert document == json.loads(json.dumps(to_dict(POLICIES[policy](*question, EPOCH))))
    assert list(document) == ["policy", "feasible", "cut", "shares", "routes", "predicted", "table"]
    assert [set(row) for row in document["table"]] == [ROWS] * 18


def test_all_policies_answer_under_their_names(files: Files, run: Run) -> None:
    status, out, _ = run(*files, "--json")
    plans = json.loads(out)["plans"]
    assert status == 0
    assert list(plans) == list(POLICIES)
    for policy, plan in plans.items():
        assert plan == json.loads(run(*files, "--policy", policy, "--json")[1])


@pytest.mark.parametrize("policy", REQUEST_POLICIES)
def test_a_policy_for_one_request_answers_the_document_of_its_plan(
    policy: str, files: Files, run: Run
) -> None:
    status, out, err = run(*files, "--policy", policy, "--json")
    document = json.loads(out)
    assert (status, err) == (0, "")
    question = (profile_from_json(Path(files[1]).read_text()), cluster_from_json(Path(files[3]).read_text()))
    assert document == json.loads(json.dumps(to_dict(REQUEST_POLICIES[policy](*question, EPOCH))))
    assert list(document) == ["policy", "feasible", "cut", "shares", "routes", "predicted", "table"]
    assert [set(row) for row in document["table"]] == [ROWS] * 22, "also behind the freeze point"


def test_a_request_by_files_alone(tmp_path: Path, run: Run) -> None:
    """A slow link keeps the work on the device, a fast one sends the input, a busy server sends it back."""
    link = {"bandwidth_bytes_per_s": 1.25e8, "rtt_s": 0.0, "download_bytes_per_s": 1e6}
    machines = {"schema": "upriver.cluster/1", "link": link, "compute": {"memory_bytes": None}}
    machines["compute"]["seconds_per_byte"] = {"decode": 0.0, "encode": 1e-9}
    storage = {"memory_bytes": None, "concurrency": 1, "micro_batch": 16, "load": 1.0, "wait_s": 0.001}
    machines["storage"] = {**storage, "seconds_per_byte": {"encode": 0.0, "decode": 1e-9}}
    arguments = written(tmp_path, cluster())
    (tmp_path / "p.json").write_text(profile_to_json(alexnet(storage_s=1e-3, compute_s=40e-3)))

    def segments(policy: str, rate: float, load: float) -> list[tuple[str, int, int]]:
        machines["link"] = {**link, "bandwidth_bytes_per_s": rate}
        machines["storage"]["load"] = load
        (tmp_path / "c.json").write_text(json.dumps(machines))
        status, out, _ = run(*arguments, "--policy", policy, "--json")
        assert status == 0
        (route,) = json.loads(out)["routes"]
        return [(each["tier"], each["start"], each["stop"]) for each in route["segments"]]

    for policy in REQUEST_POLICIES:
        assert segments(policy, 1e3, 1) == [("compute", 0, 21)]
        assert segments(policy, 1e9, 1) == [("storage", 0, 21)]
        assert segments(policy, 1e9, 100) == [("compute", 0, 21)]
        assert segments(policy, 125e3, 1) == [("compute", 0, 16), ("storage", 16, 21)]


@pytest.mark.full
def test_people_are_told_of_a_request(files: Files, run: Run, tmp_path: Path) -> None:
    picture, page = tmp_path / "cuts.png", tmp_path / "page.html"
    sweep = ("--sweep", "bandwidth=1Mbit..1Gbit", "--plot", str(picture), "--html", str(page))
    status, out, err = run(*files, "--policy", "inference", *sweep)
    assert status == 0 and "written" in err
    assert "request s" in out and "answers are free to fetch" in out and "epoch s" not in out
    assert "all on the server" in out or "the device alone" in out
    assert picture.stat().st_size > 10_000 and page.stat().st_size > 10_000


def test_a_model_alone_is_no_device_and_server(run: Run) -> None:
    said = refused(run, "--model", "torchvision:alexnet", "--bandwidth", "1Mbit", "--policy", "loadpart")
    assert "loadpart plans from files: --profile P.json" in said


@pytest.mark.full
def test_a_choice_that_does_not_fit_is_printed_and_is_no_success(tmp_path: Path, run: Run) -> None:
    files = written(tmp_path, no_memory())
    for policy in POLICIES:
        status, out, err = run(*files, "--policy", policy, "--json")
        document = json.loads(out)
        assert status == 1
        assert (document["feasible"], document["predicted"]) == (False, None)
        assert err.startswith(f"error: policy {policy}: ") and err.count("\n") == 1
        assert "memory is short by " in err and "has 1 kB" in err
    assert run(*files, "--policy", "min")[0] == 1


def test_what_none_fits_is_an_answer_to_what_each_would_choose(tmp_path: Path, run: Run) -> None:
    status, out, err = run(*written(tmp_path, no_memory()), "--json")
    assert status == 0
    assert not any(plan["feasible"] for plan in json.loads(out)["plans"].values())
    assert "no policy has a plan that fits" in err and "memory is short by" in err


def test_some_that_fit_are_enough_for_all(tmp_path: Path, run: Run) -> None:
    machines = replace(cluster(), compute=ComputeTier(memory_bytes=1.2e9))
    status, out, err = run(*written(tmp_path, machines))
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert next(line for line in lines if line.startswith("nosplit ")).split()[1:4] == ["does", "not", "fit"]
    assert next(line for line in lines if line.startswith("hapi ")).split()[1] == "13"


def test_people_get_the_table_and_the_reasons(files: Files, run: Run) -> None:
    status, out, err = run(*files, "--sweep", "bandwidth=1Mbit..10Gbit")
    assert (status, err) == (0, "")
    for name in POLICIES:
        assert f"{name}: " in out
    assert "1 Gbit/s" in out and "602 kB each as stored" in out
    assert "chosen cut" in out and "predicted seconds of one epoch" in out
    assert max(map(len, out.splitlines())) <= 130


def test_a_bandwidth_wins_over_the_files(files: Files, run: Run) -> None:
    slow = json.loads(run(*files, "--policy", "hapi", "--bandwidth", "10kbit", "--json")[1])
    files[3] = str(Path(files[3]).with_name("slow.json"))
    Path(files[3]).write_text(cluster_to_json(cluster(1250.0, concurrency=4)))
    assert slow == json.loads(run(*files, "--policy", "hapi", "--json")[1])
    assert slow["cut"] == 16


# ------------------------------------------------------------------------------------------- sweeps


@pytest.mark.full
def test_a_sweep_is_the_plans_at_each_bandwidth(files: Files, run: Run) -> None:
    document = json.loads(run(*files, "--sweep", "bandwidth=100Mbit,1Gbit", "--json")[1])
    assert list(document) == ["plans", "sweep"]
    assert document["sweep"]["parameter"] == "bandwidth_bytes_per_s"
    points = document["sweep"]["points"]
    assert [point["bandwidth_bytes_per_s"] for point in points] == [12.5e6, 125e6]
    for point in points:
        rate = f"{point['bandwidth_bytes_per_s']}B"
        assert list(point["plans"]) == list(POLICIES)
        for policy, choice in point["plans"].items():
            plan = json.loads(run(*files, "--policy", policy, "--bandwidth", rate, "--json")[1])
            assert choice == {name: plan[name] for name in ("feasible", "cut", "shares", "predicted")}


def test_a_sweep_of_one_policy_stands_beside_its_plan(files: Files, run: Run) -> None:
    document = json.loads(run(*files, "--policy", "hapi", "--sweep", "bandwidth=1MB..2MB", "--json")[1])
    assert document["policy"] == "hapi" and len(document["sweep"]["points"]) == 13
    assert all(list(point["plans"]) == ["hapi"] for point in document["sweep"]["points"])


@given(first=st.integers(1, 10**6), factor=st.floats(1.001, 1e6))
def test_points_of_a_range_are_equally_far_apart(first: int, factor: float) -> None:
    last = first * factor
    points = parse_sweep(f"bandwidth={first}kB..{last:.6f}kB")
    assert points[0] == first * 1e3
    assert points[-1] == pytest.approx(last * 1e3)
    steps = [b / a for a, b in pairwise(points)]
    assert steps == pytest.approx([steps[0]] * 12)
    assert steps[0] > 1


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("50Mbit", 6.25e6),
        ("12Gbit", 1.5e9),
        ("1.5 Gbit/s", 1.875e8),
        ("10MB", 1e7),
        ("800kbit", 1e5),
        ("8bit", 1.0),
        (".5GB/s", 5e8),
    ],
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == rate
    assert parse_rate(rate_text(rate)) == pytest.approx(rate, rel=5e-3)


@pytest.mark.full
@given(st.text(max_size=12))
@settings(max_examples=examples(300))
def test_a_text_is_a_rate_or_is_refused(text: str) -> None:
    try:
        assert 0 < parse_rate(text) < float("inf")
    except ValueError as error:
        assert "50Mbit" in str(error)


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--policy", "best"], "one of nosplit, freeze, min"),
        (["--policy", "best"], "or all, got 'best'"),
        (["--batch-size", "0"], "batch_size"),
        (["--num-samples", "-3"], "num_samples"),
        (["--num-samples", "9" * 400], "num_samples"),
        (["--bandwidth", "50"], "--bandwidth: a rate is"),
        (["--bandwidth", "50Mb"], "'50Mb'"),
        (["--bandwidth", "0Mbit"], "above 0"),
        (["--bandwidth", "nanMbit"], "nanMbit"),
        (["--bandwidth", "9" * 400 + "Mbit"], "above 0"),
        (["--sweep", "latency=1..2"], "--sweep must be bandwidth=A..B"),
        (["--sweep", "bandwidth="], "--sweep must be"),
        (["--sweep", "bandwidth=1Mbit..1Mbit"], "lower to a higher"),
        (["--sweep", "bandwidth=2Mbit..1Mbit"], "lower to a higher"),
        (["--sweep", "bandwidth=1Mbit,,2Mbit"], "--sweep: a rate"),
        (["--sweep", "bandwidth=" + ",".join(["1Mbit"] * 201)], "at most 200"),
        (["--plot", "plan.gif"], "plan.gif"),
        (["--plot", "/does/not/exist/plan.png"], "/does/not/exist"),
        (["--plot", "/dev/full"], "/dev/full"),
        (["--html", "/does/not/exist/plan.html"], "/does/not/exist"),
        (["--html", "/tmp"], "directory /tmp"),
        (["--html", "/dev/full"], "cannot write /dev/full: No space left"),
        (["--save-profile", "/dev/full"], "cannot write /dev/full"),
        (["--save-cluster", "/does/not/exist/c.json"], "/does/not/exist"),
        (["--html", "same", "--save-cluster", "./same"], "name one file"),
        (["--freeze-to", "features"], "--freeze-to would not count with --profile"),
        (["--model", "torchvision:alexnet"], "--profile P.json or from --model NAME, not both"),
        (
            ["--bandwidth", "1001TB"],
            "--bandwidth in bytes per second must be a finite number > 0 and <= 1e+15",
        ),
        (["--sweep", "bandwidth=1Mbit..1001TB"], "--sweep in bytes per second must be a finite number"),
        (["--profile", "/does/not/exist.json"], "cannot read /does/not/exist.json: No such file"),
        (["--profile", "/tmp"], "cannot read /tmp: Is a directory"),
        (["--cluster", "/dev/null"], "/dev/null: not a valid upriver.cluster/1 file"),
        (["--bogus"], "--bogus"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], named: str, files: Files, run: Run) -> None:
    assert named in refused(run, *files, *arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--profile P.json and --cluster C.json, or from --model NAME"),
        (["--profile", "p.json"], "--profile goes with --cluster"),
        (["--cluster", "c.json"], "or from --model NAME"),
        (["--model", "torchvision:alexnet"], "--model goes with --bandwidth RATE"),
        (["--model", "torchvision:alexnet", "--bandwidth", "1Gbit", "--micro-batch", "0"], "micro_batch"),
        (["--model", "torchvision:alexnet", "--bandwidth", "1Gbit", "--stored-bytes", "nan"], "stored_bytes"),
        (["--model", "torchvision:alexnet", "--bandwidth", "1Gbit"], "--freeze-to MODULE"),
        (["--model", "torchvision:none", "--bandwidth", "1Gbit"], "no model 'none'"),
        (["--model", "torchvision:alexnet", "--bandwidth", "1Gbit", "--freeze-to", "x"], "no module 'x'"),
        (["--model", "torchvision:alexnet", "--bandwidth", "1Gbit", "--autocast", "int8"], "int8"),
    ],
)
def test_what_is_missing_is_named(arguments: list[str], named: str, run: Run) -> None:
    assert named in refused(run, *arguments)


def changed(path: Path, change: Callable[[Any], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d["stages"][3].update(out_bytes=float("nan")), "stages[stage4].out_bytes"),
        (lambda d: d["stages"][3]["seconds"].update(storage=[float("inf"), 0]), "seconds.storage"),
        (lambda d: d["stages"][3].update(param_bytes=-1), "param_bytes"),
        (lambda d: d["stages"][3].update(colour="red"), "colour"),
        (lambda d: d.pop("freeze"), "freeze"),
        (lambda d: d.update(freeze=22), "freeze"),
        (lambda d: d.update(schema="upriver.profile/2"), "upriver.profile/2"),
        (
            lambda d: d["stages"][2]["seconds"].update(compute=[1e308, 1e308]),
            "seconds.compute must be a finite",
        ),
        (
            lambda d: d["stages"][0].update(peak_bytes=1e308),
            "stages[stage1].peak_bytes must be a finite number",
        ),
        (lambda d: d.update(model="\x1b[31m", freeze=99), "freeze"),
    ],
)
def test_a_wrong_profile_names_the_file_and_the_field(
    change: Callable[[Any], object], named: str, files: Files, run: Run
) -> None:
    changed(Path(files[1]), change)
    line = refused(run, *files)
    assert named in line
    assert "p.json: " in line


def test_numbers_that_are_too_large_only_together_are_refused(files: Files, run: Run) -> None:
    changed(Path(files[3]), lambda d: d["link"].update(bandwidth_bytes_per_s=5e-324))
    assert "are more than a number can hold" in refused(run, *files)


def whole(folder: Path) -> Files:
    """Write a profile and a cluster in which every field is set."""
    profile = replace(
        alexnet(),
        stages=alexnet().stages[:1],
        freeze=1,
        input_stages=(stage("decode", 602112, flops=7.0),),
        model_load_s={"storage": 0.5, "compute": 0.5},
    )
    machines = replace(
        cluster(
            memory_bytes=1e9,
            concurrency=4,
            reuse_model=False,
            request_samples=64,
            wait_s=0.01,
            seconds_per_byte={"read": 1e-9, "move": 2e-9, "encode": 3e-9, "decode": 1e-9},
        ),
        link=Link(bandwidth_bytes_per_s=125e6, rtt_s=0.001, download_bytes_per_s=1e6),
        compute=ComputeTier(
            memory_bytes=1e9,
            micro_batch=8,
            concurrency=2,
            seconds_per_byte={"decode": 1e-9, "move": 1e-9, "encode": 1e-9},
        ),
    )
    (folder / "p.json").write_text(profile_to_json(profile))
    (folder / "c.json").write_text(cluster_to_json(machines))
    return ["--profile", str(folder / "p.json"), "--cluster", str(folder / "c.json")]


def places(value: Any, *path: str | int) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of a document's numbers."""
    if isinstance(value, dict | list):
        for key, held in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(held, *path, key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


ABSURD = (
    "1e308",
    "1e400",
    "1" + "0" * 400,
    "1" + "0" * 5000,
    "Infinity",
    "NaN",
    "-1",
    '"x"',
    "null",
    "[]",
    "true",
)


def complaint(read: Callable[[str], object], text: str) -> str:
    """Return the reason that the text cannot be read; empty where it can."""
    try:
        read(text)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("index", "read"), some(1, [(1, profile_from_json), (3, cluster_from_json)]))
def test_an_absurd_number_is_refused_wherever_it_stands(
    index: int, read: Callable[[str], object], tmp_path: Path, run: Run
) -> None:
    """The reader or else the command refuses it; the command gets one such number at each place."""
    files = whole(tmp_path)
    path, original = Path(files[index]), json.loads(Path(files[index]).read_text())
    found = list(places(original))
    assert len(found) == {1: 25, 3: 19}[index]
    may_be_null = {
        ("storage", "memory_bytes"),
        ("compute", "memory_bytes"),
        ("compute", "micro_batch"),
        ("link", "download_bytes_per_s"),
    }
    for number, (*parents, last) in enumerate(found):
        names = {str(part) for part in (*parents[-2:], last) if isinstance(part, str)}
        for text in ABSURD:
            document = json.loads(json.dumps(original))
            place = document
            for part in parents:
                place = place[part]
            place[last] = "HERE"
            path.write_text(json.dumps(document).replace('"HERE"', text))
            if text == "null" and (*parents, last) in may_be_null:
                assert run(*files)[0] == 0
                continue
            said = complaint(read, path.read_text())
            if not said or text == ABSURD[number % len(ABSURD)]:
                said = refused(run, *files)
                assert f"{path.name}: " in said
            assert any(name in said for name in names), (names, said)
            assert "must be a finite number" in said or "must lie in" in said or "Expected" in said


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1, 2]", b"\xff\xfe", b"[" * 100_000, b'{"schema": "upriver.profile/1"}', b"NaN"]
)
def test_what_is_no_profile_is_refused(content: bytes, files: Files, run: Run) -> None:
    Path(files[1]).write_bytes(content)
    assert "p.json" in refused(run, *files)


@pytest.mark.filterwarnings("error")
def test_names_from_files_cannot_write_to_the_terminal(files: Files, run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    def rename(document: Any) -> None:
        document["model"] = "evil\x1b[2J\ud800\n$\\frac{"
        document["stages"][12]["name"] = "x\x1b]0;\x07\ud800\n$\\sum_$"
        document["stages"][11]["name"] = "层"

    changed(Path(files[1]), rename)
    picture = tmp_path / "plan.png"
    status, out, err = run(*files, "--plot", str(picture), "--html", str(tmp_path / "plan.html"))
    assert status == 0
    assert "\x1b" not in out + err + (tmp_path / "plan.html").read_text()
    assert "evil?[2J??$" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


# --------------------------------------------------------------------------------------- the output


@pytest.mark.parametrize("options", [[], ["--json"], ["--sweep", "bandwidth=1MB..2MB"]], ids=str)
def test_a_result_that_cannot_be_written_is_one_line(
    options: list[str], files: Files, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert refused(run, *files, *options) == "error: cannot write to stdout: No space left on device\n"
        assert sys.stdout is full


# ---------------------------------------------------------------------------------------- the files


def test_everything_is_written(files: Files, run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    before = set(tmp_path.iterdir())
    names = {"--plot": "a.png", "--html": "a.html", "--save-profile": "p2.json", "--save-cluster": "c2.json"}
    arguments = [part for option, name in names.items() for part in (option, str(tmp_path / name))]
    status, out, err = run(*files, *arguments, "--sweep", "bandwidth=50Mbit..12Gbit", "--json")
    assert status == 0 and list(json.loads(out)) == ["plans", "sweep"]
    assert f"written: {tmp_path / 'a.png'}" in err
    assert set(tmp_path.iterdir()) - before == {tmp_path / name for name in names.values()}
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.html").read_text().startswith("<!DOCTYPE html>")
    again = ["--profile", str(tmp_path / "p2.json"), "--cluster", str(tmp_path / "c2.json"), *files[4:]]
    assert run(*again, "--json")[1] == run(*files, "--json")[1]


def test_a_file_that_cannot_be_finished_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "old").write_bytes(b"before")
    monkeypatch.setattr("upriver.cli.output.os.replace", full)
    for name in ("old", "new"):
        with pytest.raises(StoreError, match=f"cannot write .*{name}: No space left"):
            write_whole(tmp_path / name, b"after")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"old": b"before"}


def test_an_interruption_leaves_no_file_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    for write in (
        lambda path: write_whole(path, b"content"),
        lambda path: save_tensors(path, {"a": torch.ones(2)}),
    ):
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "file")
        assert list(tmp_path.iterdir()) == []


def test_a_link_and_the_rights_of_a_file_stay(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"before")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", b"after")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"after"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o640
    write_whole(Path(os.devnull), b"gone")
    assert Path(os.devnull).is_char_device()


def test_so_it_is_with_tensors(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"before")
    (tmp_path / "link").symlink_to("real")
    save_tensors(tmp_path / "link", {"a": torch.ones(2)})
    assert (tmp_path / "link").is_symlink()
    assert torch.equal(load_file(tmp_path / "real")["a"], torch.ones(2))
    full = tmp_path / "full"
    os.mkfifo(full)
    reader = os.open(full, os.O_RDONLY | os.O_NONBLOCK)
    save_tensors(full, {"a": torch.ones(2)})
    assert full.is_fifo()
    assert torch.equal(load(os.read(reader, 1 << 16))["a"], torch.ones(2))
    os.close(reader)


# ---------------------------------------------------------------------------------------- the model

OWN = """
from torch import nn

def net():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Flatten(),
        nn.Linear(8 * 16, 5),
    )

def whole():
    return nn.Sequential(Branch(), nn.Linear(6, 2))

class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return self.inner(x * 2 if x.sum() > 0 else x)
"""


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan_models.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own_models")
def test_a_model_is_measured_and_can_be_planned_again_from_files(tmp_path: Path, run: Run) -> None:
    saved = {"--save-profile": str(tmp_path / "p.json"), "--save-cluster": str(tmp_path / "c.json")}
    status, out, err = run(
        *("--model", "plan_models:net", "--input-shape", "3,14,14", "--freeze-to", "4"),
        *("--bandwidth", "1Mbit", "--micro-batch", "8", "--stored-bytes", "500", "--json"),
        *(part for pair in saved.items() for part in pair),
    )
    assert status == 0
    assert "storage tier is taken to be equal to it" in err
    profile = profile_from_json((tmp_path / "p.json").read_text())
    assert [stage.name for stage in profile.stages] == ["0", "1", "2", "3", "4"]
    assert (profile.freeze, profile.input.stored_bytes, profile.input.tensor_bytes) == (
        5,
        500,
        3 * 14 * 14 * 4,
    )
    assert all(stage.seconds["storage"] == stage.seconds["compute"] for stage in profile.stages)
    assert all(sum(stage.seconds["storage"]) > 0 for stage in profile.stages)
    assert sum(profile.tail.seconds) > 0
    machines = cluster_from_json((tmp_path / "c.json").read_text())
    assert machines.link.bandwidth_bytes_per_s == 125_000
    assert machines.storage.memory_bytes == machines.compute.memory_bytes
    assert machines.storage.micro_batch == machines.compute.micro_batch == 8
    again = ["--profile", saved["--save-profile"], "--cluster", saved["--save-cluster"], "--json"]
    assert json.loads(run(*again)[1]) == json.loads(out)


@pytest.mark.usefixtures("own_models")
@pytest.mark.parametrize("given", [pytest.param((), marks=pytest.mark.full), ("--micro-batch", "8")])
def test_a_model_on_the_machines_of_a_file(given: tuple[str, ...], tmp_path: Path, run: Run) -> None:
    machines = cluster(concurrency=4)
    machines = replace(machines, storage=replace(machines.storage, micro_batch=8))
    (tmp_path / "c.json").write_text(cluster_to_json(machines))
    status, out, err = run(
        *("--model", "plan_models:net", "--input-shape", "3,14,14", "--freeze-to", "4", "--json"),
        *("--cluster", str(tmp_path / "c.json"), "--save-profile", str(tmp_path / "p.json"), *given),
    )
    assert status == 0
    assert "memory, rates, load and micro-batch are those of --cluster" in err
    assert "in speed and memory" not in err
    again = ["--profile", str(tmp_path / "p.json"), "--cluster", str(tmp_path / "c.json"), "--json"]
    assert json.loads(run(*again)[1]) == json.loads(out)


@pytest.mark.parametrize(
    ("size", "given", "named"),
    [
        (8, ["--micro-batch", "4"], "--micro-batch 4 would not count with --cluster, which says 8"),
        (65537, [], "c.json: storage.micro_batch must be 1 to 65536, got 65537"),
        (65537, ["--micro-batch", "65537"], "micro_batch must be 1 to 65536"),
    ],
)
def test_the_file_says_the_micro_batch(
    size: int, given: list[str], named: str, tmp_path: Path, run: Run
) -> None:
    machines = replace(cluster(), storage=replace(cluster().storage, micro_batch=size))
    (tmp_path / "c.json").write_text(cluster_to_json(machines))
    files = ["--cluster", str(tmp_path / "c.json")]
    assert named in refused(run, "--model", "torchvision:none", *files, *given)


@pytest.mark.usefixtures("own_models")
def test_a_model_that_cannot_be_cut_is_refused_with_the_reason(run: Run) -> None:
    line = refused(
        run, "--model", "plan_models:whole", "--input-shape", "6", "--freeze-to", "0", "--bandwidth", "1Mbit"
    )
    assert "the model runs unsplit" in line


ROOT = Path(__file__).parents[2]
SHOWN = [
    line.split()[2:]
    for line in (ROOT / "docs" / "planning.md").read_text().splitlines()
    if line.startswith("upriver plan --profile ")
]


@pytest.mark.parametrize("arguments", SHOWN, ids=" ".join)
def test_the_commands_that_the_page_shows(
    arguments: list[str], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    status, out, err = run(*arguments)
    assert status == 0, err
    assert "a mix" in out or len(json.loads(out)["routes"]) > 1
    for name in {"plan.html", "plan.png"} & set(arguments):
        assert (tmp_path / name).stat().st_size > 1000


def test_the_page_shows_some() -> None:
    assert len(SHOWN) == 3
