"""``upriver gc``: remove programs, weights and kept features of a store that were not used for long."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from upriver.cli.common import DebugOption, JsonOption, age_s, date_text, emit, print_table
from upriver.cli.options import StoreOption, store_options
from upriver.progress import note, progress_bar
from upriver.text import bytes_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from upriver.coldstart.garbage_collection import Removed


def gc(
    uri: Annotated[str, typer.Argument(help="Store: file:///path, s3://bucket/prefix, or a folder.")],
    older_than: Annotated[
        str,
        typer.Option(metavar="AGE", help="Time since the last use, as 12h, 30d or 8w; 4h at least."),
    ] = "30d",
    digest: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIGEST",
            help="Only this program, these weights with their programs, or these features; may be repeated.",
        ),
    ] = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only what is stored for this tenant; may be repeated."),
    ] = None,
    shared: Annotated[
        bool,
        typer.Option(
            "--shared",
            help="Also what upriver push wrote, and servers without tenants; who loads it straight from the "
            "store, as upriver coldstart does, leaves no note of its use.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would go, and remove nothing.")
    ] = False,
    prefix: Annotated[
        str | None,
        typer.Option(help="Folder of the store that programs are kept under; .upriver without it."),
    ] = None,
    option: StoreOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Remove programs, weights and kept features of tenants that no server has used for long.

    Servers note in the store what they use, once an hour. Weights stay as long as a program that stays needs
    them. Datasets are left alone. It may run while servers do; one at a time for a store.
    """
    from upriver.coldstart.garbage_collection import check_asked, collect, folders, why_kept
    from upriver.server.tenants import check_tenant_name
    from upriver.store import DEFAULT_PREFIX, Store, check_name, store_uri

    older_than_s, folder = age_s(older_than), check_name(DEFAULT_PREFIX if prefix is None else prefix)
    check_asked(older_than_s, digest or ())
    for name in tenant or ():
        check_tenant_name(name)
    uri = store_uri(uri)
    store = Store.open(uri, options=store_options(option))
    removed: list[Removed] = []
    looked_at = folders(store, folder, tenants=tenant or (), shared=shared)
    with progress_bar() as bar:
        for place in looked_at:
            task = bar.add_task(place, total=None)
            removed += collect(
                store,
                place,
                older_than_s=older_than_s,
                only=digest or (),
                dry_run=dry_run,
                on_progress=partial(_show, bar, task),
            )
    document = {
        "uri": uri,
        "prefix": folder,
        "dry_run": dry_run,
        "bytes": sum(each.nbytes for each in removed),
        "removed": [
            {
                "kind": each.kind,
                "path": each.path,
                "digest": each.digest,
                "bytes": each.nbytes,
                "last_used": date_text(each.used_s),
            }
            for each in removed
        ],
    }
    emit(document, as_json=as_json, text=lambda: _print(removed, dry_run=dry_run))
    for each in dict.fromkeys(digest or ()):
        if each not in {gone.digest for gone in removed}:
            note(why_kept(store, folder, each, looked_at=looked_at, older_than_s=older_than_s))
    if not looked_at and not digest:
        note(f"no tenant has stored anything under {folder!r}; --shared looks at {folder!r} itself")


def _show(bar: Progress, task: TaskID, done: int, total: int) -> None:
    bar.update(task, completed=done, total=total)


def _print(removed: list[Removed], *, dry_run: bool) -> None:
    if removed:
        rows = [
            (each.kind, each.path, bytes_text(each.nbytes), f"{(time.time() - each.used_s) / 86400:.1f}")
            for each in removed
        ]
        print_table(("kind", "object", "size", "days unused"), rows, left=frozenset({0, 1}))
    total = bytes_text(sum(each.nbytes for each in removed))
    note(f"{total} in {len(removed)} objects {'would be' if dry_run else 'were'} removed")
