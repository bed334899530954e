"""Start a preparing process, follow it, and put together what it returns."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from upriver._threads.background import BackgroundThread
from upriver._threads.forks import reset_in_child
from upriver.errors import (
    CaptureError,
    ConfigError,
    FrozenChanged,
    NoFeasibleCut,
    NotExact,
    UpriverError,
)
from upriver.finetune.planner import PlannedJob
from upriver.finetune.preparation import child, snapshot
from upriver.finetune.preparation.task import PreparationTask, Prepared, named_tensors
from upriver.program.capture.lowering import as_stored
from upriver.program.capture.prefix import bound
from upriver.program.graph.parser import decode
from upriver.program.graph.weights_file import WeightsFile
from upriver.program.split.split import Split
from upriver.rpc.child_server import OutputTail
from upriver.types import MicroBatch

WORDS_S = 1.0
"""Seconds to wait for the last words of a process that has ended, and for the thread that reads them."""

CarryOut = Callable[[Split, Prepared], PlannedJob]
"""Makes what carries a decision out, for a split with its program."""


class Preparation:
    """Prepare a job in another process.

    Args:
        task: The job; a copy of its model is taken now.
        niceness: Niceness of the process.
        parts: The split that the job has begun with.
        servers: Returns the addresses of the servers; may start one.
        pace: Returns the seconds that the frozen part of a micro-batch takes in the training; None if it has
            not run yet.
        carry_out: Called in a thread with the split and the result.

    Attributes:
        step: What is being done, in words.
        numerics: Settings that low bits depend on, as they were at the start.
        reference: The canary at the freeze point, by the captured program; None before the end.

    Raises:
        NoSnapshot: If the model does not pickle.
    """

    def __init__(
        self,
        task: PreparationTask,
        parts: Split,
        *,
        niceness: int,
        servers: Callable[[], list[str]],
        pace: Callable[[], float | None],
        carry_out: CarryOut,
    ) -> None:
        self.step = "starting"
        self._parts, self._model = parts, task.model
        self._niceness = niceness
        self._servers, self._pace, self._carry_out = servers, pace, carry_out
        self.numerics = task.numerics
        self.reference: MicroBatch | None = None
        self._found: tuple[Split, PlannedJob] | None = None
        self._error: UpriverError | None = None
        self._lock, self._ended = threading.Lock(), False
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.ExitStack() as closing:
            self._task = snapshot.SharedMemory()
            closing.callback(self._task.close)
            self._result = snapshot.SharedMemory()
            closing.callback(self._result.close)
            snapshot.store(task, self._task.descriptor)
            closing.pop_all()
        reset_in_child(self)
        self._thread = BackgroundThread(self._run, name="preparation")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Return whether the preparation has ended, with or without a result."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the preparation has ended; return whether it has."""
        self._thread.join(timeout_s)
        return self.done

    def result(self) -> tuple[Split, PlannedJob]:
        """Return the split with its program, and what carries out the plan.

        Raises:
            UpriverError: The reason why there is none.
        """
        if self._found is None:
            raise self._error or CaptureError("the preparation broke off")
        return self._found

    def close(self) -> None:
        """End the process, and drop its result. Idempotent."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.kill()
            found, self._found = self._found, None
        _drop(found)
        self._thread.join(WORDS_S)  # which may be waiting for a server

    def forked(self) -> None:
        """Leave the process to the parent of a fork: it ends with the last writer of its input."""
        for memory in (self._task, self._result):
            memory.close()
        process = self._process
        if process is not None and process.stdin is not None and not process.stdin.closed:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, process.stdin.fileno())  # the parent's thread may hold its lock
            os.close(nowhere)

    # -------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            prepared = self._followed()
            split = _with_program(self._model, self._parts, prepared)
            self.reference = prepared.decision.reference
            if not self._keep(None):
                return
            found = split, self._carry_out(split, prepared)
            if not self._keep(found):
                _drop(found)
        except UpriverError as error:
            self._error = error
        finally:
            self._task.close()
            self._result.close()

    def _keep(self, found: tuple[Split, PlannedJob] | None) -> bool:
        """Keep a result for the job; return False if the job was closed."""
        with self._lock:
            if not self._ended:
                self._found = found
            return not self._ended

    def _followed(self) -> Prepared:
        """Run the process, answer its questions, and return its result."""
        memory = (self._task.descriptor, self._result.descriptor)
        with self._lock:
            if self._ended:
                raise CaptureError("the job was closed")
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", "-m", child.__name__, *map(str, memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=memory,
                # Ctrl-C is for the training, which then ends this process. The kernel may share cores between
                # sessions, so that a priority counts within one alone.
                process_group=0,
            )
        words = OutputTail(process.stderr)
        try:
            self._answer(process)
            found: Prepared = snapshot.restore(self._result.descriptor)
            return found
        except (EOFError, BrokenPipeError):
            process.wait()
            words.join(WORDS_S)
            said = words.text.rpartition("\n")[2] or f"with exit code {process.returncode}"
            raise CaptureError(f"the preparing process ended: {said}") from None
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()  # type: ignore[union-attr]
            words.join(WORDS_S)

    def _answer(self, process: subprocess.Popen[bytes]) -> None:
        """Answer the questions of the process until it is done.

        Raises:
            EOFError: If it ends before.
            UpriverError: The reason why it cannot prepare the job.
        """
        answers = {child.PACE: self._pace, child.SERVERS: self._addresses}
        main = getattr(sys.modules["__main__"], "__file__", None)
        path = [os.path.abspath(each) for each in sys.path]
        start = {
            "main": main,
            "path": path,
            "torchvision": "torchvision" in sys.modules,
            "niceness": self._niceness,
        }
        _write(process.stdin, start)
        for line in process.stdout or ():
            message = json.loads(line)
            if child.SAY in message:
                self.step = message[child.SAY]
            elif child.ASK in message:
                _write(process.stdin, answers[message[child.ASK]]())
            elif child.ERROR in message:
                raise _error(message[child.ERROR], message["message"])
            else:
                return
        raise EOFError

    def _addresses(self) -> dict[str, Any]:
        try:
            return {"urls": self._servers()}
        except UpriverError as error:
            return {child.ERROR: str(error)}


def _drop(found: tuple[Split, PlannedJob] | None) -> None:
    """Close the connections of a result that no job uses."""
    if found is not None and found[1].pool is not None:
        found[1].pool.close()


def _write(pipe: Any, message: object) -> None:
    pipe.write(json.dumps(message).encode() + b"\n")
    pipe.flush()


def _error(code: str, message: str) -> UpriverError:
    """Return the error that ended a preparation; only some kinds matter to the job."""
    kinds: tuple[type[UpriverError], ...] = (ConfigError, NoFeasibleCut, NotExact)
    return next((kind(message) for kind in kinds if kind.code == code), CaptureError(message))


def _with_program(model: nn.Module, parts: Split, prepared: Prepared) -> Split:
    """Return the split with its captured program, on the weights of the user's own model.

    Raises:
        FrozenChanged: If these weights are no longer those that were captured.
    """
    graph, named = decode(prepared.graph), named_tensors(model)
    specs = {weight.key: weight.spec for weight in graph.weights}
    tensors = {
        key: as_stored(named[key], specs[key]) if key in named else prepared.constants[key]
        for key in prepared.keys
    }
    weights = WeightsFile(tensors)
    if weights.digest != graph.weights_digest:
        raise FrozenChanged(
            "frozen weights changed while the job was prepared: the features would no longer be those of "
            "this model. Start a new job after changing them"
        )
    assert parts.eager is not None  # only such a split is prepared
    program = bound(graph, weights, parts.eager.device)
    return replace(
        parts, program=program, eager=None, attempts=prepared.attempts, capture_s=prepared.capture_s
    )
