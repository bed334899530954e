"""Predict from a random network's description whether it can be cut, and if not, why.

The prediction walks the description with *facts* instead of tensors: which operation made a value from which
values, whether trainable parameters contributed, whether samples were mixed. Nothing here knows how
:mod:`upriver.program` finds its cuts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from tests.program.random_networks import Block, Do, Net


@dataclass(eq=False)
class Fact:
    """One operation: its operands, its place, and its special properties.

    Attributes:
        calls: Numbers of the module calls around it, outermost first.
        bound: Whether it, or an operand, may only run in the user's own process.
        stateful: Whether it gives another result each time.
        varies: Whether it depends on the inputs.
    """

    sources: tuple[Fact, ...] = ()
    calls: tuple[int, ...] = ()
    reads: frozenset[str] = frozenset()
    bound: bool = False
    mixes: bool = False
    stateful: bool = False
    varies: bool = False


@dataclass(eq=False)
class Cell:
    """Memory: the last fact written into it. Views of one tensor share a cell."""

    fact: Fact


@dataclass(eq=False)
class Called:
    """One call of a module."""

    path: str
    number: int
    parents: tuple[int, ...]
    results: tuple[Cell, ...] = ()
    returned: tuple[Fact, ...] = ()


@dataclass(frozen=True)
class Expected:
    """The expected outcome for a network.

    Attributes:
        cut: Whether the network can be cut.
        mixes: Whether the prefix mixes samples.
        doubtful: Why either outcome is right; empty for most.
        reads: Names of the parameters that the prefix reads.
        rows_apart: Whether in evaluation no sample influences another one, and chance influences none.
        twice: Whether a module that acts differently in training may be called on both sides of the cut.
        writes: Whether the network writes in place.
    """

    cut: bool
    mixes: bool
    doubtful: str
    reads: frozenset[str]
    rows_apart: bool
    twice: bool
    writes: bool


@dataclass
class _Reader:
    """One walk through a description."""

    net: Net
    branches_bind: bool = False
    calls: list[Called] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    stack: list[int] = field(default_factory=list)
    after_branch: bool = False
    branched: bool = False
    written: set[int] = field(default_factory=set)

    # --------------------------------------------------------------------------------- operations

    def make(
        self,
        *sources: Cell,
        reads: Sequence[str] = (),
        stateful: bool = False,
        mixes: bool = False,
        into: Cell | None = None,
    ) -> Cell:
        """Record an operation and the memory that holds its result."""
        made_from = tuple(cell.fact for cell in sources)
        trained = any(self.net.get_parameter(name).requires_grad for name in reads)
        fact = Fact(
            sources=made_from,
            calls=tuple(self.stack),
            reads=frozenset(reads),
            bound=stateful or trained or self.after_branch or any(fact.bound for fact in made_from),
            mixes=mixes,
            stateful=stateful,
            varies=any(fact.varies for fact in made_from),
        )
        self.facts.append(fact)
        if into is None:
            return Cell(fact)
        into.fact = fact
        self.written.add(id(into))
        return into

    @contextlib.contextmanager
    def call(self, path: str) -> Iterator[list[Cell]]:
        """Enter a module call; append its result to the list."""
        called = Called(path, len(self.calls), tuple(self.stack))
        self.calls.append(called)
        self.stack.append(called.number)
        results: list[Cell] = []
        yield results
        self.stack.pop()
        called.results = tuple(results)
        called.returned = tuple(cell.fact for cell in results)

    # ------------------------------------------------------------------------------------ modules

    def layer(self, kind: str, path: str, x: Cell) -> Cell:
        with self.call(path) as results:
            results.append(self._layer(kind, path, x))
        return results[0]

    def _layer(self, kind: str, path: str, x: Cell) -> Cell:
        module = self.net.get_submodule(path)
        if kind in ("relu_", "hardswish_"):
            return self.make(x, into=x)
        if kind in ("dropout", "dropout_") or isinstance(module, nn.Identity):
            return x  # in evaluation
        reads = [f"{path}.{name}" for name, _ in module.named_parameters()]
        mixes = kind == "batchnorm_of_the_batch"
        return self.make(x, reads=reads, stateful=kind in ("noise", "count"), mixes=mixes)

    def block(self, index: int, block: Block, x: Cell) -> list[Cell]:
        path = f"blocks.{index}"
        with self.call(path) as results:
            y = x
            with self.call(f"{path}.layers") as inner:
                for number, kind in enumerate(block.layers):
                    y = self.layer(kind, f"{path}.layers.{number}", y)
                inner.append(y)
            results += self._form(block.form, path, x, y)
        return results

    def _form(self, form: str, path: str, x: Cell, y: Cell) -> list[Cell]:
        match form:
            case "plain":
                return [y]
            case "residual" | "shifted":
                return [self.make(x, y)]
            case "residual_":
                return [self.make(y, into=self.make(y, x, into=y))]
            case "dense":
                joined = self.make(x, y)
                with self.call(f"{path}.project") as results:
                    results.append(self.make(joined, reads=self._own(f"{path}.project")))
                return results
            case "swapped" | "strided" | "spread" | "masked":
                return [self.make(y)]
            case "position":
                with self.call(f"{path}.table") as results:
                    results.append(self.make(reads=self._own(f"{path}.table")))
                return [self.make(y, results[0])]
            case "pair" | "mapping":
                return [y, self.make(y)]
            case "aliases":
                return [y, y]
            case "centred" | "gram":
                return [self.make(y, mixes=True)]
        raise ValueError(form)

    def _own(self, path: str) -> list[str]:
        return [f"{path}.{name}" for name, _ in self.net.get_submodule(path).named_parameters()]

    # ------------------------------------------------------------------------------------ the net

    def run(self) -> list[Fact]:
        """Return the facts of the answer."""
        given = Cell(Fact(varies=True))
        second = Cell(Fact(varies=True))
        x, kept, number = given, [given], 0
        blocks = self.net.description.blocks
        for step in self.net.description.steps:
            if isinstance(step, Block) or step.what == "again":
                chosen = number if isinstance(step, Block) else step.at % max(1, number)
                number += isinstance(step, Block)
                if number:
                    results = self.block(chosen, blocks[chosen], x)
                    kept += results[1:]
                    kept.append(results[0])
                    x = results[0]
            elif step.what == "restart":
                x = given
            elif step.what == "second":
                x = second if self.net.description.inputs != "one" else x
            else:
                x = self._do(step, x, kept, number)
        with self.call("head") as results:
            results.append(self.make(x, reads=self._own("head")))
        hidden = [] if self.net.description.output == "tensor" else [x.fact]
        return [results[0].fact, *hidden]

    def _do(self, step: Do, x: Cell, kept: list[Cell], number: int) -> Cell:
        other = kept[step.at % len(kept)]
        match step.what:
            case "skip" | "concat":
                return self.make(x, other)
            case "add_" | "relu_":
                return self.make(x, into=x)
            case "skip_":
                return self.make(x, other, into=x)
            case "flat":
                return x  # a view or a copy: the two differ only in which readers see a later write
            case "strided" | "swapped" | "mask":
                return self.make(x)
            case "gate":
                with self.call("gate") as results:
                    results.append(self.make(x))
                kept.append(results[0])
                return x
            case "drop":
                with self.call("drop") as results:
                    results.append(x)
                return x
            case "borrow":
                affine = self.net.affine_of(step.at % number) if number else None
                if affine is None:
                    return x
                return self.make(x, reads=[self._name_of(affine.weight)])
            case "detach":
                return x
            case "branch":
                self.branched = True
                self.after_branch |= x.fact.bound or self.branches_bind
                return self.make(x)
            case "centre" | "gram":
                return self.make(x, mixes=True)
        raise ValueError(step.what)

    def _name_of(self, wanted: nn.Parameter) -> str:
        return next(name for name, parameter in self.net.named_parameters() if parameter is wanted)


def expect(net: Net) -> Expected:
    """Return the expected outcome for this network."""
    full = _judge(net, branches_bind=False)
    if not any(isinstance(step, Do) and step.what == "branch" for step in net.description.steps):
        return full
    # Whether the splitter counts it as part of the prefix depends on the modules that run after it. Which
    # values are written into depends on that choice.
    careful = _judge(net, branches_bind=True)
    if full == careful and not full.doubtful and not full.writes:
        return full
    return replace(full, doubtful="a branch on data")


def _judge(net: Net, *, branches_bind: bool) -> Expected:
    reader = _Reader(net, branches_bind=branches_bind)
    answer = reader.run()
    ships = _ships(reader, answer)
    prefix = _closure(ships)
    return Expected(
        cut=bool(ships),
        mixes=any(fact.mixes for fact in prefix),
        doubtful=_doubt(reader),
        reads=frozenset(name for fact in prefix for name in fact.reads),
        rows_apart=not any(fact.mixes or fact.stateful for fact in reader.facts),
        twice=_trains_twice(reader),
        writes=bool(reader.written),
    )


def _ships(reader: _Reader, answer: Sequence[Fact]) -> list[Fact]:
    """Return the values that frozen modules make and the rest reads."""
    left: set[int] = set()
    while True:
        skipped = _skipped(reader, left)
        ships: dict[Fact, int] = {}
        seen: set[int] = set()
        todo = [*answer, *(fact for fact in reader.facts if fact.stateful)]
        while todo:
            fact = todo.pop()
            if id(fact) in seen:
                continue
            seen.add(id(fact))
            owner = next((call for call in fact.calls if call in skipped), None)
            if owner is None or not fact.varies:
                todo += fact.sources
            else:
                ships[fact] = owner
        # Code may keep a value that a module wrote without being given it: the splitter then looks at the
        # module's parts.
        leaks = {owner for fact, owner in ships.items() if fact not in reader.calls[owner].returned}
        if not leaks:
            return list(ships)
        left |= leaks


def _skipped(reader: _Reader, left: set[int]) -> set[int]:
    bound = {call for fact in reader.facts if fact.bound for call in fact.calls}
    found = set()
    for called in reader.calls:
        flags = [p.requires_grad for p in reader.net.get_submodule(called.path).parameters()]
        frozen = bool(flags) and not any(flags)
        if frozen and called.number not in bound and called.number not in left:
            found.add(called.number)
    return {number for number in found if not found & set(reader.calls[number].parents)}


def _closure(facts: Sequence[Fact]) -> list[Fact]:
    found: dict[int, Fact] = {}
    todo = list(facts)
    while todo:
        fact = todo.pop()
        if id(fact) not in found:
            found[id(fact)] = fact
            todo += fact.sources
    return list(found.values())


def _doubt(reader: _Reader) -> str:
    """Return why a refusal would be as right as a cut."""
    forms = {step.form for step in reader.net.description.blocks}
    if reader.written and "aliases" in forms:
        return "a module gives one tensor under two names, and something writes into one of them"
    if reader.written and Do("flat") in {
        replace(step, at=0) for step in reader.net.description.steps if isinstance(step, Do)
    }:
        # reshape() makes a view of a tensor that did not cross, in the form in which the view costs nothing.
        return "something writes into a reshaped copy"
    strided = (
        reader.net.description.strided
        or forms & {"strided", "shifted"}
        or any(
            isinstance(step, Do) and step.what in ("strided", "concat")
            for step in reader.net.description.steps
        )
    )
    if strided and any(isinstance(module, nn.BatchNorm1d) for module in reader.net.modules()):
        # The result decides whether contiguous() copies, so the graph has other bits.
        return "torch traces BatchNorm with other strides than the kernel gives"
    layers = [module for module in reader.net.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    if any(len({p.requires_grad for p in layer.parameters()}) == 2 for layer in layers):
        return "an encoder layer is frozen in part, and counts as one operation here"
    return ""


def _trains_twice(reader: _Reader) -> bool:
    """Return whether a parameter-free module that acts differently in training is called more than once."""
    paths = [called.path for called in reader.calls]
    kinds = nn.Dropout | nn.BatchNorm1d | nn.BatchNorm2d
    return any(
        paths.count(path) > 1
        and isinstance(reader.net.get_submodule(path), kinds)
        and not any(True for _ in reader.net.get_submodule(path).parameters())
        for path in set(paths)
    )
