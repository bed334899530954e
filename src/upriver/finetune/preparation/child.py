"""Prepare a job in a process of its own: capture and prove its frozen part, measure, and plan.

The process runs at low priority, so that the training keeps the machine. It works on a copy of the model. It
tells each step as a JSON line on stdout, and asks questions there whose answers arrive on stdin.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from upriver.finetune.preparation.task import PreparationTask, Prepared

SAY, ASK, DONE, ERROR = "say", "ask", "done", "error"
"""Keys of the lines that the process writes: a step, a question, the end, and an error that ended it."""

PACE = "pace"
"""The question for the seconds that the frozen part of a micro-batch takes in the training process. The same
work takes longer here, at low priority."""

SERVERS = "servers"
"""The question for the servers: their addresses, or why there are none."""


class Line:
    """Write lines to the process that trains, and read its answers. End with that process."""

    def __init__(self, out: TextIO, answers: TextIO) -> None:
        self._out, self._answers = out, answers
        self._read: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, **message: object) -> None:
        """Write a message."""
        print(json.dumps(message), file=self._out, flush=True)

    def ask(self, question: str) -> Any:
        """Return the answer to a question."""
        self.tell(**{ASK: question})
        return self.heard()

    def heard(self) -> Any:
        """Return the next answer."""
        return json.loads(self._read.get())

    def _listen(self) -> None:
        for text in self._answers:
            self._read.put(text)
        os._exit(1)  # the training has ended, or wants no preparation any more


def main(task: int, result: int) -> None:
    """Read a `PreparationTask` from one shared memory, prepare its job, and write the `Prepared` to another.

    The first answer names the main module's file and the search path for the user's modules. It says whether
    these use torchvision, and how nice the process must be.
    """
    line = Line(os.fdopen(os.dup(1), "w"), sys.stdin)
    os.dup2(2, 1)  # what the user's code and libraries print must not mix with the lines
    start = line.heard()
    os.nice(start["niceness"])
    sys.path[:] = start["path"]
    sys.modules["__main__"].__file__ = start["main"]  # classes of the user's script are known by its file
    from upriver._torchvision import ensure_torchvision
    from upriver.errors import UpriverError
    from upriver.finetune.preparation import snapshot

    if start["torchvision"]:
        ensure_torchvision()
    try:
        snapshot.store(prepared(snapshot.restore(task), line), result)
    except UpriverError as error:
        line.tell(**{ERROR: error.code, "message": str(error)})
    else:
        line.tell(**{DONE: True})


def prepared(task: PreparationTask, line: Line) -> Prepared:
    """Return the result of a task.

    Raises:
        CaptureError: If the frozen part cannot be captured and proven with the parts of the task.
        NotExact: If these parts do not give what the whole model gives.
        UpriverError: If no plan can be made.
    """
    from upriver.engine.fingerprint import numerics
    from upriver.errors import CaptureError, NotExact, ServerUnavailable
    from upriver.finetune.planner import Planner
    from upriver.finetune.preparation.task import Prepared, named_tensors
    from upriver.program.split.split import split
    from upriver.rpc.client import ServerClient
    from upriver.rpc.link_meter import LinkMeter, metered
    from upriver.rpc.tls import client_context

    task.numerics.apply()
    if numerics() != task.numerics:
        raise CaptureError("the preparing process cannot have the same numerics settings as the training")
    model, options = task.model, task.options
    dataset, meter = task.dataset.open(), LinkMeter()
    direct = metered(dataset, meter)
    parts = split(
        model,
        task.example,
        autocast=options.autocast,
        granularity=options.granularity,
        on_progress=lambda text: line.tell(**{SAY: text}),
    )
    same = parts.parts == task.parts
    refuted = next((each.why_not for each in parts.attempts if each.refuted), "")
    if refuted and not (same and parts.program):
        raise NotExact(
            f"the losses so far are not those of the model: {refuted}. Start again with "
            "splitting=Splitting(in_background=False)"
        )
    if parts.program is None:
        raise CaptureError(f"the frozen part cannot be captured: {parts.why_not}")
    if not same:
        raise CaptureError(
            f"the frozen part can only be captured up to {parts.boundary!r}, and the job began up to "
            f"{task.parts.boundary!r}: {parts.attempts[0].why_not}"
        )
    given = task.credentials
    tls = client_context(ca=given.ca, certificate=given.certificate, key=given.key)

    def servers(_dataset: object) -> list[ServerClient]:
        found = line.ask(SERVERS)
        if ERROR in found:
            raise ServerUnavailable(found[ERROR])
        return [ServerClient(url, token=given.token, meter=meter, tls=tls) for url in found["urls"]]

    planner = Planner(
        servers,
        model,
        dataset,
        direct,
        parts,
        options,
        tell=lambda text: line.tell(**{SAY: text}),
        bandwidth=meter.observed_bandwidth,
        pace=lambda: line.ask(PACE),
    )
    try:
        decision = planner.decide()
    finally:
        planner.close()
    program, names = parts.program, named_tensors(model)
    return Prepared(
        graph=program.graph_bytes,
        keys=tuple(program.weight_tensors),
        constants={key: each for key, each in program.weight_tensors.items() if key not in names},
        attempts=parts.attempts,
        capture_s=parts.capture_s,
        decision=decision,
        num_bytes={kind: count for kind, count in meter.bytes_by_kind.items()},
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
