"""Whether some modules have the submodules and the forward hooks that they had."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

_ASKING = ("make_inputs_require_grads", "make_inputs_require_grad")

HARMLESS = (*_ASKING, "output_capturing_hook")
"""Of transformers and peft: those for activation checkpointing mark an embedding's answer as in need of a
gradient, which changes no value, but at times which parameters have one; that which collects hidden states
does nothing until they are asked for (and then the proof fails where skipped layers' are missing)."""

_GLOBAL = ("_global_forward_pre_hooks", "_global_forward_hooks")


class Modules:
    """Submodules of some modules, and hooks: some 20 us a look for the 151 modules of a ResNet-50.

    Attributes:
        asking: Where hooks stand that ask for a gradient, as of the last look. They change no value, but
            may decide which parameters have a gradient.

    Args:
        modules: Modules by path, of which all submodules and hooks count.
        around: Modules of which some submodules count, by name, and hooks that run before them.
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
        """What has changed, in words; empty if nothing has."""
        if self._now() == self._seen:
            return ""
        found = next(self._differences(), "")
        if not found:
            self._look()
        return found

    def _look(self) -> None:
        self._seen = self._now()
        self._were = self._have()  # none that comes later has the identity of one of them
        self._had = [dict(hooks) for _, hooks in self._hooks]
        self.asking = [
            place for place, hooks in self._hooks for hook in hooks.values() if _name(hook) in _ASKING
        ]

    def _now(self) -> tuple[list[int], list[int], list[int]]:
        """Identities of modules, and numbers of hooks, of which torch gives each once."""
        # Asked for anew: to take one out of an nn.Sequential gives it another dictionary.
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
    """Whether a hook may change what a module gives; ours that watch a pass do not."""
    ours = getattr(hook, "__module__", "").startswith("upriver.")
    return not ours and _name(hook) not in HARMLESS


def _name(hook: Any) -> str:
    return str(getattr(hook, "__name__", ""))
