"""``upriver features``: list the features that jobs keep on this machine's disk, and remove some."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from upriver.cli.common import DebugOption, JsonOption, age_s, date_text, emit, print_table
from upriver.progress import note
from upriver.text import bytes_text, printable

if TYPE_CHECKING:
    from upriver.features import DiskFeatures, FeatureFolder

app = typer.Typer(
    help="List and remove the features that jobs keep on this machine's disk.", no_args_is_help=True
)

FolderOption = Annotated[
    Path | None, typer.Option(help="Folder of the features; by default that of Keep(folder=None).")
]


@app.command("list")
def show(folder: FolderOption = None, as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """List what is kept, the last used first."""
    found = _disk(folder).entries()
    rows = [
        (
            each.digest[:12],
            printable(each.about, 60) or "unknown",
            each.rows,
            bytes_text(each.num_bytes),
            f"{each.rows * each.saved_s:.0f}",
            date_text(each.last_used_s),
        )
        for each in found
    ]
    columns = ("digest", "features", "samples", "size", "seconds saved", "last used")
    document = {"features": [_as_json(each) for each in found]}
    emit(document, as_json=as_json, text=lambda: print_table(columns, rows, left=frozenset({0, 1})))
    if not found:
        note("no features are kept")


@app.command("gc")
def collect(
    folder: FolderOption = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Remove what was not used for so long, as 12h, 30d, 8w.")
    ] = None,
    at_most: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Keep so much at most, as 20GB; the least useful goes first."),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Remove kept features. Without an option all of them go; jobs that read them compute them again."""
    from upriver.features.budget import budget_bytes

    most = 0 if older_than is None else None
    freed = _disk(folder).collect(
        at_most=most if at_most is None else budget_bytes("--at-most", at_most, free=lambda: 0),
        older_than_s=None if older_than is None else age_s(older_than),
    )
    emit({"bytes": freed}, as_json=as_json, text=lambda: note(f"{bytes_text(freed)} were removed"))


def _disk(folder: Path | None) -> DiskFeatures:
    from upriver.features import DiskFeatures
    from upriver.features.keep import Keep

    return DiskFeatures(Keep(folder=folder).path, budget_bytes=0)


def _as_json(each: FeatureFolder) -> dict[str, object]:
    return {
        "digest": each.digest,
        "about": each.about,
        "program": each.program,
        "cut": each.cut,
        "samples": each.rows,
        "bytes": each.num_bytes,
        "saved_s": each.saved_s,
        "last_used": date_text(each.last_used_s),
    }
