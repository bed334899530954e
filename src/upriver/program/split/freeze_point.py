"""Find the freeze point: the module calls that the tail skips, and the tensors that it needs instead.

Everything that depends on no trainable parameter comes first, in *chain order*: a frozen tower that runs
second belongs to the prefix too. The tail is the user's own forward, so only whole module calls can be left
out: the *skipped* calls. The results of skipped calls and the inputs that the rest reads cross the freeze
point. They are found by walking back from the model's result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from upriver.program.example_inputs import TensorSource
from upriver.program.split.dataflow import Operation, TensorVersion
from upriver.program.split.forward_pass import ForwardPass, needs
from upriver.program.split.module_trace import ModuleCall, Shape, Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossingTensor:
    """Tensor that crosses the freeze point.

    Attributes:
        value: The tensor in the traced pass.
        overwritten: True if the tail writes into it.
    """

    source: TensorSource
    shape: Shape
    value: TensorVersion = field(default_factory=lambda: TensorVersion(-1))
    overwritten: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FreezePoint:
    """End of the frozen prefix.

    Attributes:
        skipped: Indices of the module calls that do not run in the tail, in the order in which they end.
        ships: Tensors that cross, in the order in which they are made.
        name: The last module of the prefix, in the order of execution. Empty if there is none.
        note: Reason why it is not later, unless a trainable parameter ended it.
    """

    skipped: tuple[int, ...] = ()
    ships: tuple[CrossingTensor, ...] = ()
    name: str = ""
    why_not: str = ""
    note: str = ""


def find(
    model: nn.Module,
    calls: Trace,
    training: ForwardPass | None = None,
    *,
    before_branches: bool = False,
    left: Mapping[str, str] | None = None,
) -> FreezePoint:
    """Find the end of the frozen prefix.

    Args:
        training: The same pass in training mode with frozen units in eval. It may read more (auxiliary
            heads).
        before_branches: End the prefix before the first operator that shows Python a value of the data, or
            the first code compiled by torch.compile.
        left: Modules inside which nothing may be skipped, with the reason.
    """
    return _Search(model, calls, training, before_branches=before_branches, left=left or {}).run()


class _Search:
    """One search. Shrink the set of skipped calls until every tensor that the tail needs can cross."""

    def __init__(
        self,
        model: nn.Module,
        calls: Trace,
        training: ForwardPass | None,
        *,
        before_branches: bool,
        left: Mapping[str, str],
    ) -> None:
        self.trace = calls
        self.seen = ForwardPass(calls.calls, calls.flow)
        self.training = training
        self.kinds = {path: _kind(module) for path, module in model.named_modules()}
        self.left = left
        self.notes: list[str] = []
        self.held = self._held(before_branches=before_branches)
        self.holds = self.seen.around(self.held)
        # True if calls inside may still be skipped.
        self.blocked = {call.index: True for call in calls.calls if self._counts_inside(call)}
        self.blocked |= {call.index: False for call in calls.calls if call.path in left}
        self.notes += left.values()
        self.notes += [
            f"{f'module {path!r}' if path else 'the model'} keeps {name!r} from one call for the next"
            for path, name in calls.counting.items()
        ]

    def run(self) -> FreezePoint:
        while True:
            frozen, free = self._candidates()
            if not frozen:
                return FreezePoint(why_not=self._why_nothing())
            skipped = [*frozen, *self._before(frozen, free)]
            needed, blocked = self._needed({call.index for call in skipped})
            if not blocked:
                break
            self.blocked |= blocked
        ships = self._ships(skipped, needed)
        if self.seen.whole.opaque and not self.seen.whole.values:
            return FreezePoint(
                why_not=f"no tensor was found in the model's answer ({self.seen.whole.opaque})"
            )
        if all(ship.source.path is None for ship in ships):
            return FreezePoint(
                why_not="the tail reads nothing that the frozen modules give, or in a way that cannot be "
                "followed: through NumPy, lists of numbers, another thread or a tensor class of its own"
            )
        skipped.sort(key=lambda call: call.exit)
        return FreezePoint(
            skipped=tuple(call.index for call in skipped),
            ships=tuple(ships),
            name=max(frozen, key=lambda call: call.exit).path,
            note="; ".join(dict.fromkeys(self.notes)),
        )

    # ---------------------------------------------------------------------- calls that may be skipped

    def _candidates(self) -> tuple[list[ModuleCall], list[ModuleCall]]:
        """Return the largest calls that can run anywhere: of frozen and of parameter-free modules."""
        frozen: list[ModuleCall] = []
        free: list[ModuleCall] = []
        children: dict[int, list[ModuleCall]] = {}
        for index in sorted(self.seen.calls):
            children.setdefault(self.seen.calls[index].parent, []).append(self.seen.calls[index])

        def visit(call: ModuleCall) -> None:
            kind = self.kinds[call.path]
            usable = call.index not in self.holds and call.index not in self.blocked
            if call.opaque and usable and kind == "frozen" and call.path:
                self.notes.append(f"module {call.path!r} gives what cannot cross a cut: {call.opaque}")
            if call.path and usable and kind != "trained" and not call.opaque:
                (frozen if kind == "frozen" else free).append(call)
            elif self.blocked.get(call.index, True):
                for child in children.get(call.index, ()):
                    visit(child)

        visit(self.seen.whole)
        return frozen, free

    def _before(self, frozen: Sequence[ModuleCall], free: Sequence[ModuleCall]) -> list[ModuleCall]:
        """Return the calls without parameters that a frozen call depends on. They belong to the prefix."""
        inside = self.seen.inside({call.index for call in frozen})
        wanted = self.seen.closure([index for index, owner in enumerate(inside) if owner >= 0])
        of_free = self.seen.inside({call.index for call in free})
        kept = {of_free[index] for index in wanted}
        return [call for call in free if call.index in kept]

    def _why_nothing(self) -> str:
        if self.notes:
            return self.notes[0]
        for operation in self.seen.operations:
            if self._trained(operation):
                owner = self.seen.calls[operation.call].path
                where = repr(owner) if owner else "the model itself"
                return f"no frozen module finishes before {where}, which is trained, begins"
        return "no frozen module was called"

    # --------------------------------------------------------------------------- what the tail needs

    def _needed(self, skipped: set[int]) -> tuple[set[TensorVersion], dict[int, bool]]:
        """Return the tensors that cross if these calls are skipped, and the calls that must run after all."""
        found = needs(self.seen, skipped)
        values, strays, constants = found.values, found.strays, found.constants
        if self.training is not None:
            again = self._in_training(skipped)
            values, strays, constants = values | again[0], strays | again[1], constants | again[2]
        for index in strays:
            path = self.seen.calls[index].path
            self.notes.append(f"module {path!r} keeps a value of the data, which may be read after the cut")
        # A value that does not depend on the data is cheaper to compute in the tail than to ship.
        return values, dict.fromkeys(constants, False) | dict.fromkeys(strays, True)

    def _in_training(self, skipped: set[int]) -> tuple[set[TensorVersion], set[int], set[int]]:
        """Return what the pass in training needs, in terms of the pass in eval."""
        run = self.training
        assert run is not None  # the only caller checks it
        twins = {
            run.by_name[key].index: self.seen.calls[index]
            for index in skipped
            if (key := (self.seen.calls[index].path, self.seen.calls[index].number)) in run.by_name
        }
        found = needs(run, twins)
        values: set[TensorVersion] = set()
        for index, twin in twins.items():
            pairs = zip(run.calls[index].values, twin.values, strict=False)
            values |= {here for there, here in pairs if there in found.values}
        here_named = self.seen.flow.inputs()
        there_named = {number: leaf for leaf, number in run.flow.inputs().items()}
        found_leaves = {there_named[v.tensor] for v in found.values if v.tensor in there_named}
        values |= {TensorVersion(here_named[leaf]) for leaf in found_leaves}
        strays, constants = ({twins[i].index for i in some} for some in (found.strays, found.constants))
        return values, strays, constants

    def _ships(self, skipped: Sequence[ModuleCall], needed: set[TensorVersion]) -> list[CrossingTensor]:
        ships: dict[TensorVersion, CrossingTensor] = {}
        crossing = {value.tensor: value for value in needed}
        for leaf, number in sorted(self.seen.flow.inputs().items()):
            if number in crossing and number in self.seen.flow.origins:
                value = crossing[number]
                ships[value] = CrossingTensor(
                    source=TensorSource(path=None, leaf=leaf),
                    shape=self.trace.inputs[leaf],
                    value=value,
                    overwritten=any(run.flow.writes_into_input(leaf) for run in self._passes()),
                )
        for call in sorted(skipped, key=lambda call: call.exit):
            shapes = [leaf for leaf in call.leaves if isinstance(leaf, Shape)]
            for source, value, shape in zip(call.sources(), call.values, shapes, strict=True):
                if value in needed and value not in ships:
                    twins = (run.by_name.get((call.path, call.number)) for run in self._passes())
                    written = any(twin is not None and twin.overwritten for twin in twins)
                    ships[value] = CrossingTensor(
                        source=source, shape=shape, value=value, overwritten=written
                    )
        return list(ships.values())

    def _passes(self) -> list[ForwardPass]:
        """Return the pass in eval and, if there is one, the pass in training.

        An in-place Dropout, for example, writes only in training.
        """
        return [self.seen] if self.training is None else [self.seen, self.training]

    # ------------------------------------------------------------------------------------- data flow

    def _held(self, *, before_branches: bool) -> set[int]:
        """Return the operations that must run where the user's model runs, and all that depend on them."""
        run, held, stateful = self.seen, set[int](), self._stateful()
        told = False
        left = run.inside({call.index for call in self.trace.calls if call.path in self.left})
        data = run.reached_from_inputs() if before_branches else set()
        branched = False
        for index, operation in enumerate(run.operations):
            own = bool(operation.trouble) or self._trained(operation)
            own = own or left[index] >= 0 or run.calls[operation.call].path in self.trace.counting
            own = own or branched or run.follows(operation, held)
            if before_branches and operation.compiled:
                own = True
                self.notes.append(f"{run.where(index)} runs code that torch.compile makes")
            read = {value.tensor for value in operation.reads} & stateful
            if own or read:
                held.add(index)
            if read and not own and not told:  # one note is enough
                origin = run.flow.origins[min(read)]
                self.notes.append(f"the model changes {origin.kind} {origin.name!r} while it runs")
                told = True
            if operation.trouble:
                self.notes.append(f"{run.where(index)} {operation.trouble}")
            if operation.observes and not branched:
                if run.follows(operation, data):
                    self.notes.append(
                        f"{run.where(index)} decides by the data what it does ({operation.name})"
                    )
                    branched = True
                branched = branched or index in held
        return held

    def _counts_inside(self, call: ModuleCall) -> bool:
        inside = f"{call.path}." if call.path else ""
        return any(path == call.path or path.startswith(inside) for path in self.trace.counting)

    def _trained(self, operation: Operation) -> bool:
        origins = self.seen.flow.origins
        return any(value.tensor in origins and origins[value.tensor].trained for value in operation.reads)

    def _stateful(self) -> set[int]:
        """Return the numbers of the model's tensors that a pass changes."""
        changed = set(self.seen.flow.changed)
        if self.training is not None:
            # Modules without parameters may stay in eval during a job, and change nothing there.
            named = self.training.flow.changed
            changed |= {name for name in named if self.kinds.get(name.rpartition(".")[0]) != "free"}
        return {n for n, o in self.seen.flow.origins.items() if o.kind in _HELD and o.name in changed}


_HELD = ("parameter", "buffer", "tensor")
"""Kinds of tensors that the model itself holds."""


def _kind(module: nn.Module) -> str:
    flags = [parameter.requires_grad for parameter in module.parameters()]
    return "free" if not flags else "trained" if any(flags) else "frozen"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalPlan:
    """Modules and calls that stay in eval.

    Attributes:
        modules: In eval regardless of ``train()``: frozen units, and modules without parameters that are
            called in the prefix only.
        calls: For each module without parameters that is called on both sides of the cut, the numbers of its
            calls in the prefix.
    """

    modules: tuple[str, ...]
    calls: Mapping[str, Collection[int]] = field(default_factory=dict)


def in_eval_for(model: nn.Module, calls: Trace, point: FreezePoint, units: Sequence[str]) -> EvalPlan:
    """Return the modules and calls that stay in eval, given the model's frozen units."""
    owner = ForwardPass(calls.calls, calls.flow).enclosing(point.skipped)
    early: dict[str, list[int]] = {}
    late: set[str] = set()
    for call in calls.calls:
        if owner[call.index] >= 0:
            early.setdefault(call.path, []).append(call.number)
        else:
            late.add(call.path)
    free = [path for path in sorted(early) if _kind(model.get_submodule(path)) == "free"]
    return EvalPlan(
        modules=(*units, *(path for path in free if path not in late)),
        calls={path: early[path] for path in free if path in late},
    )
