"""Prepare a job in the test's own process, and let it move over at a chosen step."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from upriver.finetune.preparation import child, snapshot
from upriver.finetune.preparation.background import Preparation
from upriver.finetune.preparation.task import Prepared


class AtStep(Preparation):
    """Prepare as the other process does, and be done when the job asks for the nth time.

    A job asks once before each epoch, and once after each step. It waits at its start, since preparing uses
    what all threads of a process share.
    """

    asked_before: ClassVar[int] = 0
    _asked = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._thread.join()

    @property
    def done(self) -> bool:
        self._asked += 1
        return self._asked > self.asked_before

    def _followed(self) -> Prepared:
        return child.prepared(snapshot.restore(self._task.descriptor), cast(child.Line, self))

    def tell(self, **message: Any) -> None:
        self.step = str(message)

    def ask(self, question: str) -> Any:
        return {child.PACE: self._pace, child.SERVERS: self._addresses}[question]()
