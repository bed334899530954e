"""Find layers that are skipped at random. The tail must decide about such layers, so no prefix holds them."""

from __future__ import annotations

from collections.abc import Collection

from upriver.program.split.forward_pass import ForwardPass


def random_branch(training: ForwardPass, skipped: Collection[str]) -> tuple[str, str] | None:
    """Return the module in which a random number decides which skipped modules run, and a message.

    Python reads a random number in a module that contains skipped modules. In eval such code (layer drop)
    does nothing.
    """
    random: set[int] = set()
    ended = _ended(training)
    for index, operation in enumerate(training.operations):
        drawn = operation.trouble.startswith("draws ")  # Python has the number, and may use it in any way
        depends = drawn or training.follows(operation, random)
        if depends or operation.trouble.startswith("runs the random"):
            random.add(index)
        path = training.calls[operation.call].path
        inside = f"{path}." if path else ""
        # The number cannot affect a call that has ended. A module that never ran may have been left out.
        open_ones = [name for name in skipped if name.startswith(inside) and ended.get(name, index) >= index]
        if depends and operation.observes and open_ones:
            if drawn:
                return path, (
                    f"{training.where(index)} {operation.trouble} before all of its frozen layers have run, "
                    "and may decide by them which of these run (layer drop?); draw them behind those layers, "
                    "or by an operator of torch"
                )
            return path, (
                f"{training.where(index)} decides by a random number which of its layers run (layer drop?); "
                "set that probability to 0"
            )
    return None


def _ended(run: ForwardPass) -> dict[str, int]:
    """Return the last operator that ran in each module."""
    ended: dict[str, int] = {}
    for index, operation in enumerate(run.operations):
        call = operation.call
        while call >= 0:
            ended[run.calls[call].path] = index
            call = run.calls[call].parent
    return ended
