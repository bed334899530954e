"""``upriver cuts``: list every position at which a model can be cut, and the cost of a cut there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from upriver.cli.common import DebugOption, JsonOption, emit, print_table, working
from upriver.cli.options import (
    AutocastOption,
    GranularityOption,
    InputShapeOption,
    MicroBatchOption,
    ModelArgument,
    check_granularity,
    check_micro_batch,
    check_module,
    parse_shape,
)
from upriver.cli.output import check_picture, write_picture
from upriver.errors import ConfigError
from upriver.progress import note

if TYPE_CHECKING:
    from upriver.program.models.loadpart_nodes import PaperNode
    from upriver.program.split.cut_survey import Survey


def cuts(
    model: ModelArgument,
    freeze_to: Annotated[
        str | None, typer.Option(metavar="MODULE", help="Last frozen module: no later cut serves training.")
    ] = None,
    granularity: GranularityOption = None,
    nodes: Annotated[
        str | None,
        typer.Option(metavar="paper", help="Number nodes as LoADPart does: a bias is one of its own."),
    ] = None,
    micro_batch: MicroBatchOption = 16,
    input_shape: InputShapeOption = None,
    autocast: AutocastOption = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw bytes and operations over the cuts.")
    ] = None,
    stored_bytes: Annotated[
        float | None,
        typer.Option(
            help="With --plot: bytes of a stored sample, as a line; those of the model's input without it."
        ),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List every cut of a model: bytes that cross it, floating-point operations and parameters before it.

    With --freeze-to, everything that the last frozen module needs comes first. With --nodes paper, the list
    is that of LoADPart (ICDCS 2022): its nodes by its numbers, and what crosses a cut after each.
    """
    from upriver.program.graph.autocast import autocast_dtype
    from upriver.program.models.loadpart_nodes import paper_nodes
    from upriver.program.models.registry import load_model
    from upriver.program.split.cut_survey import survey

    check_micro_batch(micro_batch)
    ends = check_granularity(granularity)
    _check_nodes(nodes, {"--freeze-to": freeze_to, "--granularity": granularity, "--plot": plot})
    precision = autocast_dtype(autocast)
    check_picture(plot)
    _check_stored_bytes(stored_bytes, plot)
    network, inputs = load_model(model, input_shape=parse_shape(input_shape))
    check_module(network, freeze_to)
    if nodes is not None:
        with working("capturing"):
            numbered = paper_nodes(network, inputs.example(micro_batch), autocast=precision)
        emit([asdict(node) for node in numbered], as_json=as_json, text=lambda: _print_nodes(numbered))
        return
    with working("capturing"):
        found = survey(
            network,
            inputs.example(micro_batch),
            granularity=ends,
            freeze_to=freeze_to,
            autocast=precision,
        )
    if plot is not None:
        from upriver.report.cuts_plot import plot_cuts

        write_picture(plot, plot_cuts(found.rows, title=f"Cuts of {model}", stored_bytes=stored_bytes))
        note(f"Picture: {plot}")
    emit([asdict(row) for row in found.rows], as_json=as_json, text=lambda: _print(found))


def _check_stored_bytes(stored_bytes: float | None, plot: Path | None) -> None:
    from upriver.types import MOST_BYTES, require_finite

    if stored_bytes is None:
        return
    require_finite("stored_bytes", stored_bytes, at_most=MOST_BYTES, positive=True)
    if plot is None:
        raise ConfigError("--stored-bytes is a line of the picture: give --plot FILE.png, too")


def _check_nodes(nodes: str | None, others: Mapping[str, object]) -> None:
    """Check ``--nodes`` and the options that it excludes.

    The paper numbers all nodes in the order in which they run, so no option changes them.
    """
    if nodes is None:
        return
    if nodes != "paper":
        raise ConfigError(f"--nodes must be paper, got {nodes!r}")
    for option, value in others.items():
        if value is not None:
            raise ConfigError(f"--nodes paper and {option} exclude each other: give one of them")


def _print(found: Survey) -> None:
    columns = ("cut", "after", "KB/sample", "tensors", "parameters MB", "MFLOP", "legal")
    table = [
        (
            row.cut,
            row.after,
            f"{row.bytes_per_sample / 1e3:.1f}",
            row.tensors,
            f"{row.param_bytes_before / 1e6:.2f}",
            f"{row.flops_before / 1e6:.0f}",
            "yes" if row.legal else "no",
        )
        for row in found.rows
    ]
    print_table(columns, table, left=frozenset({1, 6}))
    _print_reasons(found)


def _print_nodes(numbered: Sequence[PaperNode]) -> None:
    columns = ("node", "kind", "after", "KB/sample", "tensors", "runnable")
    table = [
        (
            node.number,
            node.kind,
            node.name,
            f"{node.cut_bytes / 1e3:.1f}",
            node.tensors,
            "yes" if node.runnable else "no",
        )
        for node in numbered
    ]
    print_table(columns, table, left=frozenset({1, 2, 5}))


def _print_reasons(found: Survey) -> None:
    """Print each reason once, with its cuts."""
    reasons: dict[str, list[int]] = {}
    for row in found.rows:
        if not row.legal:
            reasons.setdefault(row.why_not, []).append(row.cut)
    for why_not, numbers in reasons.items():
        which = f"cut {numbers[0]}" if len(numbers) == 1 else f"cuts {numbers[0]} to {numbers[-1]}"
        print(f"not legal: {which}: {why_not}")
