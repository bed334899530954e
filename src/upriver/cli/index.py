"""``upriver index``: record the location of every sample of a dataset, and the stages that prepare it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import asdict

from upriver.cli.common import DebugOption, JsonOption, emit, print_fields
from upriver.cli.options import StoreOption, store_options
from upriver.cli.stages import input_stages
from upriver.progress import note, progress_bar

if TYPE_CHECKING:
    from upriver.pipeline import LeftOut


class OnLeftOut(StrEnum):
    """Choose what happens when an index would leave out possible samples."""

    ERROR = "error"
    REPORT = "report"


class DatasetLayout(StrEnum):
    """Arrangement of samples in a store."""

    AUTO = "auto"
    WEBDATASET = "webdataset"
    FOLDERS = "folders"


def index(
    uri: Annotated[str, typer.Argument(help="Store: file:///path, s3://bucket/prefix, or a folder.")],
    path: Annotated[str, typer.Option(help="Folder of the dataset inside the store.")] = "",
    layout: Annotated[
        DatasetLayout, typer.Option(help="Tar shards or class folders; found out by itself.")
    ] = DatasetLayout.AUTO,
    stages: Annotated[
        str,
        typer.Option(metavar="train|eval|FILE", help="Input stages: a preset, or a TOML file of [[stage]]."),
    ] = "eval",
    size: Annotated[
        int, typer.Option(min=1, help="Side in pixels of what the presets give the model.")
    ] = 224,
    on_left_out: Annotated[
        OnLeftOut,
        typer.Option(
            help="When files that may be samples cannot be indexed: stop, or count and go on, as in "
            "'left out: 2 of a format that is not read (cat/1.gif, cat/2.tif)'."
        ),
    ] = OnLeftOut.ERROR,
    option: StoreOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Index a dataset in a store: class folders or WebDataset shards, of images, audio or ready tensors."""
    from upriver.pipeline import index as index_dataset
    from upriver.store import Store, store_uri

    chain = input_stages(stages, size=size)
    uri = store_uri(uri)
    store = Store.open(uri, options=store_options(option))
    with progress_bar(of_bytes=True) as bar:
        task = bar.add_task("indexing", total=None)
        dataset = index_dataset(
            store,
            path,
            stages=chain.stages,
            layout=layout.value,
            on_left_out=on_left_out.value,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    dataset.publish()
    note_left_out(dataset.left_out)
    document = {
        "digest": dataset.digest,
        "samples": len(dataset),
        "classes": list(dataset.classes),
        "stages": [stage.name for stage in chain.stages],
        "stored_bytes_per_sample": round(dataset.stored_bytes),
        "uri": uri,
        "path": path,
        "left_out": {reason: asdict(each) for reason, each in dataset.left_out.items()},
    }
    shown = {
        **document,
        "classes": _few(dataset.classes),
        "left_out": sum(each.count for each in dataset.left_out.values()),
    }
    emit(document, as_json=as_json, text=lambda: print_fields(shown))


def note_left_out(left_out: Mapping[str, LeftOut]) -> None:
    """Print on stderr which files an index left out."""
    from upriver.pipeline.left_out import describe

    if left_out:
        note(f"left out: {describe(left_out)}")


def _few(names: tuple[str, ...], at_most: int = 10) -> str:
    """Return some names and their total count."""
    shown = ", ".join(names[:at_most]) + (", ..." if len(names) > at_most else "")
    return f"{len(names)} ({shown})"
