"""``upriver infer``: run a model on this machine, on servers, or on both, whichever is fastest now."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from upriver.cli.common import (
    DebugOption,
    JsonOption,
    emit,
    named_as_options,
    print_fields,
    print_table,
    working,
)
from upriver.cli.inputs import read_inputs
from upriver.cli.options import InputShapeOption, ModelArgument, WeightsOption, fill, parse_shape
from upriver.cli.output import check_output
from upriver.cli.serve.options import read_token
from upriver.errors import CaptureError, ConfigError
from upriver.progress import note
from upriver.text import bytes_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import nn

    from upriver.inference.executor import ServedRequest
    from upriver.inference.offload import Offload
    from upriver.program.capture.input_spec import ModelInputs
    from upriver.program.example_inputs import Example

TOP = 5
"""Number of classes that are printed."""

MOST_REPEATS = 1_000_000


def infer(
    model: ModelArgument,
    file: Annotated[
        Path, typer.Option("--input", metavar="FILE", help="Image, .npy or .safetensors with the inputs.")
    ],
    server: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Address of a server; repeatable.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.safetensors", help="Write the answer there, too.")
    ] = None,
    repeat: Annotated[int, typer.Option(help="Ask so often; the seconds are medians.")] = 1,
    policy: Annotated[
        str | None, typer.Option(help="inference (default), loadpart, neurosurgeon, local or remote.")
    ] = None,
    cut: Annotated[int | None, typer.Option(help="Run so many stages here, in place of a policy.")] = None,
    deadline: Annotated[
        float, typer.Option(help="Seconds after which the rest of a request is computed here.")
    ] = 10.0,
    no_push: Annotated[
        bool, typer.Option("--no-push", help="Send no program to a server that has it not.")
    ] = False,
    exact: Annotated[
        str,
        typer.Option(
            metavar="auto|bitwise|numeric",
            help="Use only servers with the same bits, or any within a tolerance; auto: any if none has.",
        ),
    ] = "auto",
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token for the servers (or UPRIVER_TOKEN).")
    ] = None,
    ca: Annotated[Path | None, typer.Option(help="Authorities that vouch for https servers, in PEM.")] = None,
    weights: WeightsOption = None,
    input_shape: InputShapeOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Ask a model once or more: on this machine, on servers, or cut between the two as is fastest then.

    The answer is the model's own, whatever becomes of the servers: bit for bit, or within a tolerance that
    it states.
    """
    if not 1 <= repeat <= MOST_REPEATS:
        raise ConfigError(f"--repeat must be a whole number in 1..{MOST_REPEATS}, got {repeat}")
    if policy is not None and cut is not None:
        raise ConfigError("--cut takes the place of a policy; give it or --policy")
    check_output(output, "--output")
    token = read_token(token_file)
    from upriver.cli.train.checkpoint import save_tensors
    from upriver.inference.offload import offload
    from upriver.program.example_inputs import tensors_in
    from upriver.program.models.registry import load_model

    network, inputs = load_model(model, input_shape=parse_shape(input_shape))
    fill(network, weights)
    call = _call(file, inputs, network)
    if weights is None:
        note(f"{model} has random weights; give --weights FILE.safetensors for trained ones")
    with working("capturing the model and looking at the servers"), _named(file, call):
        answer = offload(
            network,
            example_inputs=call,
            servers=server or (),
            policy=policy,
            cut=cut,
            deadline_s=deadline,
            push=not no_push,
            exact=exact,  # type: ignore[arg-type]
            token=token,
            ca=ca,
        )
    with answer:
        _wait(answer)
        asked: list[ServedRequest] = []
        for _ in range(repeat):
            given = answer(*call.args, **call.kwargs)
            if answer.last is not None:
                asked.append(answer.last)
        tensors = tensors_in(given)
        if output is not None:
            save_tensors(output, {f"output_{number}": tensor for number, tensor in enumerate(tensors)})
        document = _document(model, answer, asked, tensors)
        emit(document, as_json=as_json, text=lambda: _print(document))


def _call(file: Path, inputs: ModelInputs, network: nn.Module) -> Example:
    """Return a file's content as a call with samples."""
    from upriver.program.example_inputs import Example

    call = read_inputs(file, inputs, network)
    try:
        return Example.of(call)
    except ConfigError as error:
        raise ConfigError(f"--input {file}: {error}") from error


@contextlib.contextmanager
def _named(file: Path, call: Example) -> Iterator[None]:
    """Add the option's name or the file to errors of the request."""
    try:
        with named_as_options(deadline_s="--deadline", policy="--policy", cut="--cut", exact="--exact"):
            yield
    except CaptureError as error:
        raise CaptureError(f"{error}; --input {file} holds {call.describe()}", module=error.module) from error


def _wait(answer: Offload) -> None:
    """Wait until servers have received the program.

    An interrupted upload would begin anew with the next command.
    """
    if not (slow := answer.wait(0.0)):
        return
    num_bytes = sum(stage.param_bytes for stage in answer.program.stages)
    note(
        f"the program, {bytes_text(num_bytes)}, is still being sent to {', '.join(slow)}, where the next "
        "command finds it; upriver push puts it into a server's store beforehand"
    )
    with working("sending the program"):
        answer.wait()


def _document(
    model: str, answer: Offload, asked: Sequence[ServedRequest], tensors: Sequence[torch.Tensor]
) -> dict[str, Any]:
    phases = ("total_s", "decide_s", "device_s", "link_s", "server_s")
    return {
        "model": model,
        "outputs": [
            {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
            for tensor in tensors
        ],
        "top": _top(tensors),
        "requests": dict(answer.counts),
        "last": asdict(asked[-1]),
        "median": {phase: median(getattr(served, phase) for served in asked) for phase in phases},
        "stages": answer.program.num_stages,
        "digest": answer.program.digest,
        "exactness": answer.exactness,
        "why": answer.why,
    }


def _top(tensors: Sequence[torch.Tensor]) -> list[dict[str, float]] | None:
    """Return the likeliest classes of one sample, or None for other outputs."""
    if len(tensors) != 1 or tensors[0].dim() != 2 or tensors[0].shape[0] != 1:
        return None
    [scores] = tensors[0]
    if not scores.is_floating_point() or len(scores) < 2:
        return None
    shares, classes = scores.float().softmax(0).topk(min(TOP, len(scores)))
    return [
        {"class": number, "share": share}
        for number, share in zip(classes.tolist(), shares.tolist(), strict=True)
    ]


def _print(document: dict[str, Any]) -> None:
    if document["top"] is not None:
        rows = [(row["class"], f"{100 * row['share']:.2f}") for row in document["top"]]
        print_table(("class", "%"), rows, left=frozenset())
    else:
        for output in document["outputs"]:
            print(f"{output['dtype']} {tuple(output['shape'])}")
    print()
    last, counts = document["last"], document["requests"]
    fields = {
        "ran": _where(last, document["stages"]),
        **{phase.replace("_s", " s"): f"{seconds:.6f}" for phase, seconds in document["median"].items()},
    }
    if counts["requests"] > 1:
        fields["requests"] = ", ".join(f"{name} {count}" for name, count in counts.items())
    if last["why_not"]:
        fields["server"] = last["why_not"]
    print_fields(fields)
    print(f"\n{document['why']}")


def _where(last: dict[str, Any], stages: int) -> str:
    if not last["server"]:
        return f"all {stages} stages here"
    return f"{last['cut']} of {stages} stages here, the rest on {last['server']}"
