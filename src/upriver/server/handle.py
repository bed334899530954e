"""The front's hold on one worker process: start it, give it one job at a time, end it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from upriver.engine.fingerprint import ENVIRONMENT as KERNEL_VARIABLES
from upriver.protocol import error_from
from upriver.server.channel import Channel, ChannelClosed
from upriver.server.jobs import (
    Done,
    Failed,
    Forget,
    FromWorker,
    Hello,
    Loaded,
    LoadProgram,
    MapSlot,
    Measure,
    Measured,
    NeedSlot,
    Run,
    Setup,
    UseSlot,
)
from upriver.server.memory import SealedFile, Slot, SlotPool
from upriver.server.output import Output
from upriver.types import Timings

START_TIMEOUT_S = 120.0
"""Importing PyTorch takes 2 s here, and has taken 20 on a cold disk."""

END_TIMEOUT_S = 5.0
"""A process whose socket is closed is on its way out, and how it ended is all there is to tell of it."""

_KEPT_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HOME",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "PATH",
    "TMPDIR",
    "VIRTUAL_ENV",
    *KERNEL_VARIABLES,
)
"""All that a worker sees of the front's environment, where a store's credentials may stand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramFiles:
    """A program as the front holds it: two sealed files."""

    digest: str
    graph: SealedFile
    weights: SealedFile

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self.graph.nbytes + self.weights.nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One micro-batch for a worker.

    Attributes:
        run: What to do; ``slot`` and ``blobs`` are filled in here.
        program: Needed to do it.
        parts: The input: stored bytes of each sample, or the payload of ``run.header``.
    """

    run: Run
    program: ProgramFiles | None
    parts: Sequence[memoryview]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A data frame: its head, and its payload in a slot that comes back when the view is gone."""

    head: bytes
    payload: memoryview
    timings: Timings


class WorkerHandle:
    """One worker process.

    Everything but `start`, `forget` and `kill` blocks and belongs into a thread; one thread at a time.
    """

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel[FromWorker]) -> None:
        self._process = process
        self._channel = channel
        self._output = Output(process.stdout) if process.stdout is not None else None
        self._slots = SlotPool()
        self._known: set[int] = set()
        self._loaded: set[str] = set()
        self._outdated: deque[str] = deque()

    @classmethod
    def start(cls, *, threads: int) -> WorkerHandle:
        """Start a process, which dies with the thread that calls this."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, ExitStack() as stack:
            stack.callback(ours.close)
            boot = str(Path(__file__).with_name("boot.py"))
            process = subprocess.Popen(
                [sys.executable, "-P", boot, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # whatever a library prints, the front's own stdout stays clean
                stderr=subprocess.STDOUT,
                close_fds=True,
                pass_fds=[theirs.fileno()],
                env=worker_environment(os.environ, threads=threads),
            )
            stack.pop_all()
        return cls(process, Channel(ours, FromWorker))  # type: ignore[arg-type]

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def shake_hands(self, setup: Setup, *, job_timeout_s: float) -> Hello:
        """Wait until the worker is ready.

        Raises:
            UpriverError: If it reports why it cannot be.
            OSError: If it died, said something else, or was not ready in time.
        """
        self._channel.set_timeout(START_TIMEOUT_S)
        try:
            self._channel.send(setup)
            answer = self._receive()
        except ChannelClosed:
            raise ChannelClosed(self._last_words()) from None
        except TimeoutError:
            raise TimeoutError(f"it was not ready within {START_TIMEOUT_S:g} s") from None
        match answer:
            case Hello():
                self._channel.set_timeout(job_timeout_s)
                if self._output is not None:
                    self._output.pass_on()
                return answer
            case Failed():
                raise error_from(answer.body)
            case _:
                raise ChannelClosed(f"a worker says hello first, got {type(answer).__name__}")

    def load(self, program: ProgramFiles) -> None:
        """Have a program in the worker.

        Raises:
            UpriverError: If the worker refuses it.
            OSError: If the worker died.
        """
        self._tidy()
        if program.digest in self._loaded:
            return
        message = LoadProgram(
            digest=program.digest,
            graph_nbytes=program.graph.nbytes,
            weights_nbytes=program.weights.nbytes,
        )
        self._channel.send(message, [program.graph.fd, program.weights.fd])
        match answer := self._receive():
            case Loaded():
                self._loaded.add(program.digest)
            case Failed():
                raise error_from(answer.body)
            case _:
                raise ChannelClosed(f"a worker answers Loaded or Failed, got {type(answer).__name__}")

    def run(self, job: Job) -> Result:
        """Do one job.

        Raises:
            UpriverError: If the worker reports that it cannot be done.
            OSError: If the worker died, or took too long.
        """
        self._tidy()
        if job.program is not None:
            self.load(job.program)
        slot = self._slots.take(sum(len(part) for part in job.parts))
        try:
            blobs = _fill(slot, job.parts)
            self._map(slot)
            self._channel.send(_placed(job.run, slot, blobs))
            return self._answer()
        finally:
            self._slots.give_back(slot)

    def measure(self, program: ProgramFiles, *, stop: int | None) -> Measured:
        """Run a program's stages once on made-up inputs.

        Raises:
            UpriverError: If the worker reports that it cannot be done.
            OSError: If the worker died, or took too long.
        """
        self.load(program)
        self._channel.send(Measure(program=program.digest, stop=stop))
        match answer := self._receive():
            case Measured():
                return answer
            case Failed():
                raise error_from(answer.body)
            case _:
                raise ChannelClosed(f"a worker answers Measured or Failed, got {type(answer).__name__}")

    def forget(self, digest: str) -> None:
        """The front does not keep this program any more: unload it at the next occasion; from any thread."""
        self._outdated.append(digest)

    def ending(self) -> str:
        """How the process ended, without what it printed: that may be a client's data. Also reaps it."""
        code = self._process.poll()
        if code is None:
            return "broke off"
        if code >= 0:
            return f"ended with exit code {code}"
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"

    def kill(self) -> None:
        """End the process now."""
        self._process.kill()
        self._process.wait()
        self._channel.close()

    def _last_words(self) -> str:
        """How a process that is not ready yet ended, with the last line it printed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        line = self._output.last_line(timeout_s=END_TIMEOUT_S) if self._output is not None else ""
        return f"it {self.ending()}: {line}" if line else f"it {self.ending()}"

    def _answer(self) -> Result:
        payload = memoryview(b"")
        answer = self._receive()
        if isinstance(answer, NeedSlot):
            slot = self._slots.take(answer.nbytes)
            payload = self._slots.lend(slot, answer.nbytes)
            self._map(slot)
            self._channel.send(UseSlot(slot=slot.id))
            answer = self._receive()
        match answer:
            case Done():
                timings = Timings(phases=answer.phases, stages=answer.stages)
                return Result(head=answer.head, payload=payload, timings=timings)
            case Failed():
                raise error_from(answer.body)
            case _:
                raise ChannelClosed(f"a worker answers Done or Failed, got {type(answer).__name__}")

    def _receive(self) -> FromWorker:
        message, fds = self._channel.receive()
        for fd in fds:  # a worker has no reason to send any
            os.close(fd)
        return message

    def _map(self, slot: Slot) -> None:
        if slot.fd is not None:
            self._channel.send(MapSlot(slot=slot.id, nbytes=slot.nbytes), [slot.fd])
            slot.close_fd()

    def _tidy(self) -> None:
        programs = set()
        while self._outdated:
            programs.add(self._outdated.popleft())
        programs &= self._loaded
        self._loaded -= programs
        slots = self._slots.dropped()
        if programs or slots:
            self._channel.send(Forget(slots=tuple(slots), programs=tuple(programs)))


def worker_environment(environment: Mapping[str, str], *, threads: int) -> dict[str, str]:
    """What a worker may see, and how many threads its libraries start."""
    kept = {name: environment[name] for name in _KEPT_VARIABLES if name in environment}
    count = str(threads)
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
    }


def _fill(slot: Slot, parts: Sequence[memoryview]) -> list[tuple[int, int]]:
    """Copy the parts to the slot; where each went."""
    memory, end, places = slot.array(slot.nbytes), 0, []
    for part in parts:
        memory[end : end + len(part)] = np.frombuffer(part, dtype=np.uint8)
        places.append((end, len(part)))
        end += len(part)
    return places


def _placed(run: Run, slot: Slot, blobs: Sequence[tuple[int, int]]) -> Run:
    return msgspec.structs.replace(run, slot=slot.id, blobs=tuple(blobs) if not run.header else ())
