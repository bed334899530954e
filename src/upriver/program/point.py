"""Where the frozen prefix ends: which module calls need not run in the tail, and what it needs instead.

Everything that depends on no trainable parameter comes first, in *chain order*: a frozen tower that runs
second is prefix, too. The tail is the user's own forward, so what can be left out of it are whole calls of
modules: the *skipped* calls. What crosses the freeze point are those results of skipped calls, and those
inputs, that the rest reads, found by walking back from the model's answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.utils import _pytree as pytree

from upriver.program.example import Source
from upriver.program.flow import Operation, Value
from upriver.program.trace import Call, Shape, Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class Ship:
    """A tensor that crosses the freeze point.

    Attributes:
        source: Where it comes from.
        shape: For any number of samples.
        value: The tensor in the traced pass.
        overwritten: Whether the tail writes into it.
    """

    source: Source
    shape: Shape
    value: Value = field(default_factory=lambda: Value(-1))
    overwritten: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FreezePoint:
    """Where the frozen prefix ends.

    Attributes:
        skipped: Indices of the module calls that do not run in the tail, in the order in which they end.
        ships: What crosses, in the order in which it is made.
        name: The last module of the prefix, in the order in which they ran; empty when there is none.
        why_not: Why nothing can be cut off.
        note: Why it is not later, where something but a trainable parameter ended it.
    """

    skipped: tuple[int, ...] = ()
    ships: tuple[Ship, ...] = ()
    name: str = ""
    why_not: str = ""
    note: str = ""


def find(model: nn.Module, calls: Trace, *, before_branches: bool = False) -> FreezePoint:
    """The end of the frozen prefix.

    Args:
        before_branches: End it before the first operator that shows Python a value of the data.
    """
    return _Search(model, calls, before_branches=before_branches).run()


class _Search:
    """One search; shrinks the set of skipped calls until what the tail needs of them can be shipped."""

    def __init__(self, model: nn.Module, calls: Trace, *, before_branches: bool) -> None:
        self.model = model
        self.trace = calls
        self.calls: Mapping[int, Call] = {call.index: call for call in calls.calls}
        self.children: dict[int, list[Call]] = {}
        for call in sorted(calls.calls, key=lambda call: call.index):
            self.children.setdefault(call.parent, []).append(call)
        self.operations = calls.flow.operations
        self.note = ""
        self.from_input = self._reached_from(self._inputs())
        self.held = self._held(before_branches=before_branches)
        self.holds = self._calls_around(self.held)
        self.kinds = {path: _kind(module) for path, module in model.named_modules()}
        self.blocked: dict[int, str] = {}

    def run(self) -> FreezePoint:
        """Search."""
        while True:
            frozen, free = self._candidates()
            if not frozen:
                return FreezePoint(why_not=self._why_nothing())
            skipped = [*frozen, *self._before(frozen, free)]
            needed, missing = self._needed(skipped)
            if not missing:
                break
            self.blocked |= missing
        ships = self._ships(skipped, needed)
        if all(ship.source.path is None for ship in ships):
            return FreezePoint(why_not="the tail reads nothing that the frozen modules give")
        skipped.sort(key=lambda call: call.exit)
        last = max(frozen, key=lambda call: call.exit)
        return FreezePoint(
            skipped=tuple(call.index for call in skipped),
            ships=tuple(ships),
            name=last.path,
            note="; ".join(dict.fromkeys([*filter(None, [self.note]), *filter(None, self.blocked.values())])),
        )

    # ------------------------------------------------------------------------------ who may be skipped

    def _candidates(self) -> tuple[list[Call], list[Call]]:
        """Largest calls that can run anywhere: of frozen modules, and of modules without parameters."""
        frozen: list[Call] = []
        free: list[Call] = []

        def visit(call: Call) -> None:
            kind = self.kinds[call.path]
            usable = call.index not in self.holds and call.index not in self.blocked and not call.opaque
            if call.path and usable and kind != "trained":
                (frozen if kind == "frozen" else free).append(call)
                return
            if self.blocked.get(call.index) != "":  # "" stands for a call that is left to the tail as a whole
                for child in self.children.get(call.index, ()):
                    visit(child)

        for call in self.children.get(-1, ()):
            visit(call)
        return frozen, free

    def _before(self, frozen: Sequence[Call], free: Sequence[Call]) -> list[Call]:
        """Calls without parameters that a frozen one depends on: before it, so part of the prefix."""
        inside = self._inside(frozen)
        wanted = self._closure([index for index, owner in enumerate(inside) if owner >= 0])
        of_free = self._inside(free)
        kept = {of_free[index] for index in wanted if of_free[index] >= 0}
        return [call for call in free if call.index in kept]

    def _why_nothing(self) -> str:
        if self.note:
            return self.note
        for index, operation in enumerate(self.operations):
            if self._trained(operation):
                owner = self.calls[operation.call].path
                where = repr(owner) if owner else "the model itself"
                return f"no frozen module finishes before {where}, which is trained, begins"
            if index in self.held:
                break
        return next(filter(None, self.blocked.values()), "no frozen module was called")

    # --------------------------------------------------------------------------- what the tail needs

    def _needed(self, skipped: Sequence[Call]) -> tuple[set[Value], dict[int, str]]:
        """What the calls that do run read of those that do not, or which ones must run after all."""
        inside = self._inside(skipped)
        exported = {value for call in skipped for value in call.values}
        todo = list(self.trace.whole.values)
        for index, operation in enumerate(self.operations):
            if inside[index] < 0 and (operation.observes or operation.trouble):
                todo += operation.reads
        needed: set[Value] = set()
        missing: dict[int, str] = {}
        seen: set[Value] = set()
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            maker = value.writer if value.writer >= 0 else self.trace.flow.makers.get(value.tensor, -1)
            if maker < 0:
                if self.trace.flow.origins[value.tensor].kind == "input":
                    needed.add(value)
            elif inside[maker] < 0:
                todo += self.operations[maker].reads
            elif value not in exported:
                path = self.calls[inside[maker]].path
                missing[inside[maker]] = f"module {path!r} keeps a value that is read after the cut"
            elif maker not in self.from_input:
                # The same whatever the data: cheaper made where it is needed than shipped.
                missing |= {
                    call.index: ""
                    for call in skipped
                    if value in call.values and not self._depends_on_input(call)
                }
                needed.add(value)
            else:
                needed.add(value)
        return needed, missing

    def _depends_on_input(self, call: Call) -> bool:
        makers = (
            v.writer if v.writer >= 0 else self.trace.flow.makers.get(v.tensor, -1) for v in call.values
        )
        return any(maker in self.from_input for maker in makers)

    def _ships(self, skipped: Sequence[Call], needed: set[Value]) -> list[Ship]:
        ships: dict[Value, Ship] = {}
        written = {
            value.tensor for operation in self.operations for value in operation.reads if value.writer >= 0
        }
        for leaf, shape in enumerate(self.trace.inputs):
            for value in needed:
                origin = self.trace.flow.origins.get(value.tensor)
                if origin is not None and origin.kind == "input" and origin.name == str(leaf):
                    source = Source(path=None, leaf=leaf)
                    ships[value] = Ship(
                        source=source, shape=shape, value=value, overwritten=value.tensor in written
                    )
        for call in sorted(skipped, key=lambda call: call.exit):
            shapes = [leaf for leaf in pytree.tree_leaves(call.result) if isinstance(leaf, Shape)]
            for source, value, shape in zip(call.sources(), call.values, shapes, strict=True):
                if value in needed and value not in ships:
                    ships[value] = Ship(source=source, shape=shape, value=value, overwritten=call.overwritten)
        return list(ships.values())

    # ------------------------------------------------------------------------------------- data flow

    def _held(self, *, before_branches: bool) -> set[int]:
        """Operations that must run where the user's model runs, and all that depend on them."""
        held: set[int] = set()
        stateful = self._mutated()
        branched = False
        for index, operation in enumerate(self.operations):
            own = bool(operation.trouble) or self._trained(operation) or self._reads(operation, stateful)
            if own or branched or self._follows(operation, held):
                held.add(index)
                if operation.trouble and not self.note:
                    path = self.calls[operation.call].path
                    self.note = f"module {path!r} {operation.trouble}" if path else operation.trouble
            if operation.observes and not branched:
                sees_data = before_branches and self._follows(operation, self.from_input)
                branched = index in held or sees_data
                if sees_data:
                    path = self.calls[operation.call].path
                    where = f"module {path!r}" if path else "the model"
                    self.note = f"{where} decides by the data what it does ({operation.name})"
        return held

    def _trained(self, operation: Operation) -> bool:
        origins = self.trace.flow.origins
        return any(value.tensor in origins and origins[value.tensor].trained for value in operation.reads)

    def _mutated(self) -> set[int]:
        """Tensors that no operation made and that some operation writes into."""
        origins = self.trace.flow.origins
        return {
            value.tensor
            for operation in self.operations
            if operation.trouble.startswith("changes")
            for value in operation.reads
            if origins.get(value.tensor) is not None and origins[value.tensor].kind == "buffer"
        }

    def _reads(self, operation: Operation, tensors: set[int]) -> bool:
        return any(value.tensor in tensors for value in operation.reads)

    def _inputs(self) -> set[int]:
        return {n for n, origin in self.trace.flow.origins.items() if origin.kind == "input"}

    def _reached_from(self, tensors: set[int]) -> set[int]:
        """Operations that depend on one of these tensors."""
        reached: set[int] = set()
        for index, operation in enumerate(self.operations):
            if self._reads(operation, tensors) or self._follows(operation, reached):
                reached.add(index)
        return reached

    def _follows(self, operation: Operation, operations: set[int]) -> bool:
        return any(maker in operations for value in operation.reads for maker in self._makers(value))

    def _makers(self, value: Value) -> Iterator[int]:
        if value.writer >= 0:
            yield value.writer
        if value.tensor in self.trace.flow.makers:
            yield self.trace.flow.makers[value.tensor]

    def _closure(self, start: Sequence[int]) -> set[int]:
        """These operations and all that they depend on."""
        found: set[int] = set()
        todo = list(start)
        while todo:
            index = todo.pop()
            if index not in found:
                found.add(index)
                todo += [maker for value in self.operations[index].reads for maker in self._makers(value)]
        return found

    def _inside(self, calls: Sequence[Call]) -> list[int]:
        """For each operation the one of these calls that it ran in, or -1."""
        chosen = {call.index for call in calls}
        owner: dict[int, int] = {-1: -1}
        for index in sorted(self.calls):  # parents begin before their children
            around = owner[self.calls[index].parent]
            owner[index] = around if around >= 0 else index if index in chosen else -1
        return [owner[operation.call] for operation in self.operations]

    def _calls_around(self, operations: set[int]) -> set[int]:
        around: set[int] = set()
        for index in operations:
            call = self.operations[index].call
            while call >= 0 and call not in around:
                around.add(call)
                call = self.calls[call].parent
        return around


def _kind(module: nn.Module) -> str:
    flags = [parameter.requires_grad for parameter in module.parameters()]
    return "free" if not flags else "trained" if any(flags) else "frozen"


def eval_modules(model: nn.Module, calls: Trace, point: FreezePoint, units: Sequence[str]) -> list[str]:
    """What runs in eval whatever ``train()`` says.

    Args:
        units: The model's frozen units.

    Returns:
        The frozen units, and modules without parameters that are called only in the prefix.
    """
    inside = _Enclosing(calls, point.skipped)
    early = {call.path for call in calls.calls if inside.has(call)}
    late = {call.path for call in calls.calls if not inside.has(call)}
    kinds = {path: _kind(model.get_submodule(path)) for path in early - late}
    return [*units, *sorted(path for path, kind in kinds.items() if kind == "free")]


class _Enclosing:
    """Which calls lie inside some others, themselves among them."""

    def __init__(self, calls: Trace, chosen: Sequence[int]) -> None:
        self._inside = {-1: False}
        for call in sorted(calls.calls, key=lambda call: call.index):  # parents begin before their children
            self._inside[call.index] = call.index in chosen or self._inside[call.parent]

    def has(self, call: Call) -> bool:
        return self._inside[call.index]
