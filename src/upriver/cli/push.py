"""``upriver push``: publish a model, or its frozen part, as programs; or its weights alone."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from upriver.cli.common import DebugOption, JsonOption, emit, print_fields, working
from upriver.cli.options import (
    AutocastOption,
    GranularityOption,
    InputShapeOption,
    ModelArgument,
    StoreOption,
    WeightsOption,
    check_granularity,
    check_micro_batch,
    check_module,
    fill,
    parse_counts,
    parse_shape,
    store_options,
)
from upriver.errors import ConfigError, ModelError
from upriver.progress import note

if TYPE_CHECKING:
    from upriver.program.capture.input_spec import ModelInputs
    from upriver.program.graph.executor import Program

MICRO_BATCH = "16"
"""Default micro-batch (decision 10)."""


def push(
    model: ModelArgument,
    uri: Annotated[str, typer.Argument(help="Store: file:///path, s3://bucket/prefix, or a folder.")],
    weights_to: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Publish the weights alone, as NAME.safetensors, for upriver coldstart URI/NAME MODEL.",
        ),
    ] = None,
    freeze_to: Annotated[
        str | None, typer.Option(metavar="MODULE", help="Last frozen module; the whole model without it.")
    ] = None,
    micro_batch: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help=f"Samples that a program takes at once, {MICRO_BATCH} without it; one program for each.",
        ),
    ] = None,
    length: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Tokens of a text or points of a sound; one program for each."),
    ] = None,
    granularity: GranularityOption = None,
    weights: WeightsOption = None,
    input_shape: InputShapeOption = None,
    autocast: AutocastOption = None,
    prefix: Annotated[
        str | None,
        typer.Option(help="Folder of the store that programs are kept under; .upriver without it."),
    ] = None,
    rewrite: Annotated[
        bool,
        typer.Option("--rewrite", help="Write a program also where it is there, as one that is damaged."),
    ] = False,
    option: StoreOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Capture a model up to a module and publish it: graphs of operators and a weights file, no code.

    Programs for several micro-batches and lengths share one weights file. With --granularity op, the whole
    model is the program that upriver infer asks for. With --weights-to, no program is made: the weights are
    published in the order in which the model reads them, for processes that construct it themselves.
    """
    of_programs = {
        "--freeze-to": freeze_to,
        "--micro-batch": micro_batch,
        "--length": length,
        "--granularity": granularity,
        "--autocast": autocast,
        "--prefix": prefix,
        "--rewrite": rewrite or None,
    }
    from upriver.store import DEFAULT_PREFIX, Store, store_uri

    uri = store_uri(uri)
    if weights_to is not None:
        _check_alone(of_programs)
        found = _push_weights(model, uri, weights_to, weights, input_shape, store_options(option))
        emit(found, as_json=as_json, text=lambda: print_fields(found))
        return
    from upriver.coldstart.load_program import publish
    from upriver.program.capture.prefix import capture_buckets
    from upriver.program.graph.autocast import autocast_dtype
    from upriver.program.models.registry import load_model
    from upriver.program.split.cut_survey import answers_of

    folder = DEFAULT_PREFIX if prefix is None else prefix
    sizes = MICRO_BATCH if micro_batch is None else micro_batch
    counts = tuple(map(check_micro_batch, parse_counts(sizes, "--micro-batch")))
    lengths = parse_counts(length, "--length") if length is not None else (None,)
    precision, ends = autocast_dtype(autocast), check_granularity(granularity)
    _check_lasting(uri)
    store = Store.open(uri, options=store_options(option))
    network, inputs = load_model(model, input_shape=parse_shape(input_shape))
    fill(network, weights)
    buckets = [(count, size, _of_length(inputs, size)) for size in lengths for count in counts]
    check_module(network, freeze_to)
    examples = [shaped.example(count) for count, _, shaped in buckets]
    _note_random(model, weights)
    with working("capturing and publishing"):
        outputs = answers_of(network, examples[0], freeze_to, precision) if freeze_to is not None else None
        programs = capture_buckets(network, examples, outputs=outputs, autocast=precision, granularity=ends)
        for program in programs:
            publish(program, store, prefix=folder, rewrite=rewrite)
    document = _document(model, programs, [size for _, size, _ in buckets], uri, folder)
    emit(document, as_json=as_json, text=lambda: _print(document))


def _check_alone(of_programs: Mapping[str, object]) -> None:
    """Check that no option of programs accompanies ``--weights-to``."""
    asked = [name for name, value in of_programs.items() if value is not None]
    if asked:
        raise ConfigError(
            f"--weights-to publishes weights and no program; it does not go with {', '.join(asked)}"
        )


def _push_weights(
    model: str,
    uri: str,
    name: str,
    weights: Path | None,
    input_shape: str | None,
    options: Mapping[str, str],
) -> dict[str, object]:
    """Publish a model's weights in the order in which it reads them, and return the command's document."""
    from upriver.coldstart import publish_model
    from upriver.coldstart.format.manifest import ENDING, manifest_path
    from upriver.program.example_inputs import Example
    from upriver.program.models.registry import load_model
    from upriver.store import Store, check_name

    path = check_name(name).removesuffix(ENDING) + ENDING
    _check_lasting(uri)
    store = Store.open(uri, options=options)
    network, inputs = load_model(model, input_shape=parse_shape(input_shape))
    fill(network, weights)
    call = Example.of(inputs.example(1))
    _note_random(model, weights)
    with working("publishing the weights"):
        try:
            manifest = publish_model(network, store, path, call.args, call.kwargs)
        except ModelError as error:
            if error.__cause__ is None or inputs.given is not None:
                raise  # the model was not called, or has an example of its own
            raise ModelError(
                f"{error} (called with {call.describe()}; --input-shape asks for another shape)"
            ) from None
    there = f"{uri.rstrip('/')}/{path}"
    shape = () if input_shape is None else ("--input-shape", input_shape)
    return {
        "uri": there,
        "model": model,
        "weights": path,
        "manifest": manifest_path(path),
        "weight_bytes": sum(tensor.stop - tensor.start for tensor in manifest.tensors),
        "object_bytes": manifest.nbytes,
        "num_weights": len(manifest.tensors),
        "num_ties": len(manifest.ties),
        "load": shlex.join(("upriver", "coldstart", there, model, *shape)),
    }


def _note_random(model: str, weights: Path | None) -> None:
    if weights is None:
        note(f"{model} has random weights; give --weights FILE.safetensors for trained ones")


def _check_lasting(uri: str) -> None:
    """Check that the store outlasts this process."""
    if uri.partition("://")[0].lower() == "memory":
        raise ConfigError(
            f"{uri!r} ends with this process and keeps nothing; push to file:///PATH or s3://BUCKET/PREFIX"
        )


def _of_length(inputs: ModelInputs, length: int | None) -> ModelInputs:
    """Return the inputs of a text or sound model with another length.

    Raises:
        ConfigError: If the model takes other inputs.
    """
    if length is None:
        return inputs
    shape = inputs.shape
    if shape is None or len(shape) != 1:
        takes = "an example of its own" if shape is None else f"samples of shape {shape}"
        raise ConfigError(f"--length is for models that take texts or sounds; this one takes {takes}")
    return inputs.reshaped((length,))


def _document(
    model: str, programs: Sequence[Program], lengths: Sequence[int | None], uri: str, prefix: str
) -> dict[str, object]:
    from upriver.coldstart.format.uris import program_uri
    from upriver.program.graph.artifact_paths import graph_path, weights_path

    first = programs[0]
    buckets = [
        {
            "digest": program.digest,
            "uri": program_uri(uri, prefix, program.digest),
            "micro_batch": program.micro_batch,
            "length": length,
            "stages": program.num_stages,
            "graph": graph_path(prefix, program.digest),
        }
        for program, length in zip(programs, lengths, strict=True)
    ]
    return {
        "digest": first.digest,
        "uri": program_uri(uri, prefix, first.digest),
        "weights_digest": first.weights_digest,
        "model": model,
        "stages": first.num_stages,
        "micro_batch": first.micro_batch,
        "weight_bytes": first.weight_nbytes,
        "graph": graph_path(prefix, first.digest),
        "weights": weights_path(prefix, first.weights_digest),
        "programs": buckets,
    }


def _print(document: dict[str, object]) -> None:
    programs = document["programs"]
    print_fields({name: value for name, value in document.items() if name != "programs"})
    for bucket in programs[1:] if isinstance(programs, list) else ():
        print()
        print_fields(bucket)
