"""``upriver cuts``: every place at which a model can be cut, and what a cut there costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from upriver.cli.common import DebugOption, JsonOption, emit, print_table, working
from upriver.cli.options import (
    InputShapeOption,
    MicroBatchOption,
    ModelArgument,
    check_micro_batch,
    check_module,
    parse_shape,
)

if TYPE_CHECKING:
    from upriver.program.program import Program


def cuts(
    model: ModelArgument,
    freeze_to: Annotated[
        str | None, typer.Option(metavar="MODULE", help="Last frozen module: no later cut serves training.")
    ] = None,
    micro_batch: MicroBatchOption = 16,
    input_shape: InputShapeOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List every cut of a model: bytes that cross it, floating-point operations and parameters before it."""
    from upriver.program.capture import capture
    from upriver.program.names import load_model

    check_micro_batch(micro_batch)
    network, spec = load_model(model, input_shape=parse_shape(input_shape))
    check_module(network, freeze_to)
    freeze_point = None
    with working("capturing"):
        program = capture(network, (spec.example(micro_batch),))
        if freeze_to is not None:
            frozen = capture(network, (spec.example(micro_batch),), boundary=freeze_to)
            freeze_point = (frozen.num_stages, freeze_to)
    rows = cut_rows(program, freeze_point)
    emit(rows, as_json=as_json, text=lambda: _print(rows))


def cut_rows(program: Program, freeze_point: tuple[int, str] | None) -> list[dict[str, object]]:
    """One row a cut, from the model's input (cut 0) to its output.

    Args:
        freeze_point: The largest cut that training allows and the module it lies after; None allows all.
    """
    rows: list[dict[str, object]] = []
    parameters, flops = 0, 0.0
    for cut in range(program.num_stages + 1):
        live = program.live(cut)
        if cut:
            parameters += program.stages[cut - 1].param_bytes
            flops += program.stages[cut - 1].flops
        late = freeze_point is not None and cut > freeze_point[0]
        rows.append(
            {
                "cut": cut,
                "after": program.stages[cut - 1].name if cut else "input",
                "bytes_per_sample": sum(value.spec.nbytes for value in live) / program.micro_batch,
                "tensors": len(live),
                "param_bytes_before": parameters,
                "flops_before": flops,
                "legal": not late,
                "why_not": f"lies after the freeze point {freeze_point[1]!r}"
                if late and freeze_point
                else "",
            }
        )
    return rows


def _print(rows: list[dict[str, object]]) -> None:
    columns = ("cut", "after", "KB/sample", "tensors", "parameters MB", "MFLOP", "legal")
    table = [
        (
            row["cut"],
            row["after"],
            f"{float(str(row['bytes_per_sample'])) / 1e3:.1f}",
            row["tensors"],
            f"{float(str(row['param_bytes_before'])) / 1e6:.2f}",
            f"{float(str(row['flops_before'])) / 1e6:.0f}",
            "yes" if row["legal"] else f"no: {row['why_not']}",
        )
        for row in rows
    ]
    print_table(columns, table, left=frozenset({1, 6}))
