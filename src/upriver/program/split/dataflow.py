"""Record the data flow of one forward pass: which operator reads the result of which other operator.

Operators are recorded as eager torch dispatches them, with real values. So any kind of control flow is
allowed. The flow follows tensors and in-place writes. A read refers to a tensor *as of* the last operator
that wrote into its memory.
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
from upriver.program.graph.devices import torch_states
from upriver.program.module_state.reachable import HeldTensor
from upriver.program.tensor_layouts import unusual


class TensorVersion(NamedTuple):
    """State of a tensor: its number, and the operator that last wrote into it since its creation."""

    tensor: int
    writer: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operator call.

    Attributes:
        call: Index of the innermost enclosing module call.
        reads: Tensors among its arguments.
        trouble: Reason why it may run only where the user's model runs. Usually empty.
        draws: True if it draws random numbers.
        observes: True if Python saw a value of the data (a branch may depend on it), or a size depends on the
            data.
        compiled: True if it is the first operator in code compiled by torch.compile, whose low bits may
            differ.
    """

    name: str
    call: int
    reads: tuple[TensorVersion, ...]
    trouble: str
    observes: bool
    draws: bool = False
    compiled: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Origin of a tensor that no operator made: an input, a tensor of the model, or a code constant."""

    kind: str
    name: str = ""
    trained: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFlow:
    """Data flow of one forward pass.

    Attributes:
        makers: Maps the number of a tensor to the operation that made it.
        origins: Maps the number of a tensor that no operation made to its origin.
        overwritten: Numbers in `origins` whose memory an operator writes into.
        changed: Names of the parameters, buffers and other tensors of the model that the pass has changed.
        left: Tensors that the pass has set as attributes, each with the path of the module that holds it.
    """

    operations: tuple[Operation, ...]
    makers: Mapping[int, int]
    origins: Mapping[int, Origin]
    overwritten: frozenset[int] = frozenset()
    changed: frozenset[str] = frozenset()
    left: tuple[tuple[str, TensorVersion], ...] = ()

    def inputs(self) -> dict[int, int]:
        """Return the tensor number of each input, by the input's index."""
        return {int(o.name): number for number, o in self.origins.items() if o.kind == "input"}

    @property
    def draws(self) -> bool:
        """Return whether an operator drew random numbers."""
        return any(operation.draws for operation in self.operations)

    def carried(self) -> dict[str, str]:
        """Map the path of each module that reads and replaces a tensor attribute to the attribute."""
        read = {value.tensor for operation in self.operations for value in operation.reads}
        names = (o.name for n, o in self.origins.items() if n in read and o.kind == "tensor")
        found = (name.rpartition(".") for name in names if name in self.changed)
        return {path: attribute for path, _, attribute in found}

    def writes_into_input(self, index: int) -> bool:
        """Return whether the model writes into an input."""
        return self.inputs()[index] in self.overwritten


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record a :class:`DataFlow` while a model runs.

    Attributes:
        call: Index of the running module call. The code that follows the modules sets it.
        running: Name of the operator whose functions are running. Empty for none.
    """

    supports_higher_order_operators = True

    def __init__(self, held: Sequence[HeldTensor], inputs: list[torch.Tensor]) -> None:
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
        self._tensors: list[torch.Tensor] = []  # kept alive, so that no identity is reused
        self._made_at: list[int] = []
        self._writers: dict[int, list[int]] = {}  # operations, in order, by storage
        self._owners: dict[int, str] = {}
        for each in held:
            origin = Origin(kind=each.kind, name=each.name, trained=each.tensor.requires_grad)
            self._originate(each.tensor, origin)
            self._owners.setdefault(_storage(each.tensor), f"{each.kind} {each.name!r}")
        for index, tensor in enumerate(inputs):
            self._originate(tensor, Origin(kind="input", name=str(index)))

    def flow(self, *, changed: Collection[str] = (), left: Sequence[HeldTensor] = ()) -> DataFlow:
        """Return the recorded data flow.

        Args:
            changed: Names of tensors that changed without a recorded operator.
            left: Tensors that the model reaches now and did not reach before.
        """
        # Before the rest, as some of these tensors may be new.
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
        """Record that the next operator is in code compiled by torch.compile, which runs uncompiled."""
        self._compiled = True
        return False

    def draw(self, whose: str) -> None:
        """Record that the running call drew random numbers that no operator shows."""
        self._operations.append(
            Operation(
                name="random", call=self.call, reads=(), trouble=f"draws {whose}", observes=True, draws=True
            )
        )

    def value(self, tensor: torch.Tensor) -> TensorVersion:
        """Return the current version of a tensor."""
        number = self._number(tensor)
        *_, writer = self._writers.get(_storage(tensor), [-1])
        return TensorVersion(number, writer if writer > self._made_at[number] else -1)

    @property
    def num_operations(self) -> int:
        """Number of operations so far."""
        return len(self._operations)

    def calls_that_wrote(self, tensor: torch.Tensor, *, since: int) -> frozenset[int]:
        """Return the module calls in which operators wrote into a tensor.

        Args:
            since: Number of operations before the first that counts.
        """
        written = self._writers.get(_storage(tensor), [])
        return frozenset(self._operations[index].call for index in written if index >= since)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._run(func, args, kwargs)
        if self.running:
            self._read += self._known(tensors_in((args, kwargs)))
            self._written += [_storage(tensor) for tensor in written_by(func, args, kwargs)]
            return func(*args, **kwargs)
        # Before the call, which may write into its arguments.
        reads = tuple(self.value(tensor) for tensor in tensors_in((args, kwargs)))
        written = list(written_by(func, args, kwargs))
        before = _random_state() if torch.Tag.nondeterministic_seeded in func.tags else None
        result = func(*args, **kwargs)
        random = before is not None and before != _random_state()
        sized = not _DEPENDS_ON_DATA.isdisjoint(func.tags) and not _is_plain_index(func, args)
        self._note(func, reads, written, result, random=random, sized=sized)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator that runs functions. Record it as one operation that reads all they read or hold.

        A branch not taken this time may be taken next time, and read what it holds.
        """
        held, functions = held_by((args, kwargs)), under(self, (args, kwargs))
        if self.running:
            self._read += self._known(held)
            return func(*functions[0], **functions[1])
        self.running, self._read, self._written = str(func.name()), list(self._known(held)), []
        self._compiled = False  # such an operator compiles its functions itself
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
        for storage in self._written:
            self._writers.setdefault(storage, []).append(index)
        return result

    def _known(self, tensors: list[torch.Tensor]) -> Iterator[TensorVersion]:
        """Return the tensors that existed before the functions of an operator ran."""
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
        around = [*(self._tensors[value.tensor] for value in reads), *made]
        odd = next(filter(None, map(unusual, around)), "")
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
                draws=random,
                compiled=self._compiled and bool(reads),
            )
        )
        self._compiled = self._compiled and not reads
        for tensor in made:
            if id(tensor) not in self._numbers:
                self._makers[self._number(tensor, made_at=index)] = index
        for tensor in written:
            self._writers.setdefault(_storage(tensor), []).append(index)

    def _originate(self, tensor: torch.Tensor, origin: Origin) -> None:
        if origin.kind == "tensor" and _place(tensor) in self._places:
            self._number(tensor)  # another name for a known tensor
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
            # Another object for the same tensor that no operator made: ``.data``, or from as_subclass().
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
    """Return whether `func` indexes by integers. Only a mask makes the result's size depend on data."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(index.dtype not in (torch.bool, torch.uint8) for index in tensors_in(args[1]))


def written_by(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the arguments that an operator writes into."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from tensors_in(given)


def _place(tensor: torch.Tensor) -> object:
    """Return a key shared only by tensors over the same elements. None if no key exists."""
    if unusual(tensor):
        return None
    return _storage(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _storage(tensor: torch.Tensor) -> int:
    """Return a key that all views of a tensor share. Unusual tensors get a key of their own."""
    return -id(tensor) if unusual(tensor) else int(tensor.untyped_storage()._cdata)


def _random_state() -> bytes:
    return b"".join(state.numpy().tobytes() for state in torch_states())


def opaque_in(value: Any) -> str:
    """Return the type of the part that no stub can return, such as a cache. Empty if there is none.

    The rows of a packed sequence are ordered by time, not by sample.
    """
    plain = (torch.Tensor, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
    for leaf in pytree.tree_leaves(value, is_leaf=lambda part: isinstance(part, PackedSequence)):
        if leaf is not None and not isinstance(leaf, plain):
            return type(leaf).__name__
        if isinstance(leaf, torch.Tensor) and (kind := unusual(leaf)):
            return kind
    return ""
