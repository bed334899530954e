"""Plan the range requests for groups of tensors.

A group is virtual. Its tensors that lie next to each other form one range, in any order. Gaps between two of
them are read along where that costs less than one more request. A gap is padding or a tensor of another
group. Consecutive groups may share a request as well: a stream writes each weight as its bytes arrive, so no
weight waits for the end of a request. Requests begin and end at the bounds of checksum chunks, so that
arrived bytes can be checked at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from upriver.coldstart.format.checkpoint import TensorLocation, WeightSource

PADDING = -1
"""Tensor index of bytes that are read along and discarded."""


class TensorPart(NamedTuple):
    """Bytes of one tensor, within one checksum chunk.

    Attributes:
        tensor: Index of the tensor in the source, or `PADDING`.
        start: First byte, counted from the start of the tensor.
        stop: Byte after the last one.
    """

    tensor: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RangeRequest:
    """Request for one range of one object.

    Attributes:
        start: First requested byte of the object.
        parts: Consecutive parts from there on.
    """

    path: str
    start: int
    parts: tuple[TensorPart, ...]
    tensors: frozenset[int]
    nbytes: int

    @classmethod
    def of(cls, path: str, start: int, parts: Sequence[TensorPart]) -> RangeRequest:
        """Return a request for these parts; the first one lies at ``start``."""
        return cls(
            path=path,
            start=start,
            parts=tuple(parts),
            tensors=frozenset(part.tensor for part in parts) - {PADDING},
            nbytes=sum(part.nbytes for part in parts),
        )

    @property
    def span(self) -> range:
        """Indices from the first tensor to the last."""
        return range(min(self.tensors), max(self.tensors) + 1)

    @property
    def stop(self) -> int:
        """Byte of the object after the last requested one."""
        return self.start + self.nbytes

    def segments(self) -> list[TensorPart]:
        """Return the parts, with consecutive parts of one tensor joined."""
        found: list[TensorPart] = []
        for part in self.parts:
            if found and part.tensor == found[-1].tensor != PADDING and part.start == found[-1].stop:
                found[-1] = found[-1]._replace(stop=part.stop)
            else:
                found.append(part)
        return found


def requests_for(
    source: WeightSource,
    groups: Sequence[range],
    *,
    request_bytes: int,
    along_bytes: int,
    join_bytes: int = 0,
) -> list[RangeRequest]:
    """Return the requests for all tensors, group by group; within a group the first tensors come first.

    Args:
        along_bytes: Largest gap between two tensors that is read along.
        join_bytes: Most bytes of a request that joins consecutive groups of an object; at most
            ``request_bytes``.
    """
    found: list[RangeRequest] = []
    for group in groups:
        requests = _requests_of(source, group, request_bytes=request_bytes, along_bytes=along_bytes)
        found += sorted(requests, key=lambda request: request.span.start)
    return list(_joined(found, join_bytes=join_bytes, along_bytes=along_bytes)) if join_bytes else found


def apart(
    requests: Iterable[RangeRequest], path: str, stop: int
) -> tuple[list[RangeRequest], list[RangeRequest]]:
    """Split requests into those for the first bytes of an object and the others, and divide some of them.

    Args:
        requests: Requests that each begin and end with a tensor.
        stop: Byte after the object's first bytes.
    """
    among: list[RangeRequest] = []
    others: list[RangeRequest] = []
    for request in requests:
        if request.path != path or request.start >= stop:
            others.append(request)
        elif request.stop <= stop:
            among.append(request)
        else:
            first, second = _divided(request, stop)
            among.append(first)
            others.append(second)
    return among, others


def _divided(request: RangeRequest, at: int) -> tuple[RangeRequest, RangeRequest]:
    """Divide a request at a byte of the object that lies within it."""
    before: list[TensorPart] = []
    rest, left = deque(request.parts), at - request.start
    while rest[0].nbytes <= left:
        before.append(rest.popleft())
        left -= before[-1].nbytes
    if left:
        part = rest.popleft()
        middle = part.start + left
        before.append(part._replace(stop=middle))
        rest.appendleft(part._replace(start=middle))
    path = request.path
    return _without_padding(path, request.start, before), _without_padding(path, at, list(rest))


def parts_of(
    index: int, tensor: TensorLocation, *, chunk_bytes: int, request_bytes: int
) -> Iterator[TensorPart]:
    """Cut a tensor into parts at its checksum chunks, and where a part would exceed a request."""
    if not tensor.crc32c:
        yield from cut(TensorPart(index, 0, tensor.nbytes), request_bytes)
        return
    for chunk in range(len(tensor.crc32c)):
        yield from cut(chunk_of(index, tensor, chunk, chunk_bytes=chunk_bytes), request_bytes)


def chunk_of(index: int, tensor: TensorLocation, chunk: int, *, chunk_bytes: int) -> TensorPart:
    """Return the part of a tensor that one checksum covers."""
    start = chunk * chunk_bytes
    return TensorPart(index, start, min(start + chunk_bytes, tensor.nbytes))


def cut(part: TensorPart, most_bytes: int) -> Iterator[TensorPart]:
    """Cut a part into parts of at most `most_bytes`."""
    for start in range(part.start, part.stop, most_bytes):
        yield TensorPart(part.tensor, start, min(start + most_bytes, part.stop))


def _requests_of(
    source: WeightSource, group: range, *, request_bytes: int, along_bytes: int
) -> Iterator[RangeRequest]:
    """Yield the requests for one group, in the order in which its tensors lie."""
    path, begin, end = "", 0, 0
    parts: list[TensorPart] = []
    for part in _as_they_lie(source, group, request_bytes):
        tensor = source.tensors[part.tensor]
        start, stop = tensor.start + part.start, tensor.start + part.stop
        beside = tensor.path == path and 0 <= start - end <= along_bytes
        if parts and not (beside and stop - begin <= request_bytes):
            yield RangeRequest.of(path, begin, parts)
            parts = []
        if not parts:
            path, begin, end = tensor.path, start, start
        if start > end:
            parts.append(TensorPart(PADDING, 0, start - end))
        parts.append(part)
        end = stop
    if parts:
        yield RangeRequest.of(path, begin, parts)


def _joined(requests: Iterable[RangeRequest], *, join_bytes: int, along_bytes: int) -> Iterator[RangeRequest]:
    """Join requests for the same bytes in the same order; fill the first ones up first."""
    path, begin, end = "", 0, 0
    parts: list[TensorPart] = []
    for request in requests:
        rest, at = deque(request.parts), request.start
        if parts and request.path == path and 0 <= at - end <= along_bytes:
            if at > end:
                rest.appendleft(TensorPart(PADDING, 0, at - end))
                at = end
            while rest and at + rest[0].nbytes - begin <= join_bytes:
                parts.append(rest.popleft())
                at = end = at + parts[-1].nbytes
        if not rest:
            continue
        if parts:
            yield _without_padding(path, begin, parts)
        path, begin, end = request.path, at, request.start + request.nbytes
        parts = list(rest)
    if parts:
        yield _without_padding(path, begin, parts)


def _without_padding(path: str, start: int, parts: Sequence[TensorPart]) -> RangeRequest:
    """Return a request for these parts, without leading and trailing padding."""
    tensors = [number for number, part in enumerate(parts) if part.tensor != PADDING]
    start += sum(part.nbytes for part in parts[: tensors[0]])
    return RangeRequest.of(path, start, parts[tensors[0] : tensors[-1] + 1])


def _as_they_lie(source: WeightSource, group: range, request_bytes: int) -> Iterator[TensorPart]:
    tensors = source.tensors
    there: Iterable[int] = (index for index in group if tensors[index].start < tensors[index].stop)
    for index in sorted(there, key=lambda index: (tensors[index].path, tensors[index].start)):
        yield from parts_of(
            index, tensors[index], chunk_bytes=source.chunk_bytes, request_bytes=request_bytes
        )
