"""Let torch record models in half of the time: ``pytest --fork`` does so, and ``make test`` asks for it.

Of each recording of a small model 40 % fills torch's tables of composite operators, which hold the same every
time. ``make test-full`` records as users do.
"""

from __future__ import annotations

import functools
import importlib
import typing
from typing import Any

OPERATOR_KEYS = ("_AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE", "_BACKEND_KEYS_TO_OVERRIDE")


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
