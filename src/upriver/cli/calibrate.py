"""``upriver calibrate``: fit this machine's latency models, and compare their errors with LoADPart's."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from upriver.cli.common import DebugOption, JsonOption, emit, named_as_options, print_fields, print_table
from upriver.cli.output import check_output, write_whole
from upriver.progress import counted_steps, note

if TYPE_CHECKING:
    from upriver.profile.latency.predictor import KindError, Predictor

MINUTES, QUICK_MINUTES = 10.0, 2.0
"""Default time limits in minutes: about the time of all configurations on one core."""

_LEGEND = """\
Root of the mean squared error in microseconds and mean absolute error in percent, on configurations held out:
LoADPart's models (with the features of its edge server and of its device), ours, and ours over those of 50 us
and more; then what LoADPart's paper reports (Table III)."""


def calibrate(
    device: Annotated[str, typer.Option(help="Where operators are timed, as torch names it.")] = "cpu",
    minutes: Annotated[
        float | None, typer.Option(help="How long it may take; 10, or 2 with --quick, without.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Time an eighth of the configurations.")] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write the models there, too.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Time operators on this machine, fit its latency models and keep them for this device.

    Nothing else should run meanwhile. Held-out configurations show how far the models are off, beside what
    LoADPart's paper reports (Table III).
    """
    check_output(output, "--output")
    from upriver.profile.latency import calibration
    from upriver.profile.latency.serialization import keep, predictor_to_json

    allowed = minutes if minutes is not None else QUICK_MINUTES if quick else MINUTES
    began_s = time.monotonic()

    def spent() -> float:
        """Return the share of the allowed time that has passed: it may run out before all is timed."""
        return min(1.0, (time.monotonic() - began_s) / (60 * allowed))

    with counted_steps("drawing configurations") as show, named_as_options(minutes="--minutes"):
        predictor = calibration.calibrate(
            device,
            minutes=allowed,
            quick=quick,
            progress=lambda kind, done, total: show(f"timing {kind}", max(done, total * spent()), total),
        )
    if output is not None:
        write_whole(output, (predictor_to_json(predictor) + "\n").encode())
    try:
        kept: Path | None = keep(predictor)
    except OSError as error:
        kept = None
        note(f"The models are not kept: {error.strerror or error}")
    emit(_document(predictor, kept), as_json=as_json, text=lambda: _print(predictor, kept))


def _document(predictor: Predictor, kept: Path | None) -> dict[str, Any]:
    return {
        "device": predictor.place.device,
        "threads": predictor.place.threads,
        "torch": predictor.place.versions["torch"],
        "fitted_at": predictor.fitted_at,
        "configurations": predictor.configurations,
        "kept": str(kept) if kept is not None else None,
        "errors": [asdict(error) for error in predictor.errors],
        "paper": _paper(),
    }


def _paper() -> list[dict[str, Any]]:
    """Return the paper's Table III with the field names of the rest of the document."""
    from upriver.profile.latency.calibration import TABLE_III

    return [
        {"kind": kind, "model": side, "rmse_us": rmse, "mape_percent": mape}
        for kind, sides in TABLE_III.items()
        for side, (rmse, mape) in sides.items()
    ]


def _print(predictor: Predictor, kept: Path | None) -> None:
    place = predictor.place
    print_fields(
        {
            "device": f"{place.device} of {place.host}, {place.threads} threads",
            "torch": place.versions["torch"],
            "fitted to": f"{predictor.configurations} configurations",
            "kept in": kept if kept is not None else "nothing",
        }
    )
    print(f"\n{_LEGEND}\n")
    errors = {(error.kind, error.model): error for error in predictor.errors}
    paper = {(row["kind"], row["model"]): row for row in _paper()}
    columns = ["kind", "n", "edge us", "%", "device us", "%", "ours us", "%", ">50us %", "III edge us", "%"]
    rows = []
    for kind in dict.fromkeys(error.kind for error in predictor.errors):
        ours = errors.get((kind, "ours"))
        row = [kind, ours.count if ours is not None else "-"]
        for model in ("edge", "device", "ours"):
            row += _cells(errors.get((kind, model)))
        row.append(_number(ours.mape_long_percent if ours is not None else None))
        for side in ("edge", "device"):
            found = paper.get((kind, side), {})
            row += [_number(found.get("rmse_us")), _number(found.get("mape_percent"))]
        rows.append(row)
    print_table([*columns, "III device us", "%"], rows, left=frozenset({0}))


def _cells(error: KindError | None) -> list[str]:
    return [_number(error.rmse_us), _number(error.mape_percent)] if error is not None else ["-", "-"]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
