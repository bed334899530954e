"""The weights of a program while they arrive: the memory that they come into, and who waits for them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping

import torch

from upriver.coldstart.fetch.weight_stream import Sink, Stream
from upriver.coldstart.format.checkpoint import WeightSource
from upriver.coldstart.format.manifest import Manifest, StoredTensor
from upriver.coldstart.load_handle import Groupings, Handle, under_way
from upriver.coldstart.model.assignment import memories
from upriver.errors import Cancelled, ProgramError, UpriverError
from upriver.program.graph.executor import BeforeStage, Program
from upriver.program.graph.schema import DTYPES
from upriver.program.graph.weights_file import Stored
from upriver.text import error_text
from upriver.types import require_type

PIECE_BYTES = 16 << 20
"""Of a file that is hashed, between two looks whether anybody still wants it."""


class ArrivingFile(Stored):
    """A weights file that is still to come, or those of its tensors that are wanted.

    Each tensor of it has its place in memory as in the file, and with that the alignment of a file that was
    read: alignment decides low bits. Where a program computes elsewhere, its tensors lie there, and the file
    is kept beside them if all of it is wanted.

    Args:
        manifest: What will be in it.
        wanted: Keys of the tensors that are to come; None for all, and so for the file.
        device: Where the program computes.
    """

    def __init__(self, manifest: Manifest, wanted: Collection[str] | None, device: torch.device) -> None:
        self._whole, self._here = wanted is None, device.type == "cpu"
        chosen = [each for each in manifest.tensors if wanted is None or each.name in wanted]
        held = chosen if self._whole or self._here else []
        end = manifest.nbytes if self._whole else max((tensor.stop for tensor in held), default=0)
        self._data = torch.empty(end, dtype=torch.uint8, device="cpu")
        if self._whole:
            self._write_between(manifest)
        self._held = {tensor.name: self._view(tensor) for tensor in held}
        self.tensors = self._held if self._here else {each.name: _empty(each, device) for each in chosen}
        self.nbytes = end if self._whole else sum(tensor.stop - tensor.start for tensor in chosen)
        self.complete: Callable[[], object] = lambda: None
        """Returns when everything is there; raises where it will not be."""

    def targets(self, key: str) -> tuple[torch.Tensor, ...]:
        """All memory that a tensor is to be written to."""
        here = (self._held[key],) if key in self._held else ()
        return here if self._here else (self.tensors[key], *here)

    def encode(self) -> memoryview:
        """The file, once it is there.

        Raises:
            UpriverError: If it does not come, or was not wanted whole.
        """
        if not self._whole:
            raise ProgramError("the weights file is not here: only the weights of some stages were asked for")
        self.complete()
        return self._data.numpy().data

    def pieces(self) -> Iterator[memoryview]:
        """The file as far as it has come."""
        data = self._data.numpy().data
        for start in range(0, len(data), PIECE_BYTES):
            yield data[start : start + PIECE_BYTES]

    def _write_between(self, manifest: Manifest) -> None:
        """What the file has beside tensors: a header, and zeros that pad."""
        data, end = self._data.numpy().data, 0
        for tensor in manifest.tensors:
            data[end : tensor.start] = bytes(tensor.start - end)
            end = tensor.stop
        data[end:] = bytes(len(data) - end)
        head = manifest.head()
        data[: len(head)] = head

    def _view(self, tensor: StoredTensor) -> torch.Tensor:
        return self._data[tensor.start : tensor.stop].view(DTYPES[tensor.dtype]).view(tensor.shape)


def _empty(tensor: StoredTensor, device: torch.device) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device=device)


class Arriving(Handle[Program]):
    """What is on its way to a program, or has come."""

    def __init__(
        self,
        source: WeightSource,
        file: ArrivingFile,
        stream_of: Callable[[Sink], Stream],
        *,
        stop: int,
        digest: str | None,
        steps: Mapping[str, float],
        groupings: Groupings,
    ) -> None:
        """Prepare; nothing is asked for yet.

        Args:
            source: See :class:`Handle`, as ``stream_of``, ``steps`` and ``groupings``.
            file: What the weights come into.
            stream_of: See there.
            stop: Stages before this position may run.
            digest: Of the whole file; None where not all of it is wanted.
            steps: See there.
            groupings: See there.
        """
        super().__init__(
            source,
            memories(source.tensors, [file.targets(placed.name) for placed in source.tensors]),
            stream_of,
            steps=steps,
            groupings=groupings,
            also=int(digest is not None),  # that the file is what it is called
        )
        self._stop, self._digest = stop, digest
        self._file: ArrivingFile | None = file
        self._numbers = {placed.name: number for number, placed in enumerate(source.tensors)}
        file.complete = self._arrivals.wait_for_all

    def before_stage(self, position: int, keys: Collection[str]) -> None:
        """See :data:`~upriver.program.graph.executor.BeforeStage`.

        Raises:
            ProgramError: If the stage was not asked for, or the file is not the one that the graph names.
            UpriverError: If a weight does not come.
        """
        _check_wanted(position, self._stop)
        numbers = sorted(self._numbers[key] for key in keys)
        for number in numbers:
            self.touched.setdefault(number, time.monotonic())
        self._arrivals.wait(numbers, self._stream.hurry)

    def _all_here(self, last: int | None) -> None:
        if self._digest is None:
            self._finish(last)
            return
        if last is not None:
            self._arrivals.filled(last)
        self._begin_beside("digest", self._check_digest, self._file)

    def _check_digest(self, file: ArrivingFile) -> None:
        """Hold the whole file against its name, behind everybody who has stages to run."""
        try:
            step_back()
            folded = hashlib.sha256()
            for piece in file.pieces():
                if self._owner() is None:
                    raise Cancelled("nobody has the program any more")
                folded.update(piece)
            if folded.hexdigest() != self._digest:
                raise ProgramError(
                    f"{self._source.path} has digest {folded.hexdigest()}, the graph names {self._digest}"
                )
        except Exception as raised:
            told = f"{self._source.path} was not compared with its digest: {error_text(raised)}"
            error = raised if isinstance(raised, UpriverError) else UpriverError(told)
            self.failed(error.with_traceback(None))
        else:
            self._finish(len(self._source.tensors))

    def _release(self, program: Program) -> None:
        # Whole, it is as any other; of a part of it, it stays known which.
        program.before_stage = None if self._digest is not None else _only_before(self._stop)

    def _let_go(self) -> None:
        self._file = None
        super()._let_go()


def arriving(program: Program) -> Arriving | None:
    """What is on its way to a program that :func:`upriver.coldstart.open` gave; None where all is there.

    Raises:
        ConfigError: If it is no program.
    """
    require_type("program", program, Program, "from coldstart.open()")
    found = under_way.get(program)
    return found if isinstance(found, Arriving) else None


def _only_before(stop: int) -> BeforeStage:
    return lambda position, keys: _check_wanted(position, stop)


def _check_wanted(position: int, stop: int) -> None:
    if position > stop:
        raise ProgramError(f"stage {position} was not asked for: of this program stages [0, {stop}) were")


def step_back() -> None:
    """Let this thread have what others leave of the processor; its priority is its own on Linux alone."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
