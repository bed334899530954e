"""Turn the rows of a stretch into micro-batches, and micro-batches into rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from upriver.features import Row
from upriver.features.stretch import Stretch, row_keys, stretch_of
from upriver.pipeline import Dataset, SampleRef
from upriver.protocol import (
    PREFIX_NBYTES,
    Caps,
    RunRequest,
    aligned_empty,
    build_batch,
    encode_data,
    parse_data_header,
)
from upriver.types import MicroBatch


def stretch_of_request(
    request: RunRequest, dataset: Dataset, *, fingerprint: Mapping[str, str], num_threads: int
) -> Stretch:
    """Return the stretch whose rows a request asks for."""
    return stretch_of(
        dataset.chain,
        cut=request.stop,
        program=request.program,
        view=(request.seed, request.epoch),
        micro_batch=request.micro_batch,
        fingerprint={**fingerprint, "num_threads": str(num_threads)},
    )


def keys_of(stretch: Stretch, refs: Sequence[SampleRef], ids: Sequence[int]) -> list[bytes]:
    """Return the keys of samples within a stretch."""
    return row_keys(refs, ids, drawn=stretch.view is not None)


def rows_of(head: bytes, payload: memoryview, keys: Mapping[int, bytes], caps: Caps) -> dict[bytes, Row]:
    """Return the rows of a data frame in memory of their own, without skipped samples.

    Each tensor must have a row for each sample; before the model it has one tensor for each.

    Args:
        keys: Key of each sample.
    """
    header = parse_data_header(head[PREFIX_NBYTES:], len(payload), caps)
    copied = aligned_empty(len(payload))
    copied.numpy()[:] = payload
    batch = build_batch(header, copied, checksum=header.checksum)
    return {
        keys[sample]: _row(batch, number)
        for number, sample in enumerate(batch.ids)
        if sample not in batch.skipped
    }


def frame_of(
    rows: Sequence[Row], ids: Sequence[int], *, position: int, micro_batch: int
) -> tuple[bytes, memoryview] | None:
    """Return a data frame of kept rows: its head and its payload. None if the rows have different forms."""
    if position < 0:
        tensors = tuple(tensor for row in rows for tensor in row)
    else:
        columns = list(zip(*rows, strict=True)) if len({len(row) for row in rows}) == 1 else []
        if not columns or not all(map(_alike, columns)):
            return None
        tensors = tuple(_joined(column, micro_batch) for column in columns)
    head, parts = encode_data(MicroBatch(ids=tuple(ids), position=position, tensors=tensors))
    return head, memoryview(b"".join(parts))


def _row(batch: MicroBatch, number: int) -> Row:
    if batch.position < 0:
        return (batch.tensors[number],)
    return tuple(tensor.narrow(0, number, 1) for tensor in batch.tensors)


def _alike(rows: Sequence[torch.Tensor]) -> bool:
    return len({(row.dtype, row.shape, row.stride()) for row in rows}) == 1


def _joined(rows: Sequence[torch.Tensor], micro_batch: int) -> torch.Tensor:
    """Return a micro-batch of rows with the strides of the one that they come from; padding is zero."""
    first = rows[0]
    shape = (micro_batch, *first.shape[1:])
    if first.stride(0) == first.numel():  # dense, with samples one after the other
        joined = torch.empty_strided(shape, first.stride(), dtype=first.dtype, device="cpu")
        torch.cat(list(rows), out=joined[: len(rows)])
        joined[len(rows) :] = 0
        return joined
    padding = torch.zeros((micro_batch - len(rows), *first.shape[1:]), dtype=first.dtype, device="cpu")
    return torch.cat([*rows, padding]) if len(padding) else torch.cat(list(rows))
