"""Match a model's weights with those of a store by name, and assign the memory for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from upriver.coldstart.format.checkpoint import TensorLocation, WeightSource
from upriver.coldstart.format.saved_names import HINT, as_saved, is_pretrained
from upriver.errors import ModelError, ProgramError
from upriver.program.graph.devices import copy_beside
from upriver.program.graph.schema import DTYPES
from upriver.program.graph.weights_file import is_dense, place_of

Queued = Mapping[torch.device, "torch.cuda.Event"]
"""Event on each accelerator that follows the work queued there so far."""

MOST_NAMED = 5
"""Most names in an error. A model of another size differs in hundreds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatchedWeights:
    """Stored tensors to load, and their targets in the model.

    Attributes:
        source: Wanted weights, in the order of the source.
        targets: For each stored tensor the model's tensors with its values.
        converted: True if the source has the names that transformers saves instead of the state dict's.
    """

    source: WeightSource
    targets: tuple[tuple[torch.Tensor, ...], ...]
    converted: bool = False


def move(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model whose weights have not arrived to a device: allocate weights there, copy everything else.

    Tensors that share memory, such as a tensor and its view, share it on the device as well.

    Returns:
        The same model.

    Raises:
        ModelError: If the model was constructed without memory.
    """
    state = [value for value in model.state_dict(keep_vars=True).values() if isinstance(value, torch.Tensor)]
    to_come = {tensor.untyped_storage()._cdata for tensor in state if is_dense(tensor)}
    there: dict[int, torch.UntypedStorage] = {}

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == device.type and device.index in (None, tensor.device.index):
            return tensor
        if tensor.is_meta:
            raise _without_memory(model)
        if not is_dense(tensor) or (here := tensor.untyped_storage())._cdata not in to_come:
            return tensor.to(device)
        if here._cdata not in there:
            there[here._cdata] = torch.empty(
                here.nbytes(), dtype=torch.uint8, device=device
            ).untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype, device=device)
        return empty.set_(there[here._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())

    model._apply(moved)  # type: ignore[no-untyped-call]
    return model


def _without_memory(model: nn.Module) -> ModelError:
    tensors = (*model.named_parameters(), *model.named_buffers())
    name = next(name for name, tensor in tensors if tensor.is_meta)
    return ModelError(
        f"{type(model).__name__}: {name!r} is on the meta device and has no memory; construct the model "
        'without torch.device("meta") and init_empty_weights: a load fills nothing in anyway'
    )


def match(model: nn.Module, source: WeightSource, *, strict: bool = True) -> MatchedWeights:
    """Match every weight of the model with its stored tensor.

    Names are those of the state dict, as in ``load_state_dict``. If a tensor of the model has several names
    that are stored apart, the last one counts. A file that transformers wrote may have other names.

    Args:
        strict: If false, stored weights that the model lacks are ignored.

    Raises:
        ModelError: If a weight is missing, unexpected or of another shape; the message names them.
    """
    stored = {placed.name: number for number, placed in enumerate(source.tensors)}
    number_of = stored | {tie: stored[name] for tie, name in source.ties.items()}
    wanted, converted = _wanted(model, source, number_of, strict=strict)
    into: dict[int, list[torch.Tensor]] = {}
    for names in {id(group): group for group in _tied(wanted).values()}.values():
        there = [name for name in names if name in number_of]
        if there:
            into.setdefault(number_of[there[-1]], []).append(wanted[there[-1]])
    kept = sorted(into)
    return MatchedWeights(
        source=replace(source, tensors=tuple(source.tensors[number] for number in kept), ties={}),
        targets=tuple(tuple(into[number]) for number in kept),
        converted=converted,
    )


def _wanted(
    model: nn.Module, source: WeightSource, number_of: Mapping[str, int], *, strict: bool
) -> tuple[dict[str, torch.Tensor], bool]:
    """Return the model's memory under the names of a file, and whether these are transformers' own."""
    state = _weights_of(model)
    problems = _problems(state, source, number_of, _needless(model), strict=strict)
    if (source.is_checked and not any(problems.values())) or (saved := as_saved(model, state)) is None:
        _refuse(model, source, problems)
        return state, False
    parts = {name: part for name, part in saved.items() if part is not None}
    counters = {name for name in parts if name.rpartition(".")[2] == _COUNTER}
    others = _problems(parts, source, number_of, counters, strict=strict)
    if not any(problems.values()):
        if saved.keys() == state.keys() and not others["of another shape"]:
            doubtful = [
                n for n, part in saved.items() if part is None or place_of(part) != place_of(state[n])
            ]
            _refuse(model, source, {"perhaps transposed, as names and shapes do not tell": doubtful})
        return state, False
    computed = {name for name, part in saved.items() if part is None}
    others["missing"] += sorted(computed - number_of.keys())
    others["unexpected"] = [name for name in others["unexpected"] if name not in computed]
    others["stored in another form than the model's"] = sorted(computed & number_of.keys())
    if len(saved.keys() & number_of.keys()) < len(state.keys() & number_of.keys()):
        _refuse(model, source, problems)
    _refuse(model, source, others)
    return parts, True


def _problems(
    wanted: Mapping[str, torch.Tensor],
    source: WeightSource,
    number_of: Mapping[str, int],
    needless: Set[str],
    *,
    strict: bool,
) -> dict[str, list[str]]:
    """Return the weights that cannot be loaded under these names, grouped by problem."""
    tied = _tied(wanted)
    return {
        "missing": [
            name
            for name in wanted
            if name not in needless and not any(each in number_of for each in tied[name])
        ],
        "unexpected": [name for name in number_of if name not in wanted] if strict else [],
        "of another shape": [
            f"{name} ({list(source.tensors[number_of[name]].shape)} there, {list(tensor.shape)} here)"
            for name, tensor in wanted.items()
            if name in number_of and source.tensors[number_of[name]].shape != tuple(tensor.shape)
        ],
    }


_COUNTER = "num_batches_tracked"


def _needless(model: nn.Module) -> set[str]:
    """Return names that a state dict may lack: files from before torch counted batches have no counter."""
    return {
        f"{path}.{_COUNTER}" if path else _COUNTER
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
    }


def _weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict, whose tensors are the model's own memory."""
    state: Mapping[str, Any] = model.state_dict(keep_vars=True)
    own = {
        tensor.untyped_storage()._cdata
        for tensor in (*model.parameters(), *model.buffers())
        if is_dense(tensor)
    }
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        kind = type(model).__name__
        if is_lazy(value):
            raise ModelError(
                f"{kind}: {name!r} is lazy: only a first call shows its shape; give the shape to the "
                "constructor, or load it with load_state_dict"
            )
        if not isinstance(value, torch.Tensor):
            raise ModelError(
                f"{kind}: {name!r} in its state dict is no tensor but {type(value).__name__}; only tensors "
                "can arrive while the model runs: load it with load_state_dict"
            )
        if value.layout is not torch.strided:
            raise ModelError(
                f"{kind}: {name!r} is of layout {value.layout}; only dense tensors can arrive while the "
                "model runs: load it with load_state_dict"
            )
        if not is_dense(value) or value.untyped_storage()._cdata not in own:
            raise ModelError(
                f"{kind}: {name!r} in its state dict is made anew each time, not a parameter or buffer; load "
                "it with load_state_dict"
            )
        found[name] = value.detach()
    return found


def _tied(wanted: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Return for each name all names of the same elements, in order."""
    groups: dict[object, list[str]] = {}
    found: dict[str, list[str]] = {}
    for name, tensor in wanted.items():
        group = groups.setdefault(place_of(tensor) if tensor.numel() else name, [])
        group.append(name)
        found[name] = group
    return found


def _refuse(model: nn.Module, source: WeightSource, found: Mapping[str, Sequence[str]]) -> None:
    told = [
        f"{_some(names)} {'is' if len(names) == 1 else 'are'} {what}"
        for what, names in found.items()
        if names
    ]
    if told:
        raise ModelError(
            f"{source.path} in store {source.store.name!r} has not the weights of {type(model).__name__}: "
            f"{'; '.join([*told, HINT] if is_pretrained(model) else told)}"
        )


def _some(names: Sequence[str]) -> str:
    rest = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


class WeightMemory:
    """Memory that receives one stored tensor, and the way from there into the model.

    Bytes go directly into the model's memory if that has the same type and is contiguous on the CPU.
    Otherwise they go through a buffer, which lives from the first byte to the last.

    Args:
        after: Work on accelerators that must end before these tensors are written.
    """

    def __init__(self, placed: TensorLocation, targets: Sequence[torch.Tensor], after: Queued) -> None:
        self._placed, self._targets, self._after = placed, targets, after
        dtype = DTYPES[placed.dtype]
        self._own = next(
            (
                target
                for target in targets
                if target.dtype == dtype and target.is_contiguous() and target.device.type == "cpu"
            ),
            None,
        )
        self._staged: torch.Tensor | None = None

    def room(self) -> memoryview:
        """Return the memory for the tensor's bytes."""
        if self._own is None:
            self._staged = torch.empty(self._placed.shape, dtype=DTYPES[self._placed.dtype], device="cpu")
        return _bytes_of(self._source())

    def settle(self) -> None:
        """Copy the tensor into the model after all its bytes have arrived.

        Raises:
            ProgramError: If the bytes are not values of its type.
        """
        source = self._source()
        if source.dtype is torch.bool and source.numel() and int(source.view(torch.uint8).max()) > 1:
            raise ProgramError(
                f"weight {self._placed.name!r} of object {self._placed.path!r}: a bool holds 0 or 1 only"
            )
        with torch.inference_mode():  # tensors made in inference mode can be written only there
            for target in self._targets:
                if target is source:
                    continue
                if target.device.type == "cuda":
                    copy_beside(source, target, after=self._after[target.device])
                else:
                    target.copy_(source)
        self._staged = None

    def _source(self) -> torch.Tensor:
        """Return the tensor that receives the bytes. An empty one has no buffer and is not copied."""
        found = self._own if self._staged is None else self._staged
        return self._targets[0] if found is None else found


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(bytearray())
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)


def memories(
    placed: Iterable[TensorLocation], targets: Sequence[Sequence[torch.Tensor]]
) -> list[WeightMemory]:
    """Return the memory for each stored tensor.

    The thread that allocated the targets must call this. Work that it has queued on accelerators may still
    use or fill that memory. The work ends before weights are written.
    """
    devices = {target.device for each in targets for target in each if target.device.type == "cuda"}
    queued = {device: torch.cuda.current_stream(device).record_event() for device in devices}
    return [WeightMemory(each, into, queued) for each, into in zip(placed, targets, strict=True)]


def held(match: MatchedWeights) -> Iterable[tuple[int, torch.Tensor]]:
    """Yield every target tensor of the model, with the number of its stored tensor."""
    for number, targets in enumerate(match.targets):
        for target in targets:
            yield number, target
