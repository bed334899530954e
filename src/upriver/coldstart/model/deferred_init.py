"""Watch a constructor's operators, and defer those that fill memory before its first read.

Each operator is of one of a few kinds. Fills of memory that was allocated during the watch become notes
(:mod:`upriver.coldstart.model.deferred_fills`). So do the in-place arithmetic that follows them, and copies
of unfilled memory. Before any other operator runs, the notes of what it reads run. Fills of older memory, or
of memory that Python code can reach directly, run at once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from upriver.coldstart.model.deferred_fills import DeferredFills, storage_key, weak
from upriver.coldstart.model.weight_barrier import only_views
from upriver.program.compiled_code import as_written, runs_functions


class _Way(Enum):
    """Treatment of an operator."""

    RUN = auto()  # runs after the notes of what it reads
    BLIND = auto()  # reads no values
    FILL = auto()
    STEP = auto()  # changes each element by itself, in place
    COPY = auto()
    TWIN = auto()  # makes a tensor with another one's values
    DRAW = auto()  # makes a tensor of random numbers


class _Traits(NamedTuple):
    """Properties of an operator."""

    way: _Way
    is_random: bool
    is_writing: bool
    is_making: bool  # allocates its result


_NAMES = {
    _Way.FILL: "zero_ fill_ normal_ uniform_ random_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_",
    _Way.STEP: "add_ sub_ mul_ div_ pow_ neg_ abs_ exp_ expm1_ log_ log1p_ sqrt_ rsqrt_ reciprocal_ sin_ "
    "cos_ tanh_ sigmoid_ erf_ erfinv_ clamp_ clamp_min_ clamp_max_ floor_ ceil_ round_ sign_",
    _Way.BLIND: "empty_like zeros_like ones_like full_like rand_like randn_like new_empty new_empty_strided "
    "new_zeros new_ones new_full is_same_size _has_compatible_shallow_copy_type "
    "detach_ t_ transpose_ squeeze_ unsqueeze_ as_strided_",
    _Way.COPY: "copy_",
    _Way.TWIN: "clone _to_copy",
    _Way.DRAW: "rand randn",
}

_WAYS = {name: way for way, names in _NAMES.items() for name in names.split()}

_FILL_OF = {"rand": torch.ops.aten.uniform_.default, "randn": torch.ops.aten.normal_.default}
"""Fills with which ATen makes a tensor of random numbers from an empty one, with their default arguments."""

_SHARING = frozenset({"from_file", "_unsafe_view"})
"""Operators whose results share memory with other tensors, although their schemas do not say so."""

_DEVICES = ("cpu", "cuda")

_SMALL_BYTES = 64 << 10
"""Most bytes of a constant fill that runs at once, because a note would cost more."""


@functools.cache
def _traits(func: Any) -> _Traits:
    namespace, _, name = func._schema.name.partition("::")
    way = _WAYS.get(name, _Way.RUN) if namespace == "aten" else _Way.RUN
    if way is _Way.DRAW and func._overloadname not in ("default", "generator"):
        way = _Way.RUN
    if way is _Way.RUN and not any("Tensor" in str(argument.type) for argument in func._schema.arguments):
        way = _Way.BLIND
    return _Traits(
        way=_Way.BLIND if only_views(func) else way,
        is_random=torch.Tag.nondeterministic_seeded in func.tags
        or any(argument.name == "generator" for argument in func._schema.arguments),
        is_writing=func._schema.is_mutable,
        is_making=namespace == "aten"
        and not (func.is_view or func._schema.is_mutable)
        and name not in _SHARING,
    )


class FillWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Defer fills of memory that was allocated during the watch.

    Attributes:
        left: Function to call when deferring ends, because unseen code is about to run.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.notes = DeferredFills()
        self.left: Callable[[], object] = lambda: None
        self._own: dict[int, StorageWeakRef] = {}  # storages that no code can read unseen
        self._is_aside = False

    @as_written
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_aside:
            return func(*args, **kwargs)
        if runs_functions(func):
            with torch._C.DisableTorchFunction():
                self.notes.settle_all()
            return func(*args, **kwargs)
        traits = _traits(func)
        foreign = any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types)
        if foreign or traits.is_random or traits.way is not _Way.BLIND:
            with torch._C.DisableTorchFunction():
                if foreign:  # such tensors may use their memory unseen
                    self.notes.settle_all()
                elif (taken := self._instead(func, traits, args, kwargs)) is not None:
                    return taken
        result = func(*args, **kwargs)
        if traits.is_making and not foreign:
            with torch._C.DisableTorchFunction():
                self._adopt(result, () if traits.way is _Way.BLIND else (args, kwargs))
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Refuse a wrapper: see :func:`~upriver.program.compiled_code.as_written`."""
        return False

    @as_written
    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        """Let code be compiled and run: run all notes, and defer nothing from now on.

        The compiler asks before it inspects a function. After a refusal it would never compile the function
        again, for any model of the process.
        """
        if not self._is_aside:
            with self.aside():
                self.notes.settle_all()
            self._own.clear()
            self._is_aside = True
            self.left()
        return True

    # ---------------------------------------------------------------------------- what is put off

    def _instead(
        self, func: Any, traits: _Traits, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """Return the result of an operator that need not run; else None, after the notes that it needs."""
        taken: torch.Tensor | None = None
        match traits.way:
            case _Way.FILL | _Way.STEP:
                taken = self._fill(func, traits, args, kwargs)
            case _Way.COPY:
                taken = self._copy(*args)
            case _Way.TWIN:
                taken = self._twin(*args, **kwargs)
            case _Way.DRAW:
                taken = self._draw(func, *args, **kwargs)
        if taken is not None:
            return taken
        if traits.is_random:
            given = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator))
            self.notes.catch_up(next(given, None))
        if traits.way is not _Way.BLIND:
            self._settle((args, kwargs), written=traits.is_writing)
        return None

    def _fill(
        self, func: Any, traits: _Traits, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        target: torch.Tensor = args[0]
        key = self._mine(target)
        if key is None:
            return None
        is_cheap = traits.way is _Way.STEP or target.nbytes <= _SMALL_BYTES
        if is_cheap and not traits.is_random and not self.notes.is_behind(key):
            return None
        return target if self._put_off(func, target, args[1:], kwargs, traits.is_random) else None

    def _put_off(
        self,
        func: Any,
        target: torch.Tensor,
        rest: Sequence[Any],
        kwargs: Mapping[str, Any],
        is_random: bool = True,
    ) -> bool:
        """Defer a call, unless it reads more than numbers and its target.

        The call runs at once on an empty tensor, so that invalid arguments raise now.
        """
        kwargs = dict(kwargs)
        generator = _generator(target, kwargs.pop("generator", None)) if is_random else None
        if is_random and generator is None:
            return False
        if any(isinstance(value, torch.Tensor) for value in kwargs.values()):
            return False
        if not all(self._is_number(value) for value in rest if isinstance(value, torch.Tensor)):
            return False
        fixed = [value.clone() if isinstance(value, torch.Tensor) else value for value in rest]
        nothing = torch.empty(0, dtype=target.dtype, device=target.device)
        func(nothing, *fixed, **kwargs)
        if generator is not None:
            kwargs["generator"] = generator
        self.notes.fill(target, lambda into: func(into, *fixed, **kwargs), generator)
        return True

    def _is_number(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is one number that is known now."""
        return not tensor.dim() and is_plain(tensor) and not self.notes.is_behind(storage_key(tensor))

    def _copy(self, target: torch.Tensor, source: torch.Tensor, *_rest: Any) -> torch.Tensor | None:
        key, read = self._mine(target), self._mine(source)
        if key is None or not _has_memory(source) or storage_key(source) == key:
            return None
        is_whole = span_of(target) == (0, target.untyped_storage().nbytes())
        if self._is_late(read) or (read is not None and self._is_late(key) and not is_whole):
            if target.shape == source.shape and target.is_complex() == source.is_complex():
                self.notes.copy(target, source)
                return target
        elif is_whole and source.shape == target.shape:
            self.notes.replace(key)
        return None

    def _twin(self, source: torch.Tensor, **kwargs: Any) -> torch.Tensor | None:
        if not self._is_late(self._mine(source)) or not source.is_contiguous():
            return None
        dtype = kwargs.get("dtype") or source.dtype
        device = torch.device(kwargs.get("device") or source.device)
        if device.type not in _DEVICES or dtype.is_complex != source.dtype.is_complex:
            return None
        if kwargs.get("layout") not in (None, torch.strided) or kwargs.get("pin_memory"):
            return None
        if kwargs.get("memory_format") not in (None, torch.preserve_format):
            return None
        result = torch.empty_strided(source.size(), source.stride(), dtype=dtype, device=device)
        self._own[storage_key(result)] = weak(result)
        self.notes.copy(result, source)
        return result

    def _draw(
        self, func: Any, size: Any, *, generator: torch.Generator | None = None, **kwargs: Any
    ) -> torch.Tensor | None:
        device = torch.device(kwargs.get("device") or "cpu")
        if device.type not in _DEVICES or kwargs.get("layout") not in (None, torch.strided):
            return None
        result: torch.Tensor = torch.ops.aten.empty.memory_format(size, **kwargs)
        fill = _FILL_OF[func._schema.name.partition("::")[2]]
        if not self._put_off(fill, result, (), {"generator": generator}):
            return None
        self._own[storage_key(result)] = weak(result)
        return result

    def truncated(
        self,
        target: Any,
        values: Sequence[Any],
        generator: torch.Generator | None,
        fill: Callable[[torch.Tensor], object],
    ) -> bool:
        """Defer ``trunc_normal_``, which reads what it has drawn.

        Args:
            values: Mean, deviation, lower and upper bound.
            generator: Generator to draw from, if not the default one.
            fill: Function that fills any tensor in this way.

        Returns:
            True if the fill was deferred. A fill that would warn or raise is not.
        """
        with self.aside():
            if self._mine(target) is None or not target.is_floating_point() or not _is_truncation(*values):
                return False
            drawn_from = _generator(target, generator)
            if drawn_from is not None:
                self.notes.fill(target, fill, drawn_from)
            return drawn_from is not None

    # ----------------------------------------------------------------------------- what is known

    def expose(self, values: Any) -> None:
        """Run the notes of tensors whose memory may be read unseen from now on."""
        with self.aside():
            for leaf in pytree.tree_leaves(values):
                if isinstance(leaf, torch.Tensor) and _has_memory(leaf):
                    self.notes.settle(storage_key(leaf), written=True)
                    self._own.pop(storage_key(leaf), None)

    def _is_late(self, key: int | None) -> bool:
        return key is not None and self.notes.is_behind(key)

    def _mine(self, tensor: Any) -> int | None:
        """Return the key of a storage that no code reads unseen; None for other storages."""
        if not isinstance(tensor, torch.Tensor) or not is_plain(tensor) or tensor.device.type not in _DEVICES:
            return None
        key = storage_key(tensor)
        return key if key in self._own else None

    def _adopt(self, result: Any, given: Any) -> None:
        """Register the memory that an operator has allocated."""
        for tensor in _tensors(result):
            if type(tensor) is torch.Tensor and is_plain(tensor):
                key = storage_key(tensor)
                others = (other for other in _tensors(given) if _has_memory(other))
                if key not in self._own and all(storage_key(other) != key for other in others):
                    self._own[key] = weak(tensor)

    def _settle(self, values: Any, *, written: bool) -> None:
        for tensor in _tensors(values):
            if _has_memory(tensor):
                self.notes.settle(storage_key(tensor), written=written)
            else:  # for example a sparse tensor, whose values may lie in any storage
                self.notes.settle_all()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Suspend the watch."""
        before, self._is_aside = self._is_aside, True
        try:
            with torch._C.DisableTorchFunction():
                yield
        finally:
            self._is_aside = before


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operator's arguments or results."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple, dict)):
        for value in values.values() if isinstance(values, dict) else values:
            if not isinstance(value, (int, float)):
                yield from _tensors(value)


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and torch._C._has_storage(tensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if a tensor's memory holds its elements as they are."""
    if is_lazy(tensor) or not _has_memory(tensor):
        return False
    return not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def span_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the tensor's bytes in its storage, if it has each once and without gaps; else None."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return None
            expected *= size
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + tensor.nbytes


def _generator(target: torch.Tensor, given: torch.Generator | None) -> torch.Generator | None:
    """Return the generator that fills a tensor; None if the given one is of another kind of device."""
    if given is not None:
        return given if given.device.type == target.device.type else None
    return torch.default_generator if target.is_cpu else torch.cuda.default_generators[target.device.index]


def _is_truncation(mean: Any, deviation: Any, least: Any, most: Any) -> bool:
    """Return True if the fill neither warns nor raises: its mean lies near finite bounds.

    Near is within two deviations.
    """
    if not all(isinstance(value, int | float) for value in (mean, deviation, least, most)):
        return False
    far = 2 * deviation
    return bool(deviation > 0 and least < most and least - far <= mean <= most + far)
