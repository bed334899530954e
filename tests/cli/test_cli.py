"""Test the promises of every command: exit codes, one-line errors, one JSON document, a fast --help."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.examples import some
from tests.pipeline.making import tone, wav, write
from upriver.cli import main
from upriver.cli.app import app
from upriver.cli.common import emit

COMMANDS = (
    "demo",
    "index",
    "push",
    "cuts",
    "diff",
    "calibrate",
    "plan",
    "infer",
    "coldstart",
    "serve",
    "gc",
    "token",
    "train",
    "worker",
)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Make class folders of tiny images."""
    rng = np.random.default_rng(0)
    for number in range(6):
        folder = tmp_path / "photos" / ("cat" if number % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line of stderr; stdout must be empty."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_help_lists_every_command_and_loads_no_torch() -> None:
    code = (
        "import sys, upriver.cli as cli; status = cli.main(['--help']); print('torch' in sys.modules, status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False 0\n")
    for command in COMMANDS:
        assert f"\n  {command} " in done.stdout


def test_ctrl_c_while_commands_are_imported_says_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


_INTERRUPTED = """
import signal, sys
import upriver.cli

class Interrupts:
    def find_spec(self, name, *_):
        if name == "upriver.cli.push":
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores for what runs behind it
sys.meta_path.insert(0, Interrupts())
sys.exit(upriver.cli.main(["--version"]))
"""


def test_module_and_script_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "upriver", "--version"], capture_output=True, text=True, check=True
    )
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == done.stdout


def test_every_command_takes_json_and_debug() -> None:
    for command in app.registered_commands:
        assert command.callback is not None
        assert {"as_json", "debug"} <= set(command.callback.__annotations__), command.name
    assert {command.name for command in app.registered_commands} == set(COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["bogus"], "bogus"),
        (["index"], "uri"),
        (["index", "ftp://x"], "ftp://x"),
        (["index", "file:///does/not/exist"], "/does/not/exist"),
        (["index", "file:///tmp", "--stages", "nonsense"], "nonsense"),
        (["index", "s3://bucket", "--option", "endpoint"], "endpoint"),
        (["cuts", "resnet18"], "resnet18"),
        (["cuts", "torchvision:resnet1818"], "resnet18"),
        (["cuts", "no.such.module:thing"], "no"),
        (["cuts", "torchvision:resnet18", "--freeze-to", "layer9"], "layer9"),
        (["cuts", "torchvision:resnet18", "--micro-batch", "0"], "micro_batch"),
        (["cuts", "torchvision:resnet18", "--input-shape", "3,x"], "3,x"),
        (["push", "torchvision:resnet18", "file:///tmp", "--micro-batch", "0"], "--micro-batch"),
        (["serve"], "--store"),
        (["gc", "file:///tmp", "--older-than", "soon"], "12h, 30d or 8w"),
        (["gc", "file:///tmp", "--older-than", "1h"], "last 4 hours"),
        (["gc", "file:///tmp", "--tenant", "nobody"], "nobody"),
        (["gc", "file:///tmp", "--shared", "--digest", "x"], "digest"),
        (["serve", "--store", "a=file:///a", "--store", "a=file:///b"], "'a'"),
        (["serve", "--store", "file:///tmp", "--port", "70000"], "70000"),
        (["serve", "--store", "file:///tmp", "--token-file", "/does/not/exist"], "/does/not/exist"),
        (["serve", "--store", "file:///tmp", "--config", "/does/not/exist.toml"], "/does/not/exist.toml"),
        (["serve", "--store", "file:///tmp", "--parent-pipe", "987"], "987"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert named in error_line(capsys)


def test_package_that_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upriver.program.models.registry.importlib.util.find_spec", lambda name: None)
    assert main(["cuts", "timm:vit_base_patch16_224"]) == 2
    told = "error: a timm: model needs timm, which is not installed: pip install 'upriver[models]'\n"
    assert error_line(capsys) == told


def test_unexpected_error_is_one_line_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_arguments: object, **_options: object) -> None:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr("upriver.program.models.registry.load_model", broken)
    assert main(["cuts", "torchvision:resnet18"]) == 1
    assert "ZeroDivisionError: two lines" in error_line(capsys)
    assert main(["cuts", "torchvision:resnet18", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("def model():\n    raise ZeroDivisionError('two\\nlines')\n", "broken_models:model raised Zero"),
        ("def model():\n    raise SystemExit(3)\n", "broken_models:model raised SystemExit"),
        ("def model(size):\n    pass\n", "broken_models:model raised TypeError"),
        ("import nowhere_at_all\n", "cannot be imported: No module named 'nowhere_at_all'"),
        ("def model(:\n", "cannot be imported: SyntaxError"),
    ],
)
def test_a_model_that_cannot_be_made_is_bad_input(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    named: str,
) -> None:
    (tmp_path / "broken_models.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_models", raising=False)
    assert main(["cuts", "broken_models:model"]) == 2
    assert named in error_line(capsys)


def test_what_a_model_prints_while_it_is_made_stays_out_of_the_result(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "noisy_models.py").write_text(
        "import torch\nprint('one')\n\n\ndef model():\n    print('two')\n"
        "    return torch.nn.Linear(4, 2), torch.ones(2, 4)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["cuts", "noisy_models:model", "--json"]) == 0
    assert [row["cut"] for row in json.loads(capsys.readouterr().out)] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "status", "code", "named"),
    [
        (["index", "ftp://x"], 2, "bad_config", "ftp://x"),
        (["index", "file:///does/not/exist"], 2, "store", "/does/not/exist"),
        (["index"], 2, "bad_command", "uri"),
        (["cuts", "broken_models:model"], 2, "bad_model", "ZeroDivisionError: two lines"),
    ],
)
def test_with_json_an_error_is_the_one_document(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    code: str,
    named: str,
) -> None:
    (tmp_path / "broken_models.py").write_text("def model():\n    raise ZeroDivisionError('two\\nlines')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main([*arguments, "--json"]) == status
    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"]
    assert error["code"] == code
    assert named.lower() in error["message"].lower()
    assert captured.err.startswith(f"error: {error['message']}")
    assert captured.err.count("\n") == 1


def test_what_is_no_finite_number_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    losses = (float("nan"), 1.5, float("-inf"))
    document = {
        "losses": losses,
        "rows": [{"loss": float("inf"), "bytes": 10**400, "name": "NaN", "ok": True}],
    }
    emit(document, as_json=True, text=lambda: pytest.fail("for people"))
    printed = capsys.readouterr().out
    assert json.loads(printed, parse_constant=lambda name: pytest.fail(name)) == {
        "losses": [None, 1.5, None],
        "rows": [{"loss": None, "bytes": 10**400, "name": "NaN", "ok": True}],
    }
    assert losses[2] == float("-inf")


def test_the_package_lists_its_names() -> None:
    code = "import upriver, sys; print(*dir(upriver)); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, torch_loaded = done.stdout.splitlines()
    assert {"connect", "index", "Dataset", "freeze_to", "__version__"} <= set(names.split())
    assert "importlib" not in names.split()
    assert torch_loaded == "False"


def test_interruption_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("upriver.cli.index.store_options", interrupt)
    assert main(["index", "memory://x"]) == 130
    assert "Traceback" not in capsys.readouterr().err


WITHOUT_WORK = [["--help"], ["plan", "--help"], ["--version"]]


@pytest.mark.parametrize("arguments", some(1, WITHOUT_WORK), ids=" ".join)
def test_output_that_cannot_be_written_is_one_line_and_exit_code_2(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "upriver", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (2, "error: cannot write to stdout: No space left on device\n")


@pytest.mark.parametrize("arguments", some(1, WITHOUT_WORK), ids=" ".join)
def test_a_reader_that_has_gone_is_no_error(arguments: list[str]) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "upriver", *arguments], stdout=pipe, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("options", [[], ["--json"]], ids=str)
def test_a_result_that_nobody_takes(
    options: list[str], photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["index", photos.as_uri(), "--path", "photos", *options]
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(arguments) == 2
        assert "cannot write to stdout: No space left" in capsys.readouterr().err
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(arguments) == 141
        assert capsys.readouterr().err == ""


def test_an_error_is_told_where_its_document_cannot_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["index", "ftp://x", "--json"]) == 2
    error = capsys.readouterr().err
    assert "ftp://x" in error and error.count("\n") == 1


def test_unknown_key_in_a_config_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "server.toml"
    config.write_text('hots = "127.0.0.1"\n[stores]\ndefault = "file:///tmp"\n')
    assert main(["serve", "--config", str(config)]) == 2
    line = error_line(capsys)
    assert "hots" in line
    assert "host" in line
    config.write_text("port = ")
    assert main(["serve", "--config", str(config)]) == 2
    assert "server.toml" in error_line(capsys)


def test_index_publishes_what_it_prints(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", photos.as_uri(), "--path", "photos", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["samples"] == 6
    assert document["classes"] == ["cat", "dog"]
    assert document["stages"] == ["decode", "resize", "center_crop", "normalize"]
    published = photos / ".upriver" / "datasets" / document["digest"]
    assert {path.name for path in published.iterdir()} == {"index.parquet", "chain.json"}

    assert main(["index", photos.as_uri(), "--path", "photos"]) == 0
    assert document["digest"] in capsys.readouterr().out


def test_index_takes_a_folder_by_its_path(
    photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos.parent)
    documents = []
    for place in (photos.as_uri(), f"./{photos.name}"):
        assert main(["index", place, "--path", "photos", "--json"]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    assert documents[0] == documents[1]
    assert main(["index", "./phtos"]) == 2
    assert f"'{photos.parent}/phtos' of store" in error_line(capsys)


def test_stages_from_a_file_may_leave_defaults_out(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = photos / "stages.toml"
    stages.write_text('[[stage]]\nstage = "decode"\n[[stage]]\nstage = "center_crop"\nsize = 16\n')
    assert main(["index", photos.as_uri(), "--path", "photos", "--stages", str(stages), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"] == ["decode", "center_crop"]
    stages.write_text('[[stage]]\nstage = "sharpen"\n')
    assert main(["index", photos.as_uri(), "--path", "photos", "--stages", str(stages)]) == 2
    assert "sharpen" in error_line(capsys)


def test_audio_is_indexed_with_stages_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri, stages = write(tmp_path, {"yes/1.wav": wav(tone(900), rate=8000)}), tmp_path / "stages.toml"
    stages.write_text(
        '[[stage]]\nstage = "decode_wav"\nsample_rate = 8000\n'
        '[[stage]]\nstage = "stft"\nn_fft = 64\nhop = 16\n'
    )
    assert main(["index", uri, "--stages", str(stages), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"] == ["decode_wav", "stft"]
    assert main(["index", uri]) == 2
    assert "it must be decode_wav, with sample_rate 8000" in error_line(capsys)


def test_cuts_of_a_users_own_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_models.py").write_text(
        "from torch import nn\n"
        "def small():\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    command = ["cuts", "own_models:small", "--input-shape", "3,8,8", "--micro-batch", "2", "--freeze-to", "1"]
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["after"] for row in rows] == ["input", "0", "1", "2", "3"]
    assert rows[0]["bytes_per_sample"] == 3 * 8 * 8 * 4
    assert rows[1]["bytes_per_sample"] == 4 * 6 * 6 * 4
    assert rows[1]["param_bytes_before"] == (4 * 3 * 9 + 4) * 4
    assert rows[4]["flops_before"] == 2 * (36 * 4 * 27) + 2 * 144 * 5
    assert [row["legal"] for row in rows] == [True, True, True, False, False]
    assert "'1'" in rows[3]["why_not"]
    assert {row["tensors"] for row in rows} == {1}

    assert main(command) == 0
    assert "freeze point" in capsys.readouterr().out


def test_push_publishes_a_program_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from upriver.program.graph.artifact_store import load
    from upriver.program.models.registry import load_model
    from upriver.store import Store

    (tmp_path / "pushed_models.py").write_text(
        "from torch import nn\n"
        "def small():\n"
        "    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    store_uri = tmp_path.as_uri()
    command = ["push", "pushed_models:small", store_uri, "--input-shape", "3", "--micro-batch", "4"]
    assert main([*command, "--freeze-to", "1", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert "random weights" in captured.err
    assert document["stages"] == 2
    assert (tmp_path / document["graph"]).is_file()
    assert (tmp_path / document["weights"]).is_file()
    program = load(Store.open(store_uri), document["digest"])
    model, spec = load_model("pushed_models:small", input_shape=(3,))
    inputs = spec.example(4)
    assert torch.equal(program.run([inputs], 0, 2)[0], model[:2](inputs))


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "cp1252", "utf-8"])
def test_main_prints_names_that_the_encoding_of_stdout_lacks_as_escapes(
    photos: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    (photos / "photos" / "cat").rename(photos / "photos" / "\u732b")
    printed = io.BytesIO()
    stdout = io.TextIOWrapper(printed, encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stdout)
    assert main(["index", photos.as_uri(), "--path", "photos", "--size", "16"]) == 0
    assert stdout.errors == "strict"
    name = "\u732b" if encoding == "utf-8" else "\\u732b"
    assert f"dog, {name}" in printed.getvalue().decode(encoding)
