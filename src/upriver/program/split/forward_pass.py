"""Query one forward pass: makers of values, dependencies, operations inside calls, random branches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from upriver.program.split.dataflow import DataFlow, Operation, TensorVersion
from upriver.program.split.module_trace import ModuleCall


class ForwardPass:
    """Calls and data flow of one forward pass."""

    def __init__(self, calls: Sequence[ModuleCall], flow: DataFlow) -> None:
        self.calls: Mapping[int, ModuleCall] = {call.index: call for call in calls}
        self.flow = flow
        self.whole = calls[-1]
        self.by_name = {(call.path, call.number): call for call in calls}

    @property
    def operations(self) -> tuple[Operation, ...]:
        """All operators, in the order of execution."""
        return self.flow.operations

    def maker(self, value: TensorVersion) -> int:
        """Return the operation that made or last wrote a value. -1 if the value existed before the pass."""
        return value.writer if value.writer >= 0 else self.flow.makers.get(value.tensor, -1)

    def makers(self, operation: Operation) -> Iterator[int]:
        """Yield the operations that an operation depends on."""
        for value in operation.reads:
            if value.writer >= 0:
                yield value.writer
            if value.tensor in self.flow.makers:
                yield self.flow.makers[value.tensor]

    def follows(self, operation: Operation, operations: Collection[int]) -> bool:
        """Return whether an operation reads a value that one of `operations` made."""
        return any(maker in operations for maker in self.makers(operation))

    def reached_from_inputs(self) -> set[int]:
        """Return the operations that depend on an input."""
        inputs = {number for number, origin in self.flow.origins.items() if origin.kind == "input"}
        reached: set[int] = set()
        for index, operation in enumerate(self.operations):
            if any(v.tensor in inputs for v in operation.reads) or self.follows(operation, reached):
                reached.add(index)
        return reached

    def depends_on_input(self, value: TensorVersion, reached: Collection[int]) -> bool:
        """Return whether a value is an input or was made by one of some operations."""
        maker = self.maker(value)
        return maker in reached if maker >= 0 else self.flow.origins[value.tensor].kind == "input"

    def closure(self, start: Collection[int]) -> set[int]:
        """Return these operations and all that they depend on."""
        found: set[int] = set()
        todo = list(start)
        while todo:
            index = todo.pop()
            if index not in found:
                found.add(index)
                todo += self.makers(self.operations[index])
        return found

    def enclosing(self, chosen: Collection[int]) -> dict[int, int]:
        """Map each call to the outermost chosen call that contains it or equals it. -1 for none."""
        owner: dict[int, int] = {-1: -1}
        for index in sorted(self.calls):  # parents begin before their children
            around = owner[self.calls[index].parent]
            owner[index] = around if around >= 0 else index if index in chosen else -1
        return owner

    def inside(self, chosen: Collection[int]) -> list[int]:
        """Return, for each operation, the chosen call that it ran in, or -1."""
        owner = self.enclosing(chosen)
        return [owner[operation.call] for operation in self.operations]

    def around(self, operations: Collection[int]) -> set[int]:
        """Return the calls that these operations ran in."""
        found: set[int] = set()
        for index in operations:
            call = self.operations[index].call
            while call >= 0 and call not in found:
                found.add(call)
                call = self.calls[call].parent
        return found

    def where(self, index: int) -> str:
        """Return the module that an operation ran in, for messages."""
        path = self.calls[self.operations[index].call].path
        return f"module {path!r}" if path else "the model"


@dataclass(kw_only=True, slots=True)
class PassNeeds:
    """Values of skipped calls that the other calls read.

    Attributes:
        values: Results of skipped calls, and inputs.
        strays: Skipped calls that make a value which is read but not returned.
        constants: Skipped calls whose results are read and depend on no input.
    """

    values: set[TensorVersion] = field(default_factory=set)
    strays: set[int] = field(default_factory=set)
    constants: set[int] = field(default_factory=set)


def needs(run: ForwardPass, skipped: Collection[int]) -> PassNeeds:
    """Walk back to the skipped calls from the result and from the side effects of the rest of the model.

    A tensor that depends on the data and stays on a module may be read later. So that module must run.
    """
    inside = run.inside(skipped)
    returned = {value for index in skipped for value in run.calls[index].values}
    data = run.reached_from_inputs()
    found = PassNeeds()
    left = [(path, value) for path, value in run.flow.left if run.depends_on_input(value, data)]
    todo = [*run.whole.values, *(value for _, value in left)]
    for index, operation in enumerate(run.operations):
        if inside[index] < 0 and (operation.observes or operation.trouble):
            todo += operation.reads
    seen: set[TensorVersion] = set()
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        maker = run.maker(value)
        if maker < 0:
            if run.flow.origins[value.tensor].kind == "input":
                found.values.add(value)
        elif inside[maker] < 0:
            todo += run.operations[maker].reads
        elif value not in returned:
            found.strays.add(inside[maker])
        else:
            found.values.add(value)
            if maker not in data:
                found.constants |= {index for index in skipped if value in run.calls[index].values}
    for index in skipped:
        around = run.calls[index].path
        if any(f"{path}.".startswith(f"{around}.") for path, _ in left):
            found.strays.add(index)
    makers = {index: [run.maker(value) for value in run.calls[index].values] for index in found.constants}
    # A call with any result that depends on the data stays skipped as a whole.
    found.constants = {index for index, made in makers.items() if not any(maker in data for maker in made)}
    return found


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
