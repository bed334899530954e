"""Find the frozen modules of a model by ``requires_grad``, and keep them in eval.

A *frozen unit* is a maximal module whose parameters are all frozen. It runs whole, in eval: BatchNorm uses
its running statistics, and Dropout and stochastic depth are off. Modules without parameters on which a frozen
unit depends belong to the prefix too. Those after the last frozen unit belong to the tail.
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
        ConfigError: If the model has no such module. The message suggests names.
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
    """Return names of the maximal modules that have parameters, all of them frozen."""
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
    """Return the units that the model's own forward does not train.

    A unit is left out if the forward writes all its parameters, or some in training only. It follows
    ``model.train()`` as a trained layer does. An average of trained layers is an example.

    Args:
        in_training: Names of the tensors that the forward writes in training.
        in_eval: Names of the tensors that the forward writes in eval.
    """
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {path: {first[id(p)] for p in model.get_submodule(path).parameters()} for path in units}
    alone = set(in_training) - set(in_eval)
    return [path for path in units if names[path].isdisjoint(alone) and not names[path] <= set(in_training)]


def check_trainable(model: nn.Module) -> None:
    """Raise unless a model has both frozen and trainable parameters.

    Raises:
        ModelError: If it does not.
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
    """Raise unless every parameter and buffer of a model has a shape and values.

    Raises:
        ModelError: Naming the first that is initialized at the first call, as those of ``nn.LazyLinear``.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ModelError(
                f"{name!r} is not initialized yet, as its module is a lazy one: call the model once on an "
                "input, model(example), before giving it here"
            )


def switch(model: nn.Module, *, training: bool) -> None:
    """Switch every module to training or eval mode, except modules that torch exported in one mode."""
    try:
        model.train(training)
    except NotImplementedError:  # raised by an exported module
        for module in model.modules():
            module.training = training


def keep_in_eval(model: nn.Module, units: list[str]) -> None:
    """Switch these modules back to eval mode, as after ``model.train()``."""
    InEval(model, units)()


class InEval:
    """Switch modules of a model back to eval mode, at about 0.1 us for each that is in eval already.

    Use after ``model.train()``.

    Args:
        units: Paths of the modules. A module that replaces another at its path is found too.
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
        """Switch the modules."""
        if [owner._modules.get(name) for owner, name in self._edges] != self._met:
            self._resolve()
        for module in self._modules:
            if module.training:
                switch(module, training=False)


def fold(tensor: torch.Tensor) -> int:
    """Return a digest of a tensor's values."""
    data = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    return xxhash.xxh3_64_intdigest(data.reshape(-1).view(torch.uint8).numpy().data) if data.numel() else 0
