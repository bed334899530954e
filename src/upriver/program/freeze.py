"""What is frozen, from ``requires_grad`` as users already write it, and that it stays so.

A *frozen unit* is a maximal module all of whose parameters are frozen. It runs whole, in eval: BatchNorm by
its running statistics, Dropout and stochastic depth off. Modules without parameters on which a frozen unit
depends belong to the prefix, too; those behind the last one belong to the tail.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import xxhash
from torch import nn
from torch.nn.parameter import is_lazy

from upriver.errors import ConfigError, FrozenChanged, ModelError
from upriver.program.layouts import unusual


def freeze_to(model: nn.Module, last: str) -> None:
    """Freeze every parameter up to and including module ``last``, in the order of registration.

    Raises:
        ConfigError: If the model has no such module; the message offers names.
    """
    modules = dict(model.named_modules())
    if last not in modules or not last:
        offered = ", ".join([name for name in modules if name][:12])
        raise ConfigError(f"the model has no module {last!r}; it has {offered}, …")
    inside = set(modules[last].modules())
    reached = False
    for module in modules.values():
        if module in inside:
            reached = True
        elif reached:
            break
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(False)


def frozen_units(model: nn.Module) -> list[str]:
    """Names of the maximal modules all of whose parameters are frozen (and that have any)."""
    units: list[str] = []

    def visit(path: str, module: nn.Module) -> None:
        parameters = list(module.parameters())
        if parameters and not any(p.requires_grad for p in parameters):
            units.append(path)
            return
        for name, child in module.named_children():
            visit(f"{path}.{name}" if path else name, child)

    visit("", model)
    return units


def without_written(
    model: nn.Module, units: list[str], in_training: Collection[str], in_eval: Collection[str]
) -> list[str]:
    """Those units that the model does not train itself.

    One of which the forward writes every parameter, or some in training alone, follows ``model.train()`` as
    a trained layer does: an average of trained layers for example.

    Args:
        in_training: Names of what the forward in training writes to.
        in_eval: Likewise.
    """
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {path: {first[id(p)] for p in model.get_submodule(path).parameters()} for path in units}
    alone = set(in_training) - set(in_eval)
    return [path for path in units if names[path].isdisjoint(alone) and not names[path] <= set(in_training)]


def check_trainable(model: nn.Module) -> None:
    """A model to fine-tune has something frozen and something to train.

    Raises:
        ModelError: If it has not.
    """
    flags = [p.requires_grad for p in model.parameters()]
    if not flags:
        raise ModelError("the model has no parameters")
    if all(flags):
        raise ModelError(
            "nothing is frozen: set requires_grad_(False) on the layers that are not to be trained"
        )
    if not any(flags):
        raise ModelError("everything is frozen: leave requires_grad on for the layers that are to be trained")


def check_initialized(model: nn.Module) -> None:
    """Every parameter and buffer of a model has a shape and values.

    Raises:
        ModelError: Naming the first that waits for a first call, as those of ``nn.LazyLinear`` do.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ModelError(
                f"{name!r} is not initialized yet, as its module is a lazy one: call the model once on an "
                "input, model(example), before giving it here"
            )


def switch(model: nn.Module, *, training: bool) -> None:
    """Put every module into training or evaluation mode, but for those that torch has exported in one."""
    try:
        model.train(training)
    except NotImplementedError:  # of such a one
        for module in model.modules():
            module.training = training


def keep_in_eval(model: nn.Module, units: list[str]) -> None:
    """Put these modules back into eval, as after ``model.train()``."""
    for path in units:
        unit = model.get_submodule(path)
        if unit.training:
            switch(unit, training=False)


class FrozenGuard:
    """Notices frozen parameters and buffers that change after a job has started.

    Versions are compared at every iteration: in-place changes move them. Writes through ``.data`` do not, so
    a digest of the values is compared once an epoch.
    """

    def __init__(self, model: nn.Module, units: list[str], *, also: Iterable[str] = ()) -> None:
        """Remember the state of these frozen units.

        Args:
            also: Names of further parameters and buffers that the frozen part reads: those of modules that
                are not frozen as a whole, such as a position embedding beside trained layers.
        """
        self._model = model
        self._units = units
        self._also = frozenset(also)
        self._versions = self._read_versions()
        self._digest = self._read_digest()

    def _tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for unit in self._units:
            module = self._model.get_submodule(unit)
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                if not unusual(tensor):  # no prefix holds any other
                    found[f"{unit}.{name}" if unit else name] = tensor
        # A tied tensor is known under any of its names.
        named = [
            *self._model.named_parameters(remove_duplicate=False),
            *self._model.named_buffers(remove_duplicate=False),
        ]
        return found | {name: tensor for name, tensor in named if name in self._also}

    def _read_versions(self) -> dict[str, tuple[int, int, bool]]:
        return {name: (t._version, t.data_ptr(), t.requires_grad) for name, t in self._tensors().items()}

    def _read_digest(self) -> dict[str, int]:
        return {name: fold(tensor) for name, tensor in self._tensors().items()}

    def check_versions(self) -> None:
        """Raise :class:`FrozenChanged` if a frozen tensor got other values or was unfrozen.

        Loading a checkpoint writes the same values again; that is no change.
        """
        now = self._read_versions()
        if now == self._versions:
            return
        touched = [name for name in self._versions if now.get(name) != self._versions[name]]
        tensors = self._tensors()
        for name in touched:
            same_flag = name in now and now[name][2] == self._versions[name][2]
            if not same_flag or fold(tensors[name]) != self._digest[name]:
                self._fail(name)
        self._versions = now

    def check_values(self) -> None:
        """Raise :class:`FrozenChanged` if the values of a frozen tensor are others than at the start."""
        now = self._read_digest()
        for name in self._digest:
            if now.get(name) != self._digest[name]:
                self._fail(name)

    def _fail(self, name: str) -> None:
        raise FrozenChanged(
            f"{name!r}, which is frozen, changed after the job had started: the features would no longer be "
            "those of this model. Start a new job after changing it"
        )


def fold(tensor: torch.Tensor) -> int:
    """A digest of its values."""
    data = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    return xxhash.xxh3_64_intdigest(data.reshape(-1).view(torch.uint8).numpy().data) if data.numel() else 0
