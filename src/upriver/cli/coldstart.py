"""``upriver coldstart``: load a model while it answers, and show what came when."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from upriver.cli.common import DebugOption, JsonOption, emit, note, print_fields, progress_bar
from upriver.cli.inputs import read_inputs
from upriver.cli.options import InputShapeOption, ModelArgument, StoreOption, parse_shape, store_options
from upriver.cli.output import check_picture, write_whole
from upriver.errors import ConfigError
from upriver.text import bytes_text, rate_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

    from upriver.coldstart import Loading
    from upriver.coldstart.history import Moment
    from upriver.program.example import Example
    from upriver.program.inputs import ModelInputs
    from upriver.report.cold_plot import Way

LOOK_S = 0.1
"""How often the bar moves."""


def coldstart(
    uri: Annotated[
        str,
        typer.Argument(help="Weights: file:///path/NAME, s3://bucket/NAME (safetensors, or their index)."),
    ],
    model: ModelArgument,
    file: Annotated[
        Path | None,
        typer.Option("--input", metavar="FILE", help="Image, .npy or .safetensors; made up without it."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Samples of a made-up input.")] = 1,
    grouping: Annotated[
        str,
        typer.Option(metavar="NAME", help="upriver, pisel or layer_by_layer: what is asked for together."),
    ] = "upriver",
    compare: Annotated[
        bool, typer.Option("--compare", help="Load it the plain way, too, and hold both answers together.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw what came when (.png, .svg, .pdf).")
    ] = None,
    input_shape: InputShapeOption = None,
    option: StoreOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Load a model from a store, ask it at once, and print what happened when.

    The answer needs only the weights that it reads to be there, and is that of the loaded model to the bit.
    """
    if batch < 1:
        raise ConfigError(f"--batch must be at least 1, got {batch}")
    check_picture(plot)
    from upriver.coldstart import begin
    from upriver.program.example import Example

    builder = _Builder(model, parse_shape(input_shape))
    options = store_options(option)
    began = time.monotonic()
    network, handle = begin(builder, uri, store_options=options, grouping=grouping)
    network.eval()
    call = Example.of(builder.inputs.example(batch)) if file is None else read_inputs(file, builder.inputs)
    given = _asked(network, call)
    answer_s = time.monotonic() - began
    _until_there(handle)
    moments = handle.history()
    document = _document(uri, model, handle, moments, answer_s)
    if compare:
        document["plain"] = _plain(builder, uri, options, call, given)
    if plot is not None:
        write_whole(plot, _picture(handle, moments, answer_s, f"{model}: {uri}", plot.suffix))
        note(f"Picture: {plot}")
    emit(document, as_json=as_json, text=lambda: _print(document))


class _Builder:
    """Makes the named model; what it takes is known once it has."""

    inputs: ModelInputs

    def __init__(self, name: str, shape: tuple[int, ...] | None) -> None:
        self._name, self._shape = name, shape

    def __call__(self) -> nn.Module:
        from upriver.program.names import load_model

        model, self.inputs = load_model(self._name, input_shape=self._shape)
        return model


def _asked(network: nn.Module, call: Example) -> list[torch.Tensor]:
    import torch

    from upriver.program.example import tensors_in

    with torch.no_grad():
        return list(tensors_in(network(*call.args, **call.kwargs)))


def _until_there(handle: Loading) -> None:
    with progress_bar(of_bytes=True) as bar:
        task = bar.add_task("loading", total=handle.nbytes)
        while not handle.wait(LOOK_S):
            bar.update(task, completed=handle.nbytes_here())


def _document(
    uri: str, model: str, handle: Loading, moments: Sequence[Moment], answer_s: float
) -> dict[str, Any]:
    at = {moment.kind: moment.at_s for moment in reversed(moments)}
    requests = [moment for moment in moments if moment.kind == "request"]
    before = [moment for moment in moments if moment.kind == "filled" and moment.at_s <= answer_s]
    return {
        "uri": uri,
        "model": model,
        "weight_bytes": handle.nbytes,
        "constructed_s": at["constructed"],
        "found_s": at["found"],
        "first_byte_s": at.get("first_byte"),
        "answer_s": answer_s,
        "loaded_s": at["loaded"],
        "bytes_before_answer": sum(moment.nbytes for moment in before),
        "requests": len(requests),
        "refetched": sum(moment.kind == "refetch" for moment in moments),
        "bytes_per_s": handle.nbytes / max(1e-9, at["loaded"] - at.get("request", at["loaded"])),
        "moments": [
            {"at_s": moment.at_s, "kind": moment.kind, "weights": moment.weights, "bytes": moment.nbytes}
            for moment in moments
        ],
    }


def _plain(
    builder: _Builder, uri: str, options: Mapping[str, str], call: Example, given: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """Everything one after the other: construct, fetch, load, ask."""
    import torch

    from upriver.coldstart.plain import load_plainly

    began = time.monotonic()
    network = load_plainly(builder, uri, store_options=options).eval()
    loaded_s = time.monotonic() - began
    answer = _asked(network, call)
    same = len(answer) == len(given) and all(map(torch.equal, answer, given))
    return {"loaded_s": loaded_s, "answer_s": time.monotonic() - began, "same_answer": same}


def _ways(handle: Loading, moments: Sequence[Moment]) -> list[Way]:
    """Of each weight, in the order in which something read them, then in that of the file."""
    from upriver.report.cold_plot import Way

    asked: dict[str, float] = {}
    filled: dict[str, float] = {}
    touched: dict[str, float] = {}
    nbytes: dict[str, int] = {}
    for moment in moments:
        if moment.kind == "request":
            for name in handle.names_between(*moment.weights):
                asked.setdefault(name, moment.at_s)
        elif moment.kind == "filled":
            filled[moment.weights[0]], nbytes[moment.weights[0]] = moment.at_s, moment.nbytes
        elif moment.kind == "touched":
            touched[moment.weights[0]] = moment.at_s
    order = dict.fromkeys((*touched, *filled))
    return [
        Way(name, nbytes[name], asked.get(name, filled[name]), filled[name], touched.get(name))
        for name in order
        if nbytes[name]
    ]


def _picture(handle: Loading, moments: Sequence[Moment], answer_s: float, title: str, suffix: str) -> bytes:
    import tempfile

    from upriver.report.cold_plot import plot_ways

    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder) / f"picture{suffix}"
        plot_ways(_ways(handle, moments), answer_s=answer_s, title=title, path=drawn)
        return drawn.read_bytes()


def _print(document: dict[str, Any]) -> None:
    share = document["bytes_before_answer"] / max(1, document["weight_bytes"])
    fields = {
        "model": document["model"],
        "weights": bytes_text(document["weight_bytes"]),
        "constructed": f"{document['constructed_s']:.3f} s",
        "weights found": f"{document['found_s']:.3f} s",
        "first byte": "none" if document["first_byte_s"] is None else f"{document['first_byte_s']:.3f} s",
        "first answer": f"{document['answer_s']:.3f} s, with {share:.0%} of the weights there",
        "everything there": f"{document['loaded_s']:.3f} s",
        "link": f"{rate_text(document['bytes_per_s'])} in {document['requests']} requests",
    }
    if document["refetched"]:
        fields["damaged on the way"] = f"{document['refetched']} pieces, read again"
    if (plain := document.get("plain")) is not None:
        same = "the same to the bit" if plain["same_answer"] else "ANOTHER ONE"
        fields["the plain way"] = f"{plain['answer_s']:.3f} s to its answer, which is {same}"
    print_fields(fields)
