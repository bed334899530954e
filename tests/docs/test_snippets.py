"""Run every snippet of the README, the start page and the guides."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import place_of
from tests.docs.pages import BadPage, Page, blocks, environment
from upriver._torchvision import ensure_torchvision

ROOT = Path(__file__).parents[2]
OFTEN = ("README.md",)
"""Pages that `make test` runs. The others run the same commands and prove larger models."""

PAGES = [
    str(path.relative_to(ROOT))
    for glob in ("README.md", "docs/index.md", "docs/guides/*.md")
    for path in ROOT.glob(glob)
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return class folders of photographs: 32 to train on, 8 held out."""
    folder = tmp_path_factory.mktemp("data")
    for number in range(40):
        pixels = np.random.default_rng(number).integers(0, 128, (80, 96, 3), dtype=np.uint8)
        stripes = pixels[::8] if number % 2 else pixels[:, ::8]
        stripes += 127
        place = folder / "photos" / ("heldout" if number < 8 else "train") / ("cat" if number % 2 else "dog")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{number}.jpg")
    for name in ("models", "programs"):
        (folder / name).mkdir()
    return folder


def build_model() -> torch.nn.Module:
    """Return a network with frozen features and a head that trains."""
    frozen = [torch.nn.Conv2d(3, 8, 7, stride=4), torch.nn.ReLU(), torch.nn.MaxPool2d(4)]
    features = torch.nn.Sequential(*frozen).requires_grad_(False)
    return torch.nn.Sequential(features, torch.nn.Flatten(), torch.nn.Linear(8 * 13 * 13, 2))


def given_names() -> dict[str, Any]:
    """Return the names that snippets may use without defining them."""
    ensure_torchvision()  # snippets import it
    torch.manual_seed(0)
    model = build_model()
    return {
        "__name__": "__main__",
        "torch": torch,
        "build_model": build_model,
        "model": model,
        "criterion": torch.nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model[2].parameters(), lr=0.01),  # type: ignore[index]
        "metric": lambda outputs, targets: (outputs.argmax(1) == targets).float().mean(),
        "image": torch.rand(1, 3, 224, 224),
        "images": torch.rand(4, 3, 224, 224),
    }


@pytest.fixture
def open_page(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Path], Page]]:
    """Return a function that opens a page in a folder of its own, as the working folder."""
    shutil.copytree(data, tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    opened: list[Page] = []

    def open_(path: Path) -> Page:
        opened.append(Page(path=path, folder=tmp_path, namespace=given_names()))
        return opened[-1]

    before = set(sys.modules)
    yield open_
    for page in opened:
        page.close()
    written = str(tmp_path)
    for name in [
        name for name in set(sys.modules) - before if place_of(sys.modules[name]).startswith(written)
    ]:  # modules that a page wrote: the next one has its own
        del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.full) for name in PAGES]
)
def test_every_snippet_of_the_page_runs(
    name: str, open_page: Callable[[Path], Page], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="upriver"):
        open_page(ROOT / name).run()
    warned = [record.getMessage() for record in caplog.records if record.name.startswith("upriver")]
    assert not warned  # a snippet that fell back to the plain way shows nothing of what its page is about


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "page.md"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.full
def test_blocks_share_files_names_and_servers(tmp_path: Path, open_page: Callable[[Path], Page]) -> None:
    text = """
```python
# shop/stock.py: a module
APPLES = 3
```

<!-- setup
count = 2
-->
```python
from shop.stock import APPLES
apples = APPLES * count
```

```sh
upriver serve --store file:///data/photos
test -d /data/photos/train/cat
```

<!-- not run: needs an accelerator -->
```python
raise SystemExit
```

```python
import json, urllib.request
with urllib.request.urlopen("http://storage-node:7000/v1/info") as answer:
    stores = json.load(answer)["stores"]
```
"""
    page = open_page(written(tmp_path, text))
    page.run()
    assert page.namespace["apples"] == 6
    assert page.namespace["stores"] == ["default"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```sh\ntrue\nfalse\n```\n", "line 1: exit code 1"),
        ("```sh\nupriver serve --port none\n```\n", "line 1: exit code 1"),
        ("```\nwhat\n```\n", "the language of a block is one of"),
        ("<!-- not run: GPU -->\n```sh\nfalse\n```\n", "does not say why"),
        ("<!-- not run: needs an accelerator -->\n\nWords.\n", "no block follows"),
    ],
)
def test_a_block_that_breaks_the_rules_fails_its_page(
    text: str, message: str, tmp_path: Path, open_page: Callable[[Path], Page]
) -> None:
    with pytest.raises(BadPage, match=message):
        open_page(written(tmp_path, text)).run()


def test_an_error_names_the_line_of_the_page(tmp_path: Path, open_page: Callable[[Path], Page]) -> None:
    path = written(tmp_path, "# Page\n\n```python\nfine = 1\nraise KeyError\n```\n")
    with pytest.raises(KeyError) as caught:
        open_page(path).run()
    assert caught.traceback[-1].lineno + 1 == 5
    assert str(caught.traceback[-1].path) == str(path)


def test_every_page_has_blocks_that_run() -> None:
    for name in PAGES:
        found = list(blocks((ROOT / name).read_text(encoding="utf-8")))
        assert any(not block.why_not and block.language in {"python", "sh"} for block in found), name
