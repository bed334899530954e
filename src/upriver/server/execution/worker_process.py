"""The front's hold on one worker process: start it, give it one job at a time, end it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from upriver.errors import DoesNotFit, Overloaded, UpriverError
from upriver.protocol import error_body, error_from
from upriver.server.execution.worker_output import Output
from upriver.server.ipc.channel import Channel, ChannelClosed
from upriver.server.ipc.messages import (
    NO_SLOT,
    SMALL_BYTES,
    Describe,
    Described,
    Done,
    Failed,
    Forget,
    FromWorker,
    Hello,
    Here,
    Loaded,
    LoadProgram,
    MapSlot,
    Measure,
    NeedRoom,
    NeedSlot,
    NeedWeights,
    Room,
    Run,
    RunCode,
    Setup,
    StageMeasurements,
    UseSlot,
    Weigh,
    Weighed,
)
from upriver.server.ipc.shared_memory import SealedFile, Slot, SlotPool
from upriver.server.programs.program_files import ProgramFiles
from upriver.server.programs.streaming_weights import ColdFile
from upriver.server.sandbox.bubblewrap import NOT_SHUT_IN, Enclosure
from upriver.server.sandbox.cgroup import Group
from upriver.server.sandbox.environment import environment_of
from upriver.server.sandbox.rlimits import limits
from upriver.server.scheduling.footprint import StageRange
from upriver.types import Timings

START_TIMEOUT_S = 120.0
"""Importing PyTorch takes 2 s here, and has taken 20 on a cold disk."""

END_TIMEOUT_S = 5.0
"""A process whose socket is closed is on its way out, and how it ended is all there is to tell of it."""

EXIT_TIMEOUT_S = 0.2
"""Between the end of a process's socket and its own end it takes some milliseconds. Whoever waits for it
holds up the front's loop, once for a worker's death."""

KILL_TIMEOUT_S = 1.0
"""A process that is killed is gone in milliseconds, with much memory in some hundred. One that a driver or a
file system keeps may stay for ever; the front's loop does not wait for that."""

LOOK_S = 1.0
"""While a worker waits for weights the front looks so often whether it is still there: if not,
the thread is needed for the one that was started in its place."""

BROKE_OFF = "broke off"
"""How a worker ended whose process is still there."""

_FATAL_EXIT = 128
"""A shell, and bubblewrap, tell a process that a signal ended by this and the signal's number."""

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One micro-batch for a worker.

    Attributes:
        run: What to do; ``slot``, and ``blobs`` where there are any, are filled in here.
        program: Needed to do it.
        parts: The input: stored bytes of each sample, or the payload of ``run.header``.
        owner: Name of the tenant that it is done for.
        room: Whether an answer may take so many bytes in all; asked in the thread that runs the job.
        beside: Whether its input stages may take so many bytes beyond
            `upriver.server.scheduling.footprint.DECODING_BYTES`; asked there too.
    """

    run: Run | RunCode
    program: ProgramFiles | None
    parts: Sequence[memoryview]
    owner: str = ""
    room: Callable[[int], bool] = lambda nbytes: True
    beside: Callable[[int], bool] = lambda nbytes: True


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Data frames: their heads, and their payloads in slots that come back when the views are gone."""

    frames: list[tuple[bytes, memoryview]]
    timings: Timings

    @property
    def nbytes(self) -> int:
        """Bytes of the payloads."""
        return sum(len(payload) for _, payload in self.frames)


class WorkerHandle:
    """One worker process.

    Everything but `start`, `forget`, `tidy`, `rest` and `kill` blocks and belongs into a thread, one at a
    time.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        channel: Channel[FromWorker],
        *,
        enclosure: Enclosure = NOT_SHUT_IN,
        group: Group | None = None,
    ) -> None:
        self._process = process
        self._channel = channel
        self._enclosure = enclosure
        self._group = group
        self._closed = False
        self._ending = ""
        self._swept = False
        self._output = Output(process.stdout) if process.stdout is not None else None
        self._slots = SlotPool()
        self._loaded: set[str] = set()
        self._outdated: deque[str] = deque()
        self.busy_since: float | None = None
        """When it began with the job it is at, by the monotonic clock; None where it is at none."""
        self.restarts = 0
        """How many were started in its place before."""
        self._patience_s = START_TIMEOUT_S
        self.program = ""
        """Digest of the program that it works with; empty where it works with none."""
        self.out_of_memory = False
        """Whether the kernel ended it for want of memory; known once `ending` was asked."""

    @classmethod
    def start(cls, *, threads: int, enclosure: Enclosure = NOT_SHUT_IN) -> WorkerHandle:
        """Start a process, which dies with the thread that calls this.

        Raises:
            OSError: If no process can be started.
            RuntimeError: If no thread can be started to read what it prints.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ExitStack() as inherited, ExitStack() as kept:
            inherited.enter_context(theirs)
            kept.callback(ours.close)
            group = enclosure.make_group()
            entry: int | None = None
            if group is not None:
                kept.callback(group.remove)
                entry = group.open()
                inherited.callback(os.close, entry)
            process = subprocess.Popen(
                [*enclosure.sandbox.command, *_command(theirs.fileno(), entry, enclosure)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # whatever a library prints, the front's own stdout stays clean
                stderr=subprocess.STDOUT,
                close_fds=True,
                pass_fds=[theirs.fileno(), *([] if entry is None else [entry])],
                env=environment_of(enclosure, threads=threads),
                start_new_session=True,  # signals from a terminal are for the front: it lets what runs finish
            )
            assert process.stdout is not None  # it is a pipe
            kept.callback(process.stdout.close)
            kept.callback(process.wait)
            kept.callback(process.kill)
            channel: Channel[FromWorker] = Channel(ours, FromWorker)  # type: ignore[arg-type]
            handle = cls(process, channel, enclosure=enclosure, group=group)
            kept.pop_all()
        return handle

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
            self._send(setup)
            answer = self._receive()
        except ChannelClosed:
            raise ChannelClosed(self._last_words()) from None
        except TimeoutError:
            raise TimeoutError(f"it was not ready within {START_TIMEOUT_S:g} s") from None
        match answer:
            case Hello():
                self._channel.set_timeout(job_timeout_s)
                self._patience_s = job_timeout_s
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
        self.tidy()
        self.program = program.digest
        if program.key in self._loaded:
            return
        message = LoadProgram(
            key=program.key,
            digest=program.digest,
            graph_nbytes=program.graph.nbytes,
            weights_nbytes=program.weights.nbytes,
            coming=program.cold is not None,
        )
        self._send(message, [program.graph.fd, program.weights.fd])
        self._answered(Loaded)
        self._loaded.add(program.key)

    def run(self, job: Job) -> Result:
        """Do one job.

        Raises:
            UpriverError: If the worker reports that it cannot be done.
            Overloaded: If this process can have no further piece of memory.
            OSError: If the worker died, or took too long.
        """
        self.tidy()
        if job.program is not None:
            self.load(job.program)
        slot = self._slot(sum(len(part) for part in job.parts), job.owner)
        if slot is None:
            raise Overloaded("no further piece of memory can be had to hand this to a worker now")
        try:
            blobs = _fill(slot, job.parts)
            self._map(slot)
            self._send(_placed(job.run, slot, blobs))
            return self._answer(job)
        finally:
            self._slots.give_back(slot)

    def measure(self, program: ProgramFiles, *, stop: int | None) -> StageMeasurements:
        """Run a program's stages once on made-up inputs.

        Raises:
            UpriverError: If the worker reports that it cannot be done.
            OSError: If the worker died, or took too long.
        """
        self.load(program)
        self._send(Measure(program=program.key, stop=stop))
        return self._answered(StageMeasurements, program)

    def check(self, program: ProgramFiles) -> bytes:
        """Have a program in the worker, which checks all of it; what is to lie beside its weights.

        Raises:
            UpriverError: If the worker refuses it.
            OSError: If the worker died, or took too long.
        """
        self.load(program)
        self._send(Describe(program=program.key))
        return self._answered(Described).manifest

    def weigh(self, graph: SealedFile, stretch: StageRange) -> Weighed:
        """Work out what a stretch of a program takes, from its graph.

        Raises:
            UpriverError: If the worker reports that it cannot be done.
            OSError: If the worker died, or took too long.
        """
        self.tidy()
        question = Weigh(key=stretch.key, graph_nbytes=graph.nbytes, start=stretch.start, stop=stretch.stop)
        self._send(question, [graph.fd])
        return self._answered(Weighed)

    def forget(self, key: str) -> None:
        """The front does not keep this program any more: unload it at the next occasion; from any thread."""
        self._outdated.append(key)

    def tidy(self) -> None:
        """Tell the worker what it may unmap and unload, as far as it was not told; while no thread is at it.

        Raises:
            OSError: If it is gone.
        """
        programs = set()
        while self._outdated:
            programs.add(self._outdated.popleft())
        programs &= self._loaded
        self._loaded -= programs
        slots = self._slots.dropped()
        if programs or slots:
            self._send(Forget(slots=tuple(slots), programs=tuple(programs)))

    def rest(self) -> None:
        """Give memory back that is kept for the next job; while no thread is at it."""
        self._slots.rest()

    def ending(self) -> str:
        """How the process ended, without what it printed: that may be a client's data. Also reaps it.

        Waits for a moment for one that has closed its socket, and so is on its way out.
        """
        if not self._ending:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_TIMEOUT_S if self._closed else 0.0)
            code = self._process.returncode
            how = BROKE_OFF if code is None else how_it_ended(code, boxed=self._enclosure.boxed)
            if self._group is not None and self._group.oom_killed():  # known before the process is gone
                self.out_of_memory = True
                how += f": it ran out of memory ({self._group.nbytes >> 20} MiB allowed)"
            if code is None:
                return how
            self._ending = how
            self._sweep()
            self._leave_group()
        return self._ending

    def kill(self) -> None:
        """End the process now; one that takes long over it is waited for by a thread of its own."""
        self._sweep()
        self._process.kill()  # with bubblewrap goes whatever it has started
        try:
            self._process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            threading.Thread(target=self._process.wait, name="upriver-worker-end", daemon=True).start()
        self._channel.close()
        self._leave_group()

    def _sweep(self) -> None:
        """What the user's code has started goes with its worker, which leads a group of processes."""
        if self._enclosure.own_code and not self._swept:
            self._swept = True  # once: the number may be another's later on
            with suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)

    def _leave_group(self) -> None:
        """Take its control group away; under bubblewrap its process may take a moment longer to go."""
        group, self._group = self._group, None
        if group is not None and self._enclosure.groups is not None:
            self._enclosure.groups.remove(group)

    def _last_words(self) -> str:
        """How a process that is not ready yet ended, with the last line it printed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        line = self._output.last_line(timeout_s=END_TIMEOUT_S) if self._output is not None else ""
        return f"it {self.ending()}: {line}" if line else f"it {self.ending()}"

    def _answer(self, job: Job) -> Result:
        """What comes of a job: as many slots as it has data frames at most, whatever a worker asks for.

        Raises:
            DoesNotFit: If it failed for want of memory that never is there.
            Overloaded: If there is none for its small payloads now.
        """
        never: list[DoesNotFit] = []
        most = job.run.frames
        payloads: list[memoryview] = []
        asked = nbytes = beside = questions = 0
        while isinstance(answer := self._receive(), NeedSlot | NeedRoom | NeedWeights):
            if isinstance(answer, NeedWeights):
                questions += 1
                self._bring(job.program, answer, questions)
                continue
            if isinstance(answer, NeedRoom):
                if answer.nbytes <= beside:
                    raise ChannelClosed("a worker asks for more room each time")
                beside = answer.nbytes
                self._send(Room(granted=_granted(job.beside, beside, never)))
                continue
            asked, nbytes = asked + 1, nbytes + answer.nbytes
            if asked > most or answer.nbytes < 1:
                raise ChannelClosed(f"a worker asks for slots {most} times at most for this job")
            granted = _granted(job.room, nbytes, never)
            if granted and (slot := self._slot(answer.nbytes, job.owner)) is not None:
                payloads.append(self._slots.lend(slot, answer.nbytes))
                self._map(slot)
                self._send(UseSlot(slot=slot.id))
            else:
                self._send(UseSlot(slot=NO_SLOT))
        match answer:
            case Done():
                frames = _in_order(answer, payloads, most)
                small = sum(len(payload or b"") for _, payload in answer.frames)
                if small and not _granted(job.room, nbytes + small, never):
                    raise next(iter(never), None) or Overloaded("no memory for an answer now")
                return Result(frames=frames, timings=Timings(phases=answer.phases, stages=answer.stages))
            case Failed():
                raise next(iter(never), None) or error_from(answer.body)
            case _:
                raise ChannelClosed(f"a worker answers Done or Failed, got {type(answer).__name__}")

    def _bring(self, program: ProgramFiles | None, asked: NeedWeights, questions: int) -> None:
        """Tell a worker when weights are there that it waits for.

        Args:
            questions: How many of these it has asked for this job, with this one. Each is for weights that no
                stage has read before, so there are no more than weights: a job comes to an end.
        """
        if program is None or not isinstance(program.weights, ColdFile):
            raise ChannelClosed("a worker waits for weights that it has")
        count = len(program.numbers)
        if not asked.weights or questions > count:
            raise ChannelClosed("a worker asks for weights that no stage waits for")
        if not all(0 <= number < count for number in asked.weights):
            raise ChannelClosed("a worker waits for weights that there are not")
        places = [program.numbers[number] for number in asked.weights]
        try:
            self._wait_for(program.weights, places)
        except UpriverError as error:
            self._send(Here(whole=False, error=error_body(error)))
        else:
            self._send(Here(whole=program.weights.whole))

    def _wait_for(self, file: ColdFile, places: Sequence[int]) -> None:
        """Until weights are there.

        Raises:
            UpriverError: If they do not come, or it takes too long.
            ChannelClosed: If the worker is gone meanwhile.
        """
        end, look_s = time.monotonic() + self._patience_s, min(LOOK_S, self._patience_s)
        while not file.wait(places, timeout_s=look_s):
            if self._channel.has_news():
                self._closed = True
                raise ChannelClosed("a worker that waits for weights is gone, or does not wait")
            if time.monotonic() >= end:
                raise Overloaded("its weights take too long to come; ask again")

    def _answered(self, kind: type[_T], program: ProgramFiles | None = None) -> _T:
        """The answer to a message that has one of this kind, or `Failed`; weights that it waits for come."""
        questions = 0
        while isinstance(answer := self._receive(), NeedWeights):
            questions += 1
            self._bring(program, answer, questions)
        if isinstance(answer, kind):
            return answer
        if isinstance(answer, Failed):
            raise error_from(answer.body)
        raise ChannelClosed(f"a worker answers {kind.__name__} or Failed, got {type(answer).__name__}")

    def _slot(self, nbytes: int, owner: str) -> Slot | None:
        """Memory to share; None where this process can have none, which is no fault of the worker's."""
        with suppress(OSError):
            return self._slots.take(nbytes, owner=owner)
        return None

    def _send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        try:
            self._channel.send(message, fds)
        except ChannelClosed:
            self._closed = True
            raise

    def _receive(self) -> FromWorker:
        try:
            message, fds = self._channel.receive()
        except ChannelClosed:
            self._closed = True
            raise
        for fd in fds:  # a worker has no reason to send any
            os.close(fd)
        return message

    def _map(self, slot: Slot) -> None:
        if slot.fd is not None:
            self._send(MapSlot(slot=slot.id, nbytes=slot.nbytes), [slot.fd])
            slot.close_fd()


def _granted(ask: Callable[[int], bool], nbytes: int, never: list[DoesNotFit]) -> bool:
    """Whether there is room; where there never is, the worker ends its job first, and ``never`` says why."""
    try:
        return ask(nbytes)
    except DoesNotFit as error:
        never.append(error)
        return False


def _in_order(done: Done, in_slots: Sequence[memoryview], most: int) -> list[tuple[bytes, memoryview]]:
    """Return frames with their payloads, small ones and those in slots.

    Raises:
        ChannelClosed: If they are not what a worker may answer.
    """
    small = sum(len(payload or b"") for _, payload in done.frames)
    of_slots = sum(payload is None for _, payload in done.frames)
    if small > SMALL_BYTES or len(done.frames) > most or of_slots != len(in_slots):
        raise ChannelClosed(
            f"a worker answers with {most} frames at most, {len(in_slots)} payloads in slots and "
            f"{SMALL_BYTES} bytes of others, got {len(done.frames)}, {of_slots} and {small}"
        )
    slots = iter(in_slots)
    return [(head, next(slots) if payload is None else memoryview(payload)) for head, payload in done.frames]


def how_it_ended(code: int, *, boxed: bool) -> str:
    """A process's exit status in words.

    Args:
        code: As `subprocess.Popen.returncode` has it.
        boxed: Whether it was bubblewrap's, which passes on how its worker ended.
    """
    if boxed and _FATAL_EXIT < code < _FATAL_EXIT + signal.NSIG:
        code = _FATAL_EXIT - code
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def _command(fd: int, entry: int | None, enclosure: Enclosure) -> list[str]:
    """A worker's own command line.

    Args:
        fd: Socket to the front.
        entry: Way into its control group.
        enclosure: What it is kept in.
    """
    options = {
        "sandbox": enclosure.sandbox.kind,
        "group": entry,
        "limits": limits(enclosure.memory_bytes, device=enclosure.device, own_code=enclosure.own_code),
        "own_code": enclosure.own_code,
    }
    boot = str(Path(__file__).with_name("worker_entry.py"))
    return [sys.executable, "-P", boot, str(fd), str(os.getpid()), json.dumps(options)]


def _fill(slot: Slot, parts: Sequence[memoryview]) -> list[tuple[int, int]]:
    """Copy the parts to the slot; where each went."""
    memory, end, places = slot.array(slot.nbytes), 0, []
    for part in parts:
        memory[end : end + len(part)] = np.frombuffer(part, dtype=np.uint8)
        places.append((end, len(part)))
        end += len(part)
    return places


def _placed(run: Run | RunCode, slot: Slot, blobs: Sequence[tuple[int, int]]) -> Run | RunCode:
    if isinstance(run, RunCode) or run.header:
        return msgspec.structs.replace(run, slot=slot.id)
    return msgspec.structs.replace(run, slot=slot.id, blobs=tuple(blobs))
