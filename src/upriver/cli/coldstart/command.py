"""``upriver coldstart``: load a model or a program while it answers, and show the load's history."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from upriver.cli.coldstart.report import picture, print_load, streamed
from upriver.cli.common import DebugOption, JsonOption, emit
from upriver.cli.inputs import read_inputs
from upriver.cli.options import InputShapeOption, StoreOption, parse_shape, store_options
from upriver.cli.output import check_picture, write_picture
from upriver.errors import ConfigError, UpriverError
from upriver.progress import note, progress_bar
from upriver.text import error_text

if TYPE_CHECKING:
    import torch
    from torch import nn

    from upriver.coldstart import Arriving, Loading
    from upriver.program.capture.input_spec import ModelInputs
    from upriver.program.example_inputs import Example
    from upriver.program.graph.executor import Program
    from upriver.program.graph.schema import Graph

LOOK_S = 0.1
"""Seconds between two updates of the bar."""

WRITING_S = 5.0
"""Seconds to wait for files that speed up the next load; a store may write them slowly."""


def coldstart(
    uri: Annotated[
        str,
        typer.Argument(
            help="A program, as upriver push prints it (STORE/PREFIX/programs/DIGEST); with MODEL weights: "
            "a path, file:///path/NAME or s3://bucket/NAME (safetensors, or their index)."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Argument(
            help="Whose weights these are: torchvision:NAME, timm:NAME, transformers:NAME or "
            "package.module:callable."
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--input", metavar="FILE", help="Image, .npy or .safetensors; made up without it."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Samples of a made-up input of a MODEL; 1 without it.")
    ] = None,
    grouping: Annotated[
        str,
        typer.Option(metavar="NAME", help="upriver, pisel or layer_by_layer: what is asked for together."),
    ] = "upriver",
    stop: Annotated[
        int | None,
        typer.Option(metavar="N", help="Of a program, run the stages before cut N, and load what they read."),
    ] = None,
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
) -> int:
    """Load a program or a model from a store, ask it at once, and print what happened when.

    The answer needs only the weights that it reads to be there, and is that of the loaded program or model to
    the bit; with --compare the exit code is 1 where it is another one.
    """
    _check_options(model, {"--batch": batch, "--input-shape": input_shape}, stop)
    if batch is not None and batch < 1:
        raise ConfigError(f"--batch must be at least 1, got {batch}")
    check_picture(plot)
    options, shape = store_options(option), parse_shape(input_shape)
    if model is None:
        begun = _program(uri, options, file, stop=stop, grouping=grouping)
    else:
        begun = _model(model, shape, uri, options, file, batch=batch or 1, grouping=grouping)
    handle = begun.handle
    if plot is not None and handle is None:
        raise ConfigError(
            f"--plot: the weights of {uri} have no manifest, so they are read whole; push the program again"
        )
    given = begun.ask()
    answer_s = time.monotonic() - begun.began_s
    document: dict[str, Any] = {
        "uri": uri,
        **begun.told,
        "streamed": handle is not None,
        "answer_s": answer_s,
    }
    if handle is not None:
        _until_there(handle)
        moments = handle.history()
        document |= streamed(handle, moments, answer_s)
        if plot is not None:
            write_picture(plot, picture(handle, moments, answer_s=answer_s, title=begun.title))
            note(f"Picture: {plot}")
    if compare:
        document["plain"] = _compared(begun.plainly, given)
    emit(document, as_json=as_json, text=lambda: print_load(document))
    return 0 if not compare or document["plain"]["same_answer"] else 1


def _check_options(model: str | None, of_model: Mapping[str, object], stop: int | None) -> None:
    """Check that options of models and of programs do not mix."""
    if model is not None and stop is not None:
        raise ConfigError("--stop is for a program; leave MODEL out")
    for name, value in of_model.items():
        if model is None and value is not None:
            raise ConfigError(f"{name} is for a MODEL; a program says itself what it takes")


Ask: TypeAlias = "Callable[[], list[torch.Tensor]]"
"""Function that waits for an answer and returns it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Begun:
    """A load in progress.

    Attributes:
        title: Title of a picture.
        began_s: Start of the load by ``time.monotonic``.
        handle: Handle of the load; None if everything has been read already.
        told: Facts about the load, in JSON.
        ask: Function that asks the loaded model or program.
        plainly: Function that loads the same without overlap, and returns the function that asks it.
    """

    title: str
    began_s: float
    handle: Arriving | Loading | None
    told: Mapping[str, Any]
    ask: Ask
    plainly: Callable[[], Ask]


class _Builder:
    """Build the named model; its inputs are known after the first build."""

    inputs: ModelInputs

    def __init__(self, name: str, shape: tuple[int, ...] | None) -> None:
        self._name, self._shape = name, shape

    def __call__(self) -> nn.Module:
        from upriver.program.models.registry import load_model

        model, self.inputs = load_model(self._name, input_shape=self._shape)
        return model


def _model(
    name: str,
    shape: tuple[int, ...] | None,
    uri: str,
    options: Mapping[str, str],
    file: Path | None,
    *,
    batch: int,
    grouping: str,
) -> _Begun:
    from upriver.coldstart import begin
    from upriver.coldstart.plain_load import load_plainly
    from upriver.program.example_inputs import Example

    builder = _Builder(name, shape)
    began_s = time.monotonic()
    network, handle = begin(builder, uri, store_options=options, grouping=grouping)
    network.eval()
    inputs = builder.inputs
    call = Example.of(inputs.example(batch)) if file is None else read_inputs(file, inputs, network)

    def plainly() -> Ask:
        loaded = load_plainly(builder, uri, store_options=options).eval()
        return lambda: _asked(loaded, call)

    return _Begun(
        title=f"{name} from {uri}",
        began_s=began_s,
        handle=handle,
        told={"model": name},
        ask=lambda: _first_asked(network, call, file, shape),
        plainly=plainly,
    )


def _asked(network: nn.Module, call: Example) -> list[torch.Tensor]:
    import torch

    from upriver.program.example_inputs import tensors_in

    with torch.no_grad():
        return list(tensors_in(network(*call.args, **call.kwargs)))


def _first_asked(
    network: nn.Module, call: Example, file: Path | None, shape: tuple[int, ...] | None
) -> list[torch.Tensor]:
    """Ask as :func:`_asked` does, when it is not known yet whether the model accepts the call.

    Raises:
        ConfigError: If the model does not accept it.
        UpriverError: If weights do not arrive.
    """
    try:
        return _asked(network, call)
    except UpriverError:
        raise
    except Exception as error:  # the user's forward may raise anything
        if file is not None:
            what = f"--input {file}"
        elif shape is not None:
            what = f"an input of --input-shape {','.join(map(str, shape))}"
        else:
            what = "its example or a made-up input (give --input or --input-shape)"
        told = f"the model cannot be called with {what}, {call.describe()}: {error_text(error)}"
        raise ConfigError(told) from error


def _program(
    uri: str, options: Mapping[str, str], file: Path | None, *, stop: int | None, grouping: str
) -> _Begun:
    from upriver.coldstart.format.uris import program_at
    from upriver.coldstart.load_program import begin
    from upriver.program.capture.input_spec import made_up
    from upriver.program.graph import artifact_store
    from upriver.store import Store

    try:
        root, prefix, digest = program_at(uri)
    except ConfigError:
        raise ConfigError(
            "without MODEL, URI is that of a program, STORE/PREFIX/programs/DIGEST as push prints it; "
            f"weights need the MODEL that they are of; got {uri!r}"
        ) from None
    began_s = time.monotonic()
    program, handle = begin(uri, store_options=options, stop=stop, grouping=grouping)
    last = program.num_stages if stop is None else stop
    tensors = made_up(program.graph.inputs) if file is None else _from_file(file, program)

    def plainly() -> Ask:
        loaded = artifact_store.load(Store.open(root, options=options), digest, prefix=prefix)
        return lambda: list(loaded.run(tensors, 0, last))

    told = {
        "digest": program.digest,
        "micro_batch": program.micro_batch,
        "stages": program.num_stages,
        "stop": last,
        "program_bytes": _weight_bytes(program.graph),
        "weight_bytes": program.weight_nbytes,
    }
    return _Begun(
        title=f"program {program.digest[:12]}, stages [0, {last}) of {program.num_stages}",
        began_s=began_s,
        handle=handle,
        told=told,
        ask=lambda: list(program.run(tensors, 0, last)),
        plainly=plainly,
    )


def _from_file(file: Path, program: Program) -> list[torch.Tensor]:
    """Return a program's inputs from a file with any number of samples. Samples are repeated or cut."""
    from upriver.program.capture.input_spec import InputSpec, ModelInputs
    from upriver.program.example_inputs import Example
    from upriver.program.graph.schema import DTYPES

    forms = [value.spec for value in program.graph.inputs]
    specs = tuple(InputSpec(shape=tuple(form.shape[1:]), dtype=DTYPES[form.dtype]) for form in forms)
    call = Example.of(read_inputs(file, ModelInputs(positional=specs)))
    return call.resized(program.micro_batch).tensors


def _weight_bytes(graph: Graph) -> int:
    """Return the bytes of all weights that a program reads; a weight with several names counts once."""
    return sum({weight.key: weight.spec.nbytes for weight in graph.weights}.values())


def _until_there(handle: Arriving | Loading) -> None:
    with progress_bar(of_bytes=True) as bar:
        task = bar.add_task("loading", total=handle.nbytes)
        while not handle.wait(LOOK_S):
            bar.update(task, completed=handle.nbytes_here())
    handle.wait(WRITING_S)  # files for the next load are written


def _compared(plainly: Callable[[], Ask], given: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Load without overlap, time it, and compare the answers bit by bit."""
    from upriver.program.tensor_layouts import same_bits

    began_s = time.monotonic()
    ask = plainly()
    loaded_s = time.monotonic() - began_s
    answer = ask()
    answer_s = time.monotonic() - began_s
    same = len(answer) == len(given) and all(map(same_bits, answer, given))
    return {"loaded_s": loaded_s, "answer_s": answer_s, "same_answer": same}
