"""Check that whatever needs a package of an extra names the extra where it is missing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.pipeline.making import encoded, pixels, write
from upriver.cli import main
from upriver.errors import ServerUnavailable
from upriver.extras import DEMO, SERVER
from upriver.rpc.local_server import EmbeddedServer

EXTRAS = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
BROUGHT = (*DEMO, "ray", "opentelemetry", "timm", "transformers", "scipy", "pynvml")
"""Packages that a base install does not have."""


def brought_by(extra: str) -> set[str]:
    """Return the distributions that an extra names, and those of the extras that it names."""
    found = set[str]()
    for text in EXTRAS[extra]:
        name, of_ours = re.fullmatch(r"([a-z-]+)(?:\[([^\]]*)\])?.*", text).groups()  # type: ignore[union-attr]
        found |= {name} if name != "upriver" else set().union(*map(brought_by, of_ours.split(",")))
    return found


@pytest.mark.parametrize(("extra", "packages"), [("server", SERVER), ("demo", DEMO)])
def test_packages_of_an_extra_are_those_that_it_brings(extra: str, packages: tuple[str, ...]) -> None:
    distributions = packages_distributions()
    assert {distributions[package][0].replace("_", "-") for package in packages} == brought_by(extra)


@pytest.mark.parametrize(
    ("arguments", "missing", "told"),
    [
        (["serve"], "starlette", "upriver serve needs starlette|server"),
        (
            ["serve", "--store", "{folder}"],
            "prometheus_client",
            "upriver serve needs prometheus_client|server",
        ),
        (["worker"], "uvicorn", "upriver worker needs uvicorn|server"),
        (["serve", "--store", "{folder}", "--engine", "ray"], "ray", "--engine ray needs ray|ray"),
        (
            ["serve", "--config", "{folder}/traced.toml"],
            "opentelemetry.sdk.resources",
            "a trace endpoint needs|trace",
        ),
        (["demo"], "skimage", "upriver demo needs skimage|demo"),
        (["calibrate"], "scipy", "calibration needs scipy|calibrate"),
        (["cuts", "torchvision:alexnet"], "torchvision", "a torchvision: model needs torchvision|vision"),
        (
            ["push", "transformers:bert", "{folder}"],
            "transformers",
            "a transformers: model needs transformers|models",
        ),
        (["plan", "--plot", "x.png"], "matplotlib", "--plot needs matplotlib|plot"),
        (["cuts", "torchvision:alexnet", "--plot", "x.png"], "matplotlib", "--plot needs matplotlib|plot"),
        (
            ["diff", "torchvision:alexnet", "--against-threads", "1", "--plot", "x.png"],
            "matplotlib",
            "--plot needs matplotlib|plot",
        ),
    ],
)
def test_command_without_its_extra_names_it(
    arguments: list[str],
    missing: str,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced = f'trace_endpoint = "http://127.0.0.1:4318"\n[stores]\ndefault = "{tmp_path}"\n'
    (tmp_path / "traced.toml").write_text(traced)
    monkeypatch.setitem(sys.modules, missing, None)
    assert main([each.format(folder=tmp_path) for each in arguments]) == 2
    what, extra = told.split("|")
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(f"error: {what}") and printed.err.count("\n") == 1
    assert printed.err.endswith(f", which is not installed: pip install 'upriver[{extra}]'\n")


def test_embedded_server_without_its_extra_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httptools", None)
    told = r"\(upriver {}\) needs httptools, which is not installed: pip install 'upriver\[server\]'"
    with pytest.raises(ServerUnavailable, match=told.format("serve")):
        EmbeddedServer.start({"default": tmp_path.as_uri()})
    with pytest.raises(ServerUnavailable, match=told.format("worker")):
        EmbeddedServer.start_worker(["json"])


def test_base_install_indexes_trains_and_loads(tmp_path: Path) -> None:
    """A job without a server goes on alone, and its plan names the extra."""
    uri = write(
        tmp_path, {f"{'ab'[each % 2]}/{each}.jpg": encoded(pixels(12, 12, each)) for each in range(4)}
    )
    code = f"""if True:
        import sys
        for name in {BROUGHT!r}:
            sys.modules[name] = None
        import torch, upriver
        from torch import nn
        from upriver.cli import main
        assert main(["token", "--json"]) == 0
        data = upriver.index({uri!r}, stages=[upriver.Decode(), upriver.Resize((8, 8)), upriver.Normalize()])
        assert len(list(upriver.DataLoader(data, batch_size=2))) == 2
        model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 2))
        model[0].requires_grad_(False)
        with upriver.connect() as near, near.finetune(model, data, batch_size=2, micro_batch=2) as job:
            for features, targets in job:
                nn.functional.cross_entropy(job(features), targets).backward()
            print(job.plan.why)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    token, why = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
    assert json.loads(token) and "pip install 'upriver[server]'" in why
