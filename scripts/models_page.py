"""Write the text of docs/models.md, from the rows measured by scripts/models.py."""

from __future__ import annotations

import os
import platform
import textwrap
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

from model_list import PART

ENOUGH_CUTS = 5
"""Number of cuts before the freeze point from which on a model counts as one that can be cut."""

WIDTH = 110

TITLES = {
    "torchvision": "torchvision",
    "timm": "timm",
    "transformers": "transformers",
    "own_models": "Models written to be hard to cut",
}

Row = dict[str, Any]


def page(rows: Sequence[Row]) -> str:
    """Return the whole page."""
    return "\n".join(_lines(rows)) + "\n"


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "# Models that were cut"
    yield ""
    yield "<!-- Written by scripts/models.py: change that, not this page. -->"
    yield ""
    yield _PURPOSE
    yield ""
    yield _summary(rows)
    yield from ("", *_MEANINGS)
    for library, title in TITLES.items():
        mine = [row for row in rows if row["name"].startswith(f"{library}:")]
        if mine:
            yield from ("", f"## {title}", "", *_table(mine))
    yield ""
    yield from _given_up(rows)
    yield from _how_it_was_made()


def _summary(rows: Sequence[Row]) -> str:
    proven = [row for row in rows if row["proof"] == "passed"]
    enough = [row for row in proven if row["cuts"] >= ENOUGH_CUTS]
    share = 100 * len(enough) / max(1, len(rows))
    text = (
        f"**Result.** {len(enough)} of {len(rows)} models ({share:.1f} %) offer {ENOUGH_CUTS} or more proven "
        "cuts before the freeze point."
    )
    rest = {
        "offer fewer": [row for row in proven if 0 < row["cuts"] < ENOUGH_CUTS],
        "are cut only at the freeze point": [row for row in proven if row["cuts"] == 0],
        "run unsplit": [row for row in rows if row["proof"] != "passed"],
    }
    for what, those in rest.items():
        if those:
            text += f" {len(those)} {what}: {', '.join(_code(row['name']) for row in those)}."
    return _paragraph(text)


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "model": lambda row: _code(row["name"].partition(":")[2]),
    "family": lambda row: row["family"],
    "parameters": lambda row: _millions(row["parameters"]),
    "inputs": lambda row: row["inputs"],
    "frozen through": lambda row: _code(row["frozen_through"]),
    "captured": lambda row: row["captured"],
    "cuts": lambda row: str(row["cuts"]),
    "tensors": lambda row: str(row["tensors"]),
    "capture s": lambda row: f"{row['capture_s']:.1f}",
    "prove s": lambda row: f"{row['prove_s']:.1f}",
    "proof": lambda row: str(row["proof"]).replace("|", "\\|"),
}


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield f"| {' | '.join(_COLUMNS)} |"
    yield f"|{'---|' * len(_COLUMNS)}"
    for row in rows:
        yield f"| {' | '.join(cell(row) for cell in _COLUMNS.values())} |"


def _given_up(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the failed tries before the last way, for the models where the first way failed."""
    tried = [(row["name"], attempt) for row in rows for attempt in row["attempts"][:-1]]
    if tried:
        yield from ("## Ways that failed", "", "upriver tried these before the way in the table:", "")
        yield from (f"- {_code(name)}: {attempt}" for name, attempt in tried)
        yield ""


_PURPOSE = """\
This page shows which published models upriver can cut, and which run unsplit and why. Look up the family of
your model here; `upriver cuts MODEL` lists the cuts of one model."""

_MEANINGS = """\
| column | meaning |
|---|---|
| inputs | shapes of one micro-batch, which is the first dimension: 4, or 2 above 50 M parameters |
| frozen through | last frozen module: as a rule the last of the first two thirds of the blocks, rounded up |
| captured | first way of cutting that passed its proof |
| cuts | cuts strictly before the freeze point, without the input; each one is proven |
| tensors | tensors that cross the freeze point |
| proof | `passed`, or why the model runs unsplit |""".splitlines()

_MADE = """
`python scripts/models.py` builds each model from its configuration at a published size, with random
weights. It downloads nothing and shrinks no model. `src/upriver/program/models/transformers_configs.py` names
the checkpoint of each size that is no default. All modules before the last frozen block are frozen, too.
`scripts/model_list.py` says which modules are blocks.

The script splits each model in training mode, as a job does it: it traces, captures and proves the model. The
proof compares outputs, gradients of the tail, and every cut as it would be shipped. It also compares padding,
and rows whose neighbours changed. Its inputs are random.

Masking and layer dropping of wav2vec 2.0 and HuBERT are off, since both happen inside the frozen part.
"""


def _how_it_was_made() -> Iterator[str]:
    packages = ("torch", "torchvision", "timm", "transformers")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    made_on = f"""
        Versions: {versions}. {platform.machine()}, {os.cpu_count()} CPUs. The seconds are of one run on a
        machine that did other work, too. The tests cut a part again, and compare everything but the seconds:
        {", ".join(map(_code, PART))}.
    """
    yield "## How this was made"
    for text in (*_MADE.split("\n\n"), made_on):
        yield from ("", _paragraph(text))


def _paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _millions(count: int) -> str:
    return f"{count / 1e6:.0f} M" if count >= 1e7 else f"{count / 1e6:.1f} M"
