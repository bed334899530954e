"""``upriver diff``: name the first operator that another machine computes with other bits, and its effect."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from upriver.cli.common import DebugOption, JsonOption, emit, print_fields, print_table, working
from upriver.cli.inputs import read_inputs
from upriver.cli.options import (
    AutocastOption,
    GranularityOption,
    InputShapeOption,
    MicroBatchOption,
    ModelArgument,
    WeightsOption,
    check_granularity,
    check_micro_batch,
    check_module,
    fill,
    name_values,
    parse_shape,
)
from upriver.cli.output import check_picture, write_picture
from upriver.cli.serve.options import read_token
from upriver.errors import ConfigError
from upriver.progress import counted_steps, note
from upriver.text import wrapped

if TYPE_CHECKING:
    from upriver.program.graph.executor import Program
    from upriver.program.graph.liveness import Granularity
    from upriver.program.graph.schema import TensorSpec
    from upriver.protocol import Info
    from upriver.rpc.client import ServerClient
    from upriver.rpc.program_diff import ProgramDiff, StageDiff
    from upriver.rpc.tolerance import Tolerance

SCHEMA = "upriver.diff/1"

EXIT_DIFFERENT = 1
"""Exit code if a bit differs."""


def diff(
    model: ModelArgument,
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="Address of the server to compare with.")
    ] = None,
    against_threads: Annotated[
        int | None,
        typer.Option(metavar="N", help="In place of --server: a process here that computes with N threads."),
    ] = None,
    against_env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="In place of --server: a process here with this variable, as ONEDNN_MAX_CPU_ISA=AVX2; "
            "repeatable.",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="Threads of this side; torch's default without it.")
    ] = None,
    freeze_to: Annotated[
        str | None, typer.Option(metavar="MODULE", help="Last frozen module; the whole model without it.")
    ] = None,
    granularity: GranularityOption = None,
    file: Annotated[
        Path | None,
        typer.Option("--input", metavar="FILE", help="Image, .npy or .safetensors; made up without it."),
    ] = None,
    micro_batch: MicroBatchOption = 16,
    weights: WeightsOption = None,
    input_shape: InputShapeOption = None,
    autocast: AutocastOption = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token for the server (or UPRIVER_TOKEN).")
    ] = None,
    ca: Annotated[
        Path | None, typer.Option(help="Authorities that vouch for an https server, in PEM.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw how the difference grows over the cuts.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> int:
    """Name the first operator of a model that two sides compute with other bits, and follow the difference.

    This side is compared with a server, or with a process of this machine with other threads or variables.
    Both run the same inputs stage after stage. The stage that differs first is then run by operators.

    The exit code is 1 if any bit differs.
    """
    _check_sides(server, threads, against_threads, against_env)
    check_micro_batch(micro_batch)
    ends, shape, variables = check_granularity(granularity), parse_shape(input_shape), _variables(against_env)
    check_picture(plot)
    token = read_token(token_file)
    import torch

    from upriver.engine.fingerprint import fingerprint
    from upriver.program.capture.prefix import capture
    from upriver.program.example_inputs import Example
    from upriver.program.graph.autocast import autocast_dtype
    from upriver.program.models.registry import load_model
    from upriver.program.split.cut_survey import answers_of
    from upriver.rpc.program_diff import diff_program, server_run
    from upriver.rpc.tolerance import tolerance_between, tolerance_of, widest

    precision = autocast_dtype(autocast)
    if threads is not None:
        torch.set_num_threads(threads)
    network, inputs = load_model(model, input_shape=shape)
    fill(network, weights)
    check_module(network, freeze_to)
    call = inputs.example(micro_batch) if file is None else read_inputs(file, inputs, network)
    example = Example.of(call).resized(micro_batch)
    if weights is None:
        note(f"{model} has random weights; give --weights FILE.safetensors for trained ones")

    def captured(granularity: Granularity) -> Program:
        outputs = answers_of(network, example, freeze_to, precision) if freeze_to is not None else None
        return capture(network, example, outputs=outputs, autocast=precision, granularity=granularity)

    with _other_side(server, against_threads, variables, token, ca) as client:
        process = client.process() or None
        info = client.info(process=process)
        with working("capturing the model"):
            program = captured(ends)
        between = tolerance_between(info.fingerprint, fingerprint(program.device))
        allowed = widest(tolerance_of(program), between)
        with counted_steps("comparing") as show:
            found = diff_program(
                program,
                example.tensors,
                server_run(client, process),
                allowed=allowed,
                by_operators=lambda: captured("op"),
                on_stage=show,
            )
    document = _document(model, freeze_to, program, found, allowed, info, server)
    if plot is not None:
        from upriver.report.diff_plot import plot_diff

        write_picture(plot, plot_diff(found.stages, title=f"Difference of {model}"))
        note(f"Picture: {plot}")
    emit(document, as_json=as_json, text=lambda: _print(document))
    return 0 if found.equal else EXIT_DIFFERENT


def _check_sides(
    server: str | None, threads: int | None, against_threads: int | None, against_env: list[str] | None
) -> None:
    """Check that exactly one other side is given, and that the numbers of threads are possible."""
    here = against_threads is not None or bool(against_env)
    if server is None and not here:
        raise ConfigError(
            "nothing to compare with: give --server URL, --against-threads N or --against-env NAME=VALUE"
        )
    if server is not None and here:
        raise ConfigError(
            "--against-threads and --against-env start a process here, in place of --server; give one of them"
        )
    from upriver.rpc.discovery import is_directory
    from upriver.rpc.validation import MAX_THREADS, whole

    if server is not None and is_directory(server):
        raise ConfigError(f"--server: {server} is a directory; give the address of one server that it names")
    for option, count in (("--threads", threads), ("--against-threads", against_threads)):
        if count is not None:
            whole(option, count, most=MAX_THREADS)


def _variables(given: list[str] | None) -> dict[str, str]:
    """Return variables of the other side, all of which choose kernels: a server's workers see no others."""
    from upriver.engine.environment import ENVIRONMENT

    variables = name_values(given, "--against-env")
    for name in variables:
        if name not in ENVIRONMENT:
            raise ConfigError(
                f"--against-env takes variables that choose kernels ({', '.join(ENVIRONMENT)}), got {name!r}"
            )
    return variables


@contextlib.contextmanager
def _other_side(
    url: str | None,
    threads: int | None,
    variables: Mapping[str, str],
    token: str | None,
    ca: Path | None,
) -> Iterator[ServerClient]:
    """Yield a client of the given server, or of one that runs here meanwhile."""
    import torch

    from upriver.rpc.client import ServerClient
    from upriver.rpc.local_server import EmbeddedServer
    from upriver.rpc.tls import client_context

    with contextlib.ExitStack() as stack:
        if url is None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="upriver-diff-")))
            with working("starting the other side"):
                started = EmbeddedServer.start(
                    {"default": folder.as_uri()},
                    threads=threads or torch.get_num_threads(),
                    workers=1,
                    environment=variables,
                )
            url, token = stack.enter_context(started).url, None
        yield stack.enter_context(ServerClient(url, token=token, tls=client_context(ca=ca)))


# ------------------------------------------------------------------------------------------- the result


def _document(
    model: str,
    freeze_to: str | None,
    program: Program,
    found: ProgramDiff,
    allowed: Tolerance,
    info: Info,
    server: str | None,
) -> dict[str, Any]:
    import torch

    from upriver.rpc.server_verification import differing_fields

    first = found.first_operator
    fields = differing_fields(info.fingerprint, program.device)
    return {
        "schema": SCHEMA,
        "model": model,
        "freeze_to": freeze_to,
        "digest": program.digest,
        "micro_batch": program.micro_batch,
        "server": server,
        "threads": {"here": torch.get_num_threads(), "there": info.threads},
        "fingerprint": [
            {"field": field, "here": here, "there": there} for field, (there, here) in fields.items()
        ],
        "equal": found.equal,
        "first_stage": found.first_stage.cut if found.first_stage is not None else None,
        "first_operator": _operator(first) if first is not None else None,
        "stages": [_stage(stage) for stage in found.stages],
        "operators": [_operator(operator) for operator in found.operators],
        "answer": asdict(found.answer),
        "tolerance": {**asdict(allowed), "excess": found.excess},
    }


def _stage(stage: StageDiff) -> dict[str, Any]:
    return {
        "cut": stage.cut,
        "after": stage.name,
        "kind": stage.kind,
        "operators": list(stage.operators),
        "gives": _forms(stage.gives),
        "own": asdict(stage.own),
        "accumulated": asdict(stage.accumulated),
    }


def _operator(operator: StageDiff) -> dict[str, Any]:
    module, separator, _ = operator.name.rpartition(": ")
    if not separator and operator.name != operator.operators[-1].partition(".")[0]:
        module = operator.name  # the last stage is named after the module that ends there
    return {
        "operators": list(operator.operators),
        "module": module,
        "kind": operator.kind if module else "",
        "constants": list(operator.constants),
        "reads": _forms(operator.reads),
        "gives": _forms(operator.gives),
        "own": asdict(operator.own),
        "accumulated": asdict(operator.accumulated),
    }


def _forms(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    return [{"dtype": spec.dtype, "shape": list(spec.shape)} for spec in specs]


def _print(document: dict[str, Any]) -> None:
    different = [{"field": "threads", **document["threads"]}, *document["fingerprint"]]
    fields = {"other side": document["server"] or "a process of this machine"}
    fields |= {line["field"]: f"{line['there']!r} there, {line['here']!r} here" for line in different}
    if not document["fingerprint"]:
        fields["fingerprint"] = "the same"
    print_fields(fields)
    print()
    columns = ("cut", "after", "own", "accumulated", "other bits", "elements")
    rows = [
        (
            stage["cut"],
            stage["after"],
            _number(stage["own"]["relative"]),
            _number(stage["accumulated"]["relative"]),
            stage["accumulated"]["num_different"],
            stage["accumulated"]["num_elements"],
        )
        for stage in document["stages"]
    ]
    print_table(columns, rows, left=frozenset({1}))
    print()
    for line in _said(document):
        print(wrapped(line))


def _said(document: dict[str, Any]) -> Iterator[str]:
    """Yield the findings in words."""
    if document["equal"]:
        yield "No bit differs, in no stage and not in the answer of a whole run."
        return
    first, number = document["first_operator"], document["first_stage"]
    if number is None:
        yield "Each stage alone gives equal bits, and a whole run does not."
    elif first is None:
        yield f"Stage {number} gives other bits, and none of its operators alone does."
    else:
        yield f"First to give other bits from equal inputs: {_named(first)}."
        yield f"  It reads {_listed(first['reads'])} and gives {_listed(first['gives'])}."
        yield f"  Its results are {_apart(first['own'])}."
        if first["constants"]:
            made = ", ".join(dict.fromkeys(first["constants"]))
            yield f"  It reads constants that each side makes by {made}: these may differ instead."
    tolerance = document["tolerance"]
    allows = f"exact='numeric' allows {tolerance['rtol']:g} of each value plus {tolerance['atol']:g} of the"
    verdict = f"refuses it: {tolerance['excess']}" if tolerance["excess"] else "takes it"
    yield f"At the last cut, a whole run is {_apart(document['answer'])}: {allows} largest, and {verdict}."


def _named(operator: dict[str, Any]) -> str:
    names = [f"aten.{name}" for name in operator["operators"]]
    which = names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    return f"{which} in {operator['module']} ({operator['kind']})" if operator["module"] else which


def _listed(forms: Sequence[dict[str, Any]]) -> str:
    return ", ".join(f"{form['dtype']} {tuple(form['shape'])}" for form in forms) or "nothing"


def _apart(deviation: Mapping[str, Any]) -> str:
    count = f"{deviation['num_different']} of {deviation['num_elements']} elements"
    return f"apart by {_number(deviation['relative'])} of the largest value, in {count}"


def _number(value: float) -> str:
    return f"{value:.2g}"
