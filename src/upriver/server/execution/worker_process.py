"""Control one worker process from the front: start it, hand it one job at a time, end it."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from upriver._threads.background import BackgroundThread
from upriver.errors import DoesNotFit, Overloaded, UpriverError
from upriver.profile.latency.kept_models import kept_text
from upriver.profile.profile_cache import TierIdentity
from upriver.protocol import error_body, error_from
from upriver.server.execution.worker_output import WorkerOutput
from upriver.server.ipc import messages
from upriver.server.ipc.channel import Channel, ChannelClosed
from upriver.server.ipc.shared_memory import SealedFile, Slot, SlotPool
from upriver.server.programs.program_files import ProgramFiles
from upriver.server.programs.streaming_weights import ColdFile
from upriver.server.sandbox.bubblewrap import NOT_SHUT_IN, Enclosure
from upriver.server.sandbox.cgroup import ControlGroup
from upriver.server.sandbox.environment import environment_of
from upriver.server.sandbox.rlimits import limits
from upriver.server.scheduling.footprint import StageRange
from upriver.types import Timings

START_TIMEOUT_S = 120.0
"""Deadline for a worker to become ready. Importing PyTorch takes 2 s here, 20 s from a cold disk."""

END_TIMEOUT_S = 5.0
"""Wait for a process whose socket is closed. It is exiting, and only its exit status explains why."""

EXIT_TIMEOUT_S = 0.2
"""Wait between the end of a process's socket and its exit, which takes some milliseconds. The wait blocks the
front's event loop once for each death of a worker."""

KILL_TIMEOUT_S = 1.0
"""Wait for a killed process. It exits in milliseconds, or in some hundred with much memory. A driver or a
file system may keep it forever. The front's event loop does not wait for that."""

LOOK_S = 1.0
"""Interval at which the front checks a worker that waits for weights. If the worker is gone, its replacement
needs the thread."""

MODELS_BYTES = 8 << 20
"""Longest latency models that a worker is sent: several times the longest ones made."""

BROKE_OFF = "broke off"
"""Ending of a worker whose process still exists."""

_FATAL_EXIT = 128
"""Base of the exit code by which a shell or bubblewrap reports a fatal signal; the number is added."""

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Describe one micro-batch for a worker.

    Attributes:
        run: The work. `WorkerHandle` fills in ``slot``, and ``blobs`` if there are any.
        parts: The input: stored bytes of each sample, or the payload of ``run.header``.
        owner: Name of the tenant that the work is done for.
        room: Returns whether an answer may use this many bytes in total. Called in the thread that runs the
            job.
        beside: Returns whether the input stages may use this many bytes beyond
            `upriver.server.scheduling.footprint.DECODING_BYTES`. Called in the same thread.
    """

    run: messages.Run | messages.RunCode
    program: ProgramFiles | None
    parts: Sequence[memoryview]
    owner: str = ""
    room: Callable[[int], bool] = lambda nbytes: True
    beside: Callable[[int], bool] = lambda nbytes: True


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Hold data frames: heads, and payloads in slots. A slot is reusable once its views are gone."""

    frames: list[tuple[bytes, memoryview]]
    timings: Timings

    @property
    def nbytes(self) -> int:
        """Total bytes of the payloads."""
        return sum(len(payload) for _, payload in self.frames)


class WorkerHandle:
    """Control one worker process.

    All methods except `start`, `forget`, `tidy`, `rest` and `kill` block: call them in a thread, one at a
    time.

    Methods that exchange messages with the worker raise `OSError` if it is gone, timed out or sent another
    message. They also raise the `UpriverError` that the worker reports.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        channel: Channel[messages.FromWorker],
        *,
        enclosure: Enclosure = NOT_SHUT_IN,
        group: ControlGroup | None = None,
    ) -> None:
        self._process = process
        self._channel = channel
        self._enclosure = enclosure
        self._group = group
        self._closed = False
        self._ending = ""
        self._swept = False
        self._output = WorkerOutput(process.stdout) if process.stdout is not None else None
        self._slots = SlotPool()
        self._loaded: dict[str, messages.Loaded] = {}
        self._outdated: deque[str] = deque()
        self.busy_since: float | None = None
        """Monotonic time at which the current job started; None while the worker is idle."""
        self.restarts = 0
        """Number of workers that were started in this place before."""
        self._patience_s = START_TIMEOUT_S
        self.program = ""
        """Digest of the current job's program; empty without one."""
        self.out_of_memory = False
        """True if the kernel ended the process for lack of memory. Valid once `ending` was called."""

    @classmethod
    def start(cls, *, threads: int, enclosure: Enclosure = NOT_SHUT_IN) -> WorkerHandle:
        """Start a process, which dies with the calling thread.

        Raises:
            OSError: If no process can be started.
            UpriverError: If no thread can be started to read its output.
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
                stdout=subprocess.PIPE,  # a library may print: the front's own stdout stays clean
                stderr=subprocess.STDOUT,
                close_fds=True,
                pass_fds=[theirs.fileno(), *([] if entry is None else [entry])],
                env=environment_of(enclosure, threads=threads),
                start_new_session=True,  # terminal signals are for the front: it lets running jobs finish
            )
            assert process.stdout is not None  # it is a pipe
            kept.callback(process.stdout.close)
            kept.callback(process.wait)
            kept.callback(process.kill)
            channel = Channel(ours, messages.FromWorker)
            handle = cls(process, channel, enclosure=enclosure, group=group)
            kept.pop_all()
        return handle

    @property
    def pid(self) -> int:
        """PID of the process."""
        return self._process.pid

    def shake_hands(self, setup: messages.Setup, *, job_timeout_s: float) -> messages.Hello:
        """Wait until the worker is ready."""
        self._channel.set_timeout(START_TIMEOUT_S)
        try:
            self._send(setup)
            answer = self._receive()
        except ChannelClosed:
            raise ChannelClosed(self._last_words()) from None
        except TimeoutError:
            raise TimeoutError(f"it was not ready within {START_TIMEOUT_S:g} s") from None
        match answer:
            case messages.Hello():
                self._channel.set_timeout(job_timeout_s)
                self._patience_s = job_timeout_s
                self._pass_on_models(setup, answer)
                if self._output is not None:
                    self._output.pass_on()
                return answer
            case messages.Failed():
                raise error_from(answer.body)
            case _:
                raise ChannelClosed(f"a worker says hello first, got {type(answer).__name__}")

    def _pass_on_models(self, setup: messages.Setup, hello: messages.Hello) -> None:
        """Send the latency models of its device, which a worker in a sandbox cannot read."""
        place = TierIdentity(
            host=platform.node(), device=setup.device, threads=setup.threads, versions=hello.fingerprint
        )
        text = kept_text(place)
        if text is not None and len(text) <= MODELS_BYTES:
            self._send(messages.LatencyModels(text=text))

    def load(self, program: ProgramFiles) -> None:
        """Load a program into the worker unless it is loaded."""
        self.tidy()
        self.program = program.digest
        if program.key in self._loaded:
            return
        message = messages.LoadProgram(
            key=program.key,
            digest=program.digest,
            graph_nbytes=program.graph.nbytes,
            weights_nbytes=program.weights.nbytes,
            coming=program.cold is not None,
        )
        self._send(message, [program.graph.fd, program.weights.fd])
        self._loaded[program.key] = self._answered(messages.Loaded)

    def predicted_s(self, key: str, micro_batch: int) -> dict[int, float]:
        """Return the predicted seconds of a loaded program's stages by position; empty where unknown."""
        loaded = self._loaded.get(key)
        if loaded is None or loaded.micro_batch != micro_batch:
            return {}
        return dict(enumerate(loaded.predicted_s, start=1))

    def run(self, job: Job) -> Result:
        """Run one job.

        Raises:
            Overloaded: If this process cannot allocate another slot.
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

    def measure(self, program: ProgramFiles, *, stop: int | None) -> messages.StageMeasurements:
        """Run a program's stages once on made-up inputs."""
        self.load(program)
        self._send(messages.Measure(program=program.key, stop=stop))
        return self._answered(messages.StageMeasurements, program)

    def check(self, program: ProgramFiles) -> bytes:
        """Load a program into the worker, which checks it; return the manifest to store with its weights."""
        self.load(program)
        self._send(messages.Describe(program=program.key))
        return self._answered(messages.Described).manifest

    def weigh(self, graph: SealedFile, stretch: StageRange) -> messages.Weighed:
        """Compute the footprint of a stage range from a program's graph."""
        self.tidy()
        question = messages.Weigh(
            key=stretch.key, graph_nbytes=graph.nbytes, start=stretch.start, stop=stretch.stop
        )
        self._send(question, [graph.fd])
        return self._answered(messages.Weighed)

    def forget(self, key: str) -> None:
        """Unload a program that the front evicted, at the next `tidy`. Callable from any thread."""
        self._outdated.append(key)

    def tidy(self) -> None:
        """Tell the worker which slots and programs to drop. Call only while no thread uses it."""
        programs = set()
        while self._outdated:
            programs.add(self._outdated.popleft())
        programs &= self._loaded.keys()
        self._loaded = {key: loaded for key, loaded in self._loaded.items() if key not in programs}
        slots = self._slots.dropped()
        if programs or slots:
            self._send(messages.Forget(slots=tuple(slots), programs=tuple(programs)))

    def rest(self) -> None:
        """Free memory that is kept for the next job. Call only while no thread uses the worker."""
        self._slots.rest()

    def ending(self) -> str:
        """Return how the process ended, and reap it.

        The text omits the process's output, which may be a client's data. If the socket is closed, the method
        waits a moment for the process to exit.
        """
        if not self._ending:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_TIMEOUT_S if self._closed else 0.0)
            code = self._process.returncode
            how = BROKE_OFF if code is None else how_it_ended(code, boxed=self._enclosure.boxed)
            if self._group is not None and self._group.oom_killed():  # read before the process is gone
                self.out_of_memory = True
                how += f": it ran out of memory ({self._group.nbytes >> 20} MiB allowed)"
            if code is None:
                return how
            self._ending = how
            self._sweep()
            self._leave_group()
        return self._ending

    def kill(self) -> None:
        """Kill the process now. If it exits slowly, a separate thread waits for it."""
        self._sweep()
        self._process.kill()  # with bubblewrap, all processes that it started end too
        try:
            self._process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            BackgroundThread(self._process.wait, name="worker-end").start()
        self._channel.close()
        self._leave_group()

    def _sweep(self) -> None:
        """Kill the processes that the user's code started. The worker leads their process group."""
        if self._enclosure.own_code and not self._swept:
            self._swept = True  # once: another process group may get the number later
            with suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)

    def _leave_group(self) -> None:
        """Remove the control group. Under bubblewrap its process may take a moment longer to exit."""
        group, self._group = self._group, None
        if group is not None and self._enclosure.groups is not None:
            self._enclosure.groups.remove(group)

    def _last_words(self) -> str:
        """Return how a process that never became ready ended, with the last line that it printed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        line = self._output.last_line(timeout_s=END_TIMEOUT_S) if self._output is not None else ""
        return f"it {self.ending()}: {line}" if line else f"it {self.ending()}"

    def _answer(self, job: Job) -> Result:
        """Return the result of a job, with at most as many slots as the job has data frames.

        Raises:
            DoesNotFit: If the job failed for lack of memory that will never be available.
            Overloaded: If no memory is available now for its small payloads.
        """
        never: list[DoesNotFit] = []
        most = job.run.frames
        payloads: list[memoryview] = []
        asked = nbytes = beside = questions = 0
        while isinstance(
            answer := self._receive(), messages.NeedSlot | messages.NeedRoom | messages.NeedWeights
        ):
            if isinstance(answer, messages.NeedWeights):
                questions += 1
                self._bring(job.program, answer, questions)
                continue
            if isinstance(answer, messages.NeedRoom):
                if answer.nbytes <= beside:
                    raise ChannelClosed("a worker must request more memory each time")
                beside = answer.nbytes
                self._send(messages.Room(granted=_granted(job.beside, beside, never)))
                continue
            asked, nbytes = asked + 1, nbytes + answer.nbytes
            if asked > most or answer.nbytes < 1:
                raise ChannelClosed(f"a worker may request at most {most} slots for this job")
            granted = _granted(job.room, nbytes, never)
            if granted and (slot := self._slot(answer.nbytes, job.owner)) is not None:
                payloads.append(self._slots.lend(slot, answer.nbytes))
                self._map(slot)
                self._send(messages.UseSlot(slot=slot.id))
            else:
                self._send(messages.UseSlot(slot=messages.NO_SLOT))
        match answer:
            case messages.Done():
                frames = _in_order(answer, payloads, most)
                small = sum(len(payload or b"") for _, payload in answer.frames)
                if small and not _granted(job.room, nbytes + small, never):
                    raise next(iter(never), None) or Overloaded("no memory for an answer now")
                return Result(frames=frames, timings=Timings(phases=answer.phases, stages=answer.stages))
            case messages.Failed():
                raise next(iter(never), None) or error_from(answer.body)
            case _:
                raise ChannelClosed(f"a worker answers Done or Failed, got {type(answer).__name__}")

    def _bring(self, program: ProgramFiles | None, asked: messages.NeedWeights, questions: int) -> None:
        """Tell a worker when the weights that it waits for are available.

        Args:
            questions: Number of such requests in this job, this one included. Each asks for weights that no
                stage read before. So there are at most as many requests as weights, and a job ends.
        """
        if program is None or not isinstance(program.weights, ColdFile):
            raise ChannelClosed("a worker waits for weights that it has")
        count = len(program.numbers)
        if not asked.weights or questions > count:
            raise ChannelClosed("a worker requests weights that no stage waits for")
        if not all(0 <= number < count for number in asked.weights):
            raise ChannelClosed("a worker requests weights that do not exist")
        places = [program.numbers[number] for number in asked.weights]
        try:
            self._wait_for(program.weights, places)
        except UpriverError as error:
            self._send(messages.Here(whole=False, error=error_body(error)))
        else:
            self._send(messages.Here(whole=program.weights.whole))

    def _wait_for(self, file: ColdFile, places: Sequence[int]) -> None:
        """Wait until weights are available.

        Raises:
            UpriverError: If the weights do not arrive, or not in time.
            ChannelClosed: If the worker ends meanwhile.
        """
        end, look_s = time.monotonic() + self._patience_s, min(LOOK_S, self._patience_s)
        while not file.wait(places, timeout_s=look_s):
            if self._channel.has_news():
                self._closed = True
                raise ChannelClosed("a worker that waits for weights is gone, or does not wait")
            if time.monotonic() >= end:
                raise Overloaded("the program's weights take too long to arrive; retry")

    def _answered(self, kind: type[_T], program: ProgramFiles | None = None) -> _T:
        """Return the answer of this kind, or raise the error of `Failed`; bring weights on request."""
        questions = 0
        while isinstance(answer := self._receive(), messages.NeedWeights):
            questions += 1
            self._bring(program, answer, questions)
        if isinstance(answer, kind):
            return answer
        if isinstance(answer, messages.Failed):
            raise error_from(answer.body)
        raise ChannelClosed(f"a worker answers {kind.__name__} or Failed, got {type(answer).__name__}")

    def _slot(self, nbytes: int, owner: str) -> Slot | None:
        """Return shared memory; None if this process can allocate none, which is not the worker's fault."""
        with suppress(OSError):
            return self._slots.take(nbytes, owner=owner)
        return None

    def _send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        try:
            self._channel.send(message, fds)
        except ChannelClosed:
            self._closed = True
            raise

    def _receive(self) -> messages.FromWorker:
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
            self._send(messages.MapSlot(slot=slot.id, nbytes=slot.nbytes), [slot.fd])
            slot.close_fd()


def _granted(ask: Callable[[int], bool], nbytes: int, never: list[DoesNotFit]) -> bool:
    """Return whether memory is granted.

    If the memory will never be available, append the error to ``never``: the worker ends its job first.
    """
    try:
        return ask(nbytes)
    except DoesNotFit as error:
        never.append(error)
        return False


def _in_order(
    done: messages.Done, in_slots: Sequence[memoryview], most: int
) -> list[tuple[bytes, memoryview]]:
    """Return all frames in order, with payloads that are small or in slots.

    Raises:
        ChannelClosed: If a worker may not send such an answer.
    """
    small = sum(len(payload or b"") for _, payload in done.frames)
    of_slots = sum(payload is None for _, payload in done.frames)
    if small > messages.SMALL_BYTES or len(done.frames) > most or of_slots != len(in_slots):
        raise ChannelClosed(
            f"a worker answers with {most} frames at most, {len(in_slots)} payloads in slots and "
            f"{messages.SMALL_BYTES} bytes of others, got {len(done.frames)}, {of_slots} and {small}"
        )
    slots = iter(in_slots)
    return [(head, next(slots) if payload is None else memoryview(payload)) for head, payload in done.frames]


def how_it_ended(code: int, *, boxed: bool) -> str:
    """Return a process's exit status in words.

    Args:
        code: `subprocess.Popen.returncode`.
        boxed: Whether the process was bubblewrap, which passes on the exit status of its worker.
    """
    if boxed and _FATAL_EXIT < code < _FATAL_EXIT + signal.NSIG:
        code = _FATAL_EXIT - code
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def _command(fd: int, entry: int | None, enclosure: Enclosure) -> list[str]:
    """Return the command line of a worker.

    Args:
        entry: Descriptor by which the worker joins its control group.
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
    """Copy the parts to the slot; return the offset and length of each."""
    memory, end, places = slot.array(slot.nbytes), 0, []
    for part in parts:
        memory[end : end + len(part)] = np.frombuffer(part, dtype=np.uint8)
        places.append((end, len(part)))
        end += len(part)
    return places


def _placed(
    run: messages.Run | messages.RunCode, slot: Slot, blobs: Sequence[tuple[int, int]]
) -> messages.Run | messages.RunCode:
    if isinstance(run, messages.RunCode) or run.header:
        return msgspec.structs.replace(run, slot=slot.id)
    return msgspec.structs.replace(run, slot=slot.id, blobs=tuple(blobs))
