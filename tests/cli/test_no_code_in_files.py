"""Test the check for formats that can carry code: it finds what it must, and no more."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "no_code_in_files.py"


@pytest.fixture(scope="module")
def findings() -> Callable[[Path], Iterator[str]]:
    return runpy.run_path(str(SCRIPT))["findings"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "from torch import load",
        "import torch; torch.load('x')",
        "import torch; torch.export.load('x')",
        "import numpy as np; np.load('x', allow_pickle=True)",
        "import numpy as np; np.load('x', allow_pickle=yes)",
        "name = 'model.pt2'",
        "eval('1')",
    ],
)
def test_seen(line: str, findings: Callable[[Path], Iterator[str]], tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(line)
    assert len(list(findings(source))) == 1


@pytest.mark.parametrize(
    "line",
    [
        '"""Never pickle, torch.load or model.pt2"""',
        "model.eval()",
        "import numpy as np; np.load('x', allow_pickle=False)",
        "import json; json.load(file)",
        "# pickle",
    ],
)
def test_not_seen(line: str, findings: Callable[[Path], Iterator[str]], tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(line)
    assert not list(findings(source))


@pytest.mark.parametrize(
    ("folder", "line", "found"),
    [
        ("src/upriver/finetune/preparation", "import pickle, cloudpickle", 0),
        ("src/upriver/finetune/preparation", "import pickle, dill", 1),
        ("src/upriver/finetune/preparation", "import torch; torch.load('x')", 1),
        ("src/upriver/rpc", "import cloudpickle", 1),
    ],
)
def test_one_module_may_pickle_and_nothing_else(
    folder: str, line: str, found: int, findings: Callable[[Path], Iterator[str]], tmp_path: Path
) -> None:
    (tmp_path / folder).mkdir(parents=True)
    source = tmp_path / folder / "snapshot.py"
    source.write_text(line)
    assert len(list(findings(source))) == found


@pytest.mark.full
def test_the_package_is_clean_and_an_empty_directory_is_not_a_pass(tmp_path: Path) -> None:
    main = runpy.run_path(str(SCRIPT))["main"]
    assert main([str(SCRIPT.parents[1] / "src")]) == 0
    assert main([str(tmp_path)]) == 1
