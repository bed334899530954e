"""What happened in a load, moment by moment: the timeline of PISeL's figures, as it was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from upriver.coldstart.fetch.weight_stream import Event
from upriver.coldstart.format.checkpoint import WeightSource

FIRST_BYTE, FILLED, TOUCHED = "first_byte", "filled", "touched"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadEvent:
    """Something that happened.

    Attributes:
        at_s: Seconds since the load began.
        kind: ``found`` (where the weights lie), ``constructed`` (the model), ``request``, ``first_byte``,
            ``refetch`` and ``filled`` of the stream, ``touched`` (something first read a weight, and waited
            for it where it was not filled), ``loaded`` or ``failed``.
        weights: Names of the first and the last one that it is about; empty where it is about none.
        nbytes: Of them.
    """

    at_s: float
    kind: str
    weights: tuple[str, ...] = ()
    nbytes: int = 0


def moments(
    source: WeightSource,
    *,
    began_s: float,
    steps: Mapping[str, float],
    stream_s: float,
    events: Iterable[Event],
    touched: Mapping[int, float],
) -> list[LoadEvent]:
    """All of it, in order.

    Args:
        source: Of the weights, as they are numbered.
        began_s: When the load began, as all times but those of events by ``time.monotonic``.
        steps: Kinds of moments that are about no weight, and when they were.
        stream_s: When the stream began, which events count from.
        events: The stream's.
        touched: When weights were first read.
    """
    tensors = source.tensors
    found = [LoadEvent(at_s=at - began_s, kind=kind) for kind, at in steps.items()]
    found += [
        LoadEvent(
            at_s=stream_s + event.at_s - began_s,
            kind=event.kind,
            weights=tuple(dict.fromkeys(tensors[at].name for at in (event.tensors[0], event.tensors[-1]))),
            nbytes=event.nbytes,
        )
        for event in events
    ]
    found += [
        LoadEvent(
            at_s=at - began_s,
            kind=TOUCHED,
            weights=(tensors[index].name,),
            nbytes=tensors[index].stop - tensors[index].start,
        )
        for index, at in touched.items()
    ]
    return sorted(found, key=lambda moment: moment.at_s)
