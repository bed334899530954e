"""Record the events of a load: the timeline of PISeL's figures, as measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from upriver.coldstart.fetch.weight_stream import StreamEvent
from upriver.coldstart.format.checkpoint import WeightSource

FIRST_BYTE, FILLED, TOUCHED = "first_byte", "filled", "touched"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadEvent:
    """Event of a load.

    Attributes:
        at_s: Seconds since the load began.
        kind: ``found`` (the weights' location is known), ``constructed`` (the model), ``request``,
            ``first_byte``, ``refetch`` and ``filled`` of the stream, ``touched`` (first read of a weight,
            which waits if it has not arrived), ``loaded`` or ``failed``.
        weights: Names of the first and the last weight concerned; empty if none is.
        nbytes: Bytes of these weights.
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
    events: Iterable[StreamEvent],
    touched: Mapping[int, float],
) -> list[LoadEvent]:
    """Return all events in order.

    Args:
        source: The numbered weights.
        began_s: Start of the load by ``time.monotonic``, as all times but those of `events`.
        steps: Times of events that concern no weight, by kind.
        stream_s: Start of the stream, from which `events` count.
        events: Events of the stream.
        touched: Time of each weight's first read.
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
