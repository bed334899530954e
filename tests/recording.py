"""Let torch record models in half of the time: ``pytest --fork`` does so, and ``make test`` asks for it.

Of each recording of a small model 40 % fills torch's tables of composite operators, which hold the same every
time. And tests of jobs record the same networks hundreds of times: each process records each form of those in
`ONCE` once. ``make test-full`` records as users do.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

OPERATOR_KEYS = ("_AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE", "_BACKEND_KEYS_TO_OVERRIDE")


ONCE = ("Small", "Tokens")
"""Classes of networks that are recorded once: their forward computes, and does nothing else."""


def install() -> None:
    """Look each operator up once, and register kernels for CPU, CUDA and Meta alone."""
    utils: Any = importlib.import_module("torch._export.utils")
    programs: Any = importlib.import_module("torch.export.exported_program")
    torch: Any = importlib.import_module("torch")
    look_up = utils._materialize_cpp_cia_ops
    once = functools.cache(lambda registered: look_up())
    utils._materialize_cpp_cia_ops = lambda: once(
        len(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
    )
    torch._ops.Callable = typing.Callable  # an annotation of 10,000 registrations, which typing caches
    for name in OPERATOR_KEYS:
        keys = getattr(programs, name)
        keys[:] = [key for key in keys if key.name.endswith(("CPU", "CUDA", "Meta"))]


@pytest.fixture(scope="module", autouse=True)
def recorded_once(pytestconfig: pytest.Config) -> Iterator[None]:
    """Record equal networks once in ``make test``: that is most of what a job's beginning costs."""
    with pytest.MonkeyPatch.context() as patch:
        if pytestconfig.getoption("fork"):
            record_once(patch)
        yield


def record_once(patch: pytest.MonkeyPatch) -> None:
    """Give an equal network the recording of an earlier one, with its own weights."""
    for user in ("upriver.program.capture.prefix", "upriver.program.split.resized"):
        module: Any = importlib.import_module(user)
        patch.setattr(module, "record", functools.partial(_recorded, module.record))


_earlier: dict[Any, Any] = {}


def _recorded(record: Callable[..., Any], model: Any, example: Any, **options: Any) -> Any:
    form = _form(model, example, options)
    if form is None:
        return record(model, example, **options)
    if form not in _earlier:
        found = record(model, example, **options)
        if not found.tensors.keys() <= _tensors_of(model).keys():  # it holds a constant, too
            return found
        _earlier[form] = found
    own, found = _tensors_of(model), _earlier[form]
    lowering: Any = importlib.import_module("upriver.program.capture.lowering")
    weights = {each.key: lowering.as_stored(own[each.key], each.spec) for each in found.weights}
    return dataclasses.replace(found, tensors=weights)


def _form(model: Any, example: Any, options: Mapping[str, Any]) -> Any:
    """Return everything but weights that a recording depends on; None for a model that is always recorded."""
    torch: Any = importlib.import_module("torch")
    if type(model).__name__ not in ONCE or torch.overrides._get_current_function_mode_stack():
        return None
    facts = [f"{type(model).__module__} {model}", example.describe(), str(torch.get_default_dtype())]
    facts += [f"{name} {value}" for name, value in sorted(options.items())]
    facts += [str(tensor.stride()) for tensor in example.tensors]
    for name, tensor in _tensors_of(model).items():
        facts.append(f"{name} {tensor.dtype} {tensor.device} {tuple(tensor.shape)} {tensor.stride()}")
    for module in model.modules():
        for name, value in vars(module).items():
            if name == "training" or name in ("_parameters", "_buffers", "_modules"):
                continue
            if (isinstance(value, dict) and value) or name in ("forward", "_compiled_call_impl"):
                return None  # hooks, another forward
            facts.append(f"{name} {value}")
    return tuple(facts)


def _tensors_of(model: Any) -> dict[str, Any]:
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
