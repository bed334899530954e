"""Report a load of ``upriver coldstart``: as a document, for people, and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from upriver.cli.common import print_fields
from upriver.text import bytes_text, rate_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from upriver.coldstart import Arriving, Loading
    from upriver.coldstart.load_handle import LoadEvent
    from upriver.report.cold_plot import WeightSpans


def streamed(handle: Arriving | Loading, moments: Sequence[LoadEvent], answer_s: float) -> dict[str, Any]:
    """Return the load's history in JSON.

    Args:
        handle: Handle of a finished load.
        answer_s: Seconds from its start to the first answer.
    """
    at = {moment.kind: moment.at_s for moment in reversed(moments)}
    requests = [moment for moment in moments if moment.kind == "request"]
    before = [moment for moment in moments if moment.kind == "filled" and moment.at_s <= answer_s]
    constructed = {"constructed_s": at["constructed"]} if "constructed" in at else {}
    return {
        "weight_bytes": handle.nbytes,
        **constructed,
        "found_s": at["found"],
        "first_byte_s": at.get("first_byte"),
        "loaded_s": at["loaded"],
        "bytes_before_answer": sum(moment.nbytes for moment in before),
        "requests": len(requests),
        "requested_bytes": sum(moment.nbytes for moment in requests),
        "refetched": sum(moment.kind == "refetch" for moment in moments),
        "bytes_per_s": handle.nbytes / max(1e-9, at["loaded"] - at.get("request", at["loaded"])),
        "moments": [
            {"at_s": moment.at_s, "kind": moment.kind, "weights": moment.weights, "bytes": moment.nbytes}
            for moment in moments
        ],
    }


def print_load(document: Mapping[str, Any]) -> None:
    """Print the document for people."""
    fields = _of_model(document) if "model" in document else _of_program(document)
    fields |= _times(document) if document["streamed"] else {"first answer": f"{document['answer_s']:.3f} s"}
    if (plain := document.get("plain")) is not None:
        same = "the same to the bit" if plain["same_answer"] else "ANOTHER ONE"
        took = f"{plain['answer_s']:.3f} s to its answer, in a process that is warm by then"
        fields["the plain way"] = f"{took}; it is {same}"
    print_fields(fields)


def _of_model(document: Mapping[str, Any]) -> dict[str, str]:
    return {"model": document["model"], "weights": bytes_text(document["weight_bytes"])}


def _of_program(document: Mapping[str, Any]) -> dict[str, str]:
    stop, stages, weights = document["stop"], document["stages"], bytes_text(document["weight_bytes"])
    if not document["streamed"]:
        weights += ", read whole before the first stage: no manifest is of these; push the program again"
    elif stop < stages:
        weights += f" of the {bytes_text(document['program_bytes'])} that all stages read"
    return {
        "program": document["digest"],
        "stages": f"{stop} of {stages}, for {document['micro_batch']} samples",
        "weights": weights,
    }


def _times(document: Mapping[str, Any]) -> dict[str, str]:
    share = document["bytes_before_answer"] / document["weight_bytes"] if document["weight_bytes"] else 1.0
    asked = f"{bytes_text(document['requested_bytes'])} in {document['requests']} requests"
    seconds = {
        "constructed": document.get("constructed_s"),
        "weights found": document["found_s"],
        "first byte": document["first_byte_s"],
    }
    fields = {name: f"{at_s:.3f} s" for name, at_s in seconds.items() if at_s is not None}
    fields["first answer"] = f"{document['answer_s']:.3f} s, with {share:.0%} of the weights there"
    fields["everything there"] = f"{document['loaded_s']:.3f} s"
    fields["asked for"] = f"{asked}, at {rate_text(document['bytes_per_s'])}"
    if document["refetched"]:
        fields["damaged on the way"] = f"{document['refetched']} pieces, read again"
    return fields


def picture(
    handle: Arriving | Loading, moments: Sequence[LoadEvent], *, answer_s: float, title: str
) -> Figure:
    """Draw the load's history; see `streamed`."""
    from upriver.report.cold_plot import plot_load

    first_byte_s = next((moment.at_s for moment in moments if moment.kind == "first_byte"), None)
    return plot_load(
        _spans(handle, moments), first_byte_s=first_byte_s, answer_s=answer_s, title=f"Cold start of {title}"
    )


def _spans(handle: Arriving | Loading, moments: Sequence[LoadEvent]) -> list[WeightSpans]:
    """Return the times of each weight: weights in the order of their reads, then those of the file."""
    from upriver.report.cold_plot import WeightSpans

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
        WeightSpans(name, nbytes[name], asked.get(name, filled[name]), filled[name], touched.get(name))
        for name in order
        if nbytes[name]
    ]
