"""Layers that are left out at random: a frozen part that such code decides about cannot be taken out."""

from __future__ import annotations

from collections.abc import Collection

from upriver.program.passes import Pass


def random_branch(training: Pass, skipped: Collection[str]) -> tuple[str, str] | None:
    """The module in which chance decides what runs around the prefix while the model trains, and a message.

    Python looks at a random number in a module that skipped ones are part of. (In evaluation such code, a
    layer drop, does nothing.)

    Args:
        training: A pass in training mode.
        skipped: Names of the modules that are skipped.
    """
    random: set[int] = set()
    for index, operation in enumerate(training.operations):
        depends = training.follows(operation, random)
        if depends or operation.trouble.startswith("runs the random"):
            random.add(index)
        path = training.calls[operation.call].path
        inside = f"{path}." if path else ""
        if depends and operation.observes and any(name.startswith(inside) for name in skipped):
            return path, (
                f"{training.where(index)} decides by a random number which of its layers run (layer drop?); "
                "set that probability to 0"
            )
    return None
