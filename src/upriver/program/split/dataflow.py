"""Which operator of one forward pass read what another one made: the data flow between module calls.

Operators are seen as eager torch dispatches them, with real values, so control flow of any kind is no
obstacle. Flow is followed from tensor to tensor, and through in-place writes: what is read is a tensor *as
of* the last operator that had written into its memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from upriver.program.compiled_code import held_by, under
from upriver.program.example_inputs import tensors_in
from upriver.program.module_state.reachable import HeldTensor
from upriver.program.tensor_layouts import unusual


class TensorVersion(NamedTuple):
    """A tensor at one moment: its number, and the operator that last wrote into it since it was made."""

    tensor: int
    writer: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operator call.

    Attributes:
        name: ``aten::add`` and the like.
        call: Index of the innermost module call around it.
        reads: What its arguments were.
        trouble: Why it may only run where the user's model runs; empty for most.
        observes: Whether Python saw a value of the data (a branch may depend on it), or a size did.
        compiled: Whether it is the first in code that torch.compile makes, whose low bits may be others.
    """

    name: str
    call: int
    reads: tuple[TensorVersion, ...]
    trouble: str
    observes: bool
    compiled: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """A tensor that no operator made: an input, one of the model's, or one that the code had all along."""

    kind: str
    name: str = ""
    trained: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFlow:
    """The data flow of one forward pass.

    Attributes:
        operations: In the order of execution.
        makers: Number of a tensor to the operation that made it.
        origins: Number of a tensor to where it comes from, for those that no operation made.
        overwritten: Those of them whose memory an operator writes into.
        changed: Names of the parameters, buffers and other tensors of the model that the pass has changed.
        left: Tensors that the pass has set as attributes, and the path of the module that holds each.
    """

    operations: tuple[Operation, ...]
    makers: Mapping[int, int]
    origins: Mapping[int, Origin]
    overwritten: frozenset[int] = frozenset()
    changed: frozenset[str] = frozenset()
    left: tuple[tuple[str, TensorVersion], ...] = ()

    def inputs(self) -> dict[int, int]:
        """Index of each input that the model was seen with to its number."""
        return {int(o.name): number for number, o in self.origins.items() if o.kind == "input"}

    def carried(self) -> dict[str, str]:
        """Path of each module that reads a tensor among its attributes and replaces it, to the attribute."""
        read = {value.tensor for operation in self.operations for value in operation.reads}
        names = (o.name for n, o in self.origins.items() if n in read and o.kind == "tensor")
        found = (name.rpartition(".") for name in names if name in self.changed)
        return {path: attribute for path, _, attribute in found}

    def writes_into_input(self, index: int) -> bool:
        """Whether the model writes into what it was given."""
        return self.inputs()[index] in self.overwritten


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes a :class:`DataFlow` while a model runs.

    Attributes:
        call: Index of the module call that is running; set by whoever follows the modules.
        running: Name of the operator whose functions are running; empty for none.
    """

    supports_higher_order_operators = True

    def __init__(self, held: Sequence[HeldTensor], inputs: list[torch.Tensor]) -> None:
        """Nothing is written yet.

        Args:
            held: The model's parameters, buffers and other tensors.
            inputs: What it is called with.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.call = 0
        self.running = ""
        self._compiled = False
        self._read: list[TensorVersion] = []  # by functions of that operator
        self._written: list[int] = []
        self._operations: list[Operation] = []
        self._makers: dict[int, int] = {}
        self._origins: dict[int, Origin] = {}
        self._numbers: dict[int, int] = {}
        self._places: dict[object, int] = {}
        self._tensors: list[torch.Tensor] = []  # kept, so that no identity is given out twice
        self._made_at: list[int] = []
        self._writers: dict[int, int] = {}
        self._owners: dict[int, str] = {}
        for each in held:
            origin = Origin(kind=each.kind, name=each.name, trained=each.tensor.requires_grad)
            self._originate(each.tensor, origin)
            self._owners.setdefault(_storage(each.tensor), f"{each.kind} {each.name!r}")
        for index, tensor in enumerate(inputs):
            self._originate(tensor, Origin(kind="input", name=str(index)))

    def flow(self, *, changed: Collection[str] = (), left: Sequence[HeldTensor] = ()) -> DataFlow:
        """What was recorded.

        Args:
            changed: Names of what was found to have changed, if not by an operator that was seen.
            left: What hangs on the model now and did not before.
        """
        # First, as some of them may be new here.
        values = tuple((each.name.rpartition(".")[0], self.value(each.tensor)) for each in left)
        written = frozenset(n for n in self._origins if _storage(self._tensors[n]) in self._writers)
        return DataFlow(
            operations=tuple(self._operations),
            makers=self._makers,
            origins=self._origins,
            overwritten=written,
            changed=frozenset(changed) | {self._origins[number].name for number in written},
            left=values,
        )

    def enter_compiled(self) -> bool:
        """Note that the next operator is in code that torch.compile makes, which runs as it is written."""
        self._compiled = True
        return False

    def draw(self, whose: str) -> None:
        """Note that the call that is running has drawn random numbers that no operator shows."""
        self._operations.append(
            Operation(name="random", call=self.call, reads=(), trouble=f"draws {whose}", observes=True)
        )

    def value(self, tensor: torch.Tensor) -> TensorVersion:
        """A tensor as it is now."""
        number = self._number(tensor)
        writer = self._writers.get(_storage(tensor), -1)
        return TensorVersion(number, writer if writer > self._made_at[number] else -1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._run(func, args, kwargs)
        if self.running:
            self._read += self._known(tensors_in((args, kwargs)))
            self._written += [_storage(tensor) for tensor in written_by(func, args, kwargs)]
            return func(*args, **kwargs)
        # Before the call: it may write into what it reads.
        reads = tuple(self.value(tensor) for tensor in tensors_in((args, kwargs)))
        written = list(written_by(func, args, kwargs))
        before = _random_state() if torch.Tag.nondeterministic_seeded in func.tags else None
        result = func(*args, **kwargs)
        random = before is not None and before != _random_state()
        sized = not _DEPENDS_ON_DATA.isdisjoint(func.tags) and not _is_plain_index(func, args)
        self._note(func, reads, written, result, random=random, sized=sized)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator that runs functions: one operation, which reads all that these read or hold.

        A branch that is not taken this time reads what it holds the next time.
        """
        held, functions = held_by((args, kwargs)), under(self, (args, kwargs))
        if self.running:
            self._read += self._known(held)
            return func(*functions[0], **functions[1])
        self.running, self._read, self._written = str(func.name()), list(self._known(held)), []
        self._compiled = False  # such an operator compiles what it is given by itself
        try:
            result = func(*functions[0], **functions[1])
        finally:
            name, self.running = self.running, ""
        index, reads = len(self._operations), tuple(dict.fromkeys(self._read))
        trouble = f"runs the operator {name}, which runs functions"
        self._operations.append(
            Operation(name=name, call=self.call, reads=reads, trouble=trouble, observes=False)
        )
        for tensor in tensors_in(result):
            if id(tensor) not in self._numbers:
                self._makers[self._number(tensor, made_at=index)] = index
        self._writers |= dict.fromkeys(self._written, index)
        return result

    def _known(self, tensors: list[torch.Tensor]) -> Iterator[TensorVersion]:
        """Those that were there before the functions of an operator ran."""
        return (
            self.value(tensor)
            for tensor in tensors
            if id(tensor) in self._numbers or _place(tensor) in self._places
        )

    def _note(
        self,
        func: Any,
        reads: tuple[TensorVersion, ...],
        written: list[torch.Tensor],
        result: Any,
        *,
        random: bool,
        sized: bool,
    ) -> None:
        index = len(self._operations)
        name = func._schema.name
        owners = [self._owners[_storage(tensor)] for tensor in written if _storage(tensor) in self._owners]
        made = tensors_in(result)
        odd = next((kind for tensor in (*self._read_of(reads), *made) if (kind := unusual(tensor))), "")
        trouble = f"changes {owners[0]}" if owners else f"runs the random operator {name}" if random else ""
        trouble = trouble or (f"computes with {odd}" if odd else "")
        seen = bool(reads) and not made and not written
        self._operations.append(
            Operation(
                name=name,
                call=self.call,
                reads=reads,
                trouble=trouble,
                observes=seen or sized,
                compiled=self._compiled and bool(reads),
            )
        )
        self._compiled = self._compiled and not reads
        for tensor in made:
            if id(tensor) not in self._numbers:
                self._makers[self._number(tensor, made_at=index)] = index
        for tensor in written:
            self._writers[_storage(tensor)] = index

    def _read_of(self, reads: tuple[TensorVersion, ...]) -> Iterator[torch.Tensor]:
        return (self._tensors[value.tensor] for value in reads)

    def _originate(self, tensor: torch.Tensor, origin: Origin) -> None:
        if origin.kind == "tensor" and _place(tensor) in self._places:
            self._number(tensor)  # another name for what has one
        elif id(tensor) not in self._numbers:
            self._origins[self._new(tensor)] = origin

    def _number(self, tensor: torch.Tensor, *, made_at: int | None = None) -> int:
        known = self._numbers.get(id(tensor))
        if known is not None:
            return known
        if made_at is not None:
            return self._new(tensor, made_at)
        place = _place(tensor)
        if place is not None and (same := self._places.get(place)) is not None:
            # Another object for it, which no operator made: ``.data``, or of another class by as_subclass().
            self._tensors.append(tensor)
            self._made_at.append(self._made_at[same])
            self._numbers[id(tensor)] = same
            return same
        number = self._new(tensor)
        self._origins[number] = Origin(kind="constant", trained=tensor.requires_grad)
        return number

    def _new(self, tensor: torch.Tensor, made_at: int = -1) -> int:
        number = self._numbers[id(tensor)] = len(self._tensors)
        self._tensors.append(tensor)
        self._made_at.append(made_at)
        if (place := _place(tensor)) is not None:
            self._places[place] = number
        return number


_DEPENDS_ON_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _is_plain_index(func: Any, args: Any) -> bool:
    """Indexing by whole numbers: only a mask makes a result's size depend on data."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(index.dtype not in (torch.bool, torch.uint8) for index in tensors_in(args[1]))


def written_by(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors among its arguments that an operator writes into."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from tensors_in(given)


def _place(tensor: torch.Tensor) -> object:
    """What tells a tensor from all others but those that are the same elements; None where nothing does."""
    if unusual(tensor):
        return None
    return _storage(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _storage(tensor: torch.Tensor) -> int:
    """What all views of a tensor share; of one without memory of its own it is the tensor's alone."""
    return -id(tensor) if unusual(tensor) else int(tensor.untyped_storage()._cdata)


def _random_state() -> bytes:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states += torch.cuda.get_rng_state_all()
    return b"".join(state.numpy().tobytes() for state in states)


def opaque_in(value: Any) -> str:
    """What in a module's result no stub could give, such as a cache; empty if there is nothing.

    The rows of a packed sequence are in order of time, not of samples.
    """
    plain = (torch.Tensor, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
    for leaf in pytree.tree_leaves(value, is_leaf=lambda part: isinstance(part, PackedSequence)):
        if leaf is not None and not isinstance(leaf, plain):
            return type(leaf).__name__
        if isinstance(leaf, torch.Tensor) and (kind := unusual(leaf)):
            return kind
    return ""
