"""``upriver push``: capture the frozen part of a model and publish it as a program."""

from __future__ import annotations

from typing import Annotated

import typer

from upriver.cli.common import DebugOption, JsonOption, emit, note, print_fields, working
from upriver.cli.options import (
    InputShapeOption,
    MicroBatchOption,
    ModelArgument,
    StoreOption,
    WeightsOption,
    check_micro_batch,
    check_module,
    parse_shape,
    store_options,
)


def push(
    model: ModelArgument,
    uri: Annotated[str, typer.Argument(help="Store: file:///path, s3://bucket/prefix.")],
    freeze_to: Annotated[
        str | None, typer.Option(metavar="MODULE", help="Last frozen module; the whole model without it.")
    ] = None,
    micro_batch: MicroBatchOption = 16,
    weights: WeightsOption = None,
    input_shape: InputShapeOption = None,
    prefix: Annotated[
        str, typer.Option(help="Folder of the store that programs are kept under.")
    ] = ".upriver",
    option: StoreOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Capture a model up to a module and publish it: a graph of operators and a weights file, no code."""
    from upriver.program.capture import capture
    from upriver.program.files import graph_path, publish, weights_path
    from upriver.program.names import load_model
    from upriver.store import Store

    check_micro_batch(micro_batch)
    store = Store.open(uri, options=store_options(option))
    network, spec = load_model(model, weights=weights, input_shape=parse_shape(input_shape))
    if weights is None:
        note(f"{model} has random weights; give --weights FILE.safetensors for trained ones")
    check_module(network, freeze_to)
    with working("capturing and publishing"):
        program = capture(network, (spec.example(micro_batch),), boundary=freeze_to)
        publish(program, store, prefix=prefix)
    document = {
        "digest": program.digest,
        "weights_digest": program.weights_digest,
        "model": model,
        "stages": program.num_stages,
        "micro_batch": program.micro_batch,
        "weight_bytes": program.weight_nbytes,
        "graph": graph_path(prefix, program.digest),
        "weights": weights_path(prefix, program.weights_digest),
    }
    emit(document, as_json=as_json, text=lambda: print_fields(document))
