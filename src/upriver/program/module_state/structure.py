"""Detect changes in the submodules and forward hooks of modules."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

_ASKING = ("make_inputs_require_grads", "make_inputs_require_grad")

HARMLESS = (*_ASKING, "output_capturing_hook")
"""Names of hooks from transformers and peft that do not change features.

Those for activation checkpointing mark an embedding's output as requiring a gradient. That changes no value,
but can change which parameters have a gradient. The hook that collects hidden states does nothing until they
are requested. Then the proof fails, because those of skipped layers are missing.
"""

_GLOBAL = ("_global_forward_pre_hooks", "_global_forward_hooks")


class ModuleStructure:
    """Watch submodules and hooks of modules. A check takes about 20 us for the 151 modules of a ResNet-50.

    Attributes:
        asking: Places of the hooks that request a gradient, as of the last check. They change no value, but
            may decide which parameters have a gradient.

    Args:
        modules: Modules by path. All their submodules and hooks count.
        around: Modules of which the named submodules count, and the hooks that run before them.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        around: Iterable[tuple[str, nn.Module, Sequence[str]]] = (),
    ) -> None:
        around = list(around)
        self._modules = [*modules, *((path, module) for path, module, _ in around)]
        whole = self._modules[: len(self._modules) - len(around)]
        self._whole = [module for _, module in whole]
        self._some = [(module, names) for _, module, names in around]
        self._hooks: list[tuple[str, Mapping[int, Any]]] = [
            ("all modules", getattr(torch_module, name)) for name in _GLOBAL
        ]
        self._hooks += [(_named(path), module._forward_pre_hooks) for path, module in self._modules]
        self._hooks += [(_named(path), module._forward_hooks) for path, module in whole]
        self._look()

    @property
    def changed(self) -> str:
        """The first change, in words. Empty if nothing has changed."""
        if self._now() == self._seen:
            return ""
        found = next(self._differences(), "")
        if not found:
            self._look()
        return found

    def _look(self) -> None:
        self._seen = self._now()
        self._were = self._have()  # keeps them alive: no later module reuses an identity
        self._had = [dict(hooks) for _, hooks in self._hooks]
        self.asking = [
            place for place, hooks in self._hooks for hook in hooks.values() if _name(hook) in _ASKING
        ]

    def _now(self) -> tuple[list[int], list[int], list[int]]:
        """Return identities of modules, and ids of hooks. Torch gives each hook a new id."""
        # Read `_modules` anew: removing a child of an nn.Sequential replaces the dictionary.
        children = itertools.chain.from_iterable([module._modules.values() for module in self._whole])
        some = itertools.chain.from_iterable(map(each._modules.get, names) for each, names in self._some)
        hooks = itertools.chain.from_iterable(hooks for _, hooks in self._hooks)
        return list(map(id, children)), list(map(id, some)), list(hooks)

    def _have(self) -> list[dict[str, nn.Module | None]]:
        some = [{name: each._modules.get(name) for name in names} for each, names in self._some]
        return [*(dict(module._modules) for module in self._whole), *some]

    def _differences(self) -> Iterator[str]:
        for had, (place, hooks) in zip(self._had, self._hooks, strict=True):
            for key in had.keys() ^ hooks.keys():
                if _counts(hooks.get(key, had.get(key))):
                    yield f"a hook of {place}"
        for (path, _), before, after in zip(self._modules, self._were, self._have(), strict=True):
            for name in [*before, *after]:
                if before.get(name) is not after.get(name):
                    yield f"submodule {name!r} of {_named(path)}"
            if list(before) != list(after):
                yield f"the order of submodules of {_named(path)}"


def _named(path: str) -> str:
    return f"module {path!r}" if path else "the model"


def _counts(hook: Any) -> bool:
    """Return whether a hook may change a module's output. Hooks of upriver only watch a pass."""
    ours = getattr(hook, "__module__", "").startswith("upriver.")
    return not ours and _name(hook) not in HARMLESS


def _name(hook: Any) -> str:
    return str(getattr(hook, "__name__", ""))
