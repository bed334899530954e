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

from upriver.errors import ConfigError, ModelError


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
    InEval(model, units)()


class InEval:
    """Puts modules of a model back into eval, as after ``model.train()``: some 0.1 us for each that is.

    Args:
        units: Their paths; what comes in the place of one is found, too.
    """

    def __init__(self, model: nn.Module, units: Iterable[str]) -> None:
        self._model, self._units = model, list(units)
        self._resolve()

    def _resolve(self) -> None:
        self._modules = [self._model.get_submodule(path) for path in self._units]
        edges: dict[tuple[int, str], tuple[nn.Module, str]] = {}
        for path in self._units:
            owner = self._model
            for name in path.split(".") if path else ():
                edges[id(owner), name] = (owner, name)
                owner = owner.get_submodule(name)
        self._edges = list(edges.values())
        self._met = [owner._modules.get(name) for owner, name in self._edges]

    def __call__(self) -> None:
        """Do so."""
        if [owner._modules.get(name) for owner, name in self._edges] != self._met:
            self._resolve()
        for module in self._modules:
            if module.training:
                switch(module, training=False)


def fold(tensor: torch.Tensor) -> int:
    """A digest of its values."""
    data = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    return xxhash.xxh3_64_intdigest(data.reshape(-1).view(torch.uint8).numpy().data) if data.numel() else 0
