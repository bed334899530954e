"""What people wrap a model in, and how the tail takes the model's place inside.

``DistributedDataParallel(model)`` averages gradients, ``torch.compile(model)`` compiles. Both hold a whole
model, of which a job runs only the tail. So the model is taken out of them, split, and for the time of a call
the tail is put where the model was: hooks, buckets and buffers of the wrapper work as ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import distributed, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from upriver.errors import ConfigError
from upriver.program.split.tail import Tail

log = logging.getLogger("upriver")

Compiler = Callable[[nn.Module], Callable[..., Any]]
"""Gives a compiled module for a module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrapped:
    """A model as the user gave it, taken apart.

    Attributes:
        model: The model itself.
        parallel: The wrapper that averages gradients, if there is one.
        compiler: Compiles as the user's ``torch.compile`` did, if there was one.
    """

    model: nn.Module
    parallel: DistributedDataParallel | None = None
    compiler: Compiler | None = None


def unwrap(model: nn.Module) -> Wrapped:
    """Take a model out of ``DistributedDataParallel`` and ``torch.compile``, in whatever order they stand.

    Raises:
        ConfigError: If it is wrapped in something a tail cannot take its place in.
    """
    parallel: DistributedDataParallel | None = None
    compiler: Compiler | None = None
    while True:
        if isinstance(model, DistributedDataParallel) and parallel is None:
            parallel, model = model, model.module
        elif isinstance(model, torch._dynamo.OptimizedModule):
            compiler, model = model.dynamo_ctx, model._orig_mod
        elif isinstance(model, (DistributedDataParallel, DataParallel)):
            raise ConfigError(
                f"the model is wrapped in {type(model).__name__}; give the model itself, or one in a single "
                "DistributedDataParallel"
            )
        else:
            break
    if model._compiled_call_impl is not None:
        log.warning("model.compile() was called: its tail is compiled only with finetune(compile_tail=True)")
    return Wrapped(model=model, parallel=parallel, compiler=compiler)


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Let modules on which ``module.compile()`` was called run as they are written, to be traced."""
    compiled = {m: m._compiled_call_impl for m in model.modules() if m._compiled_call_impl is not None}
    for module in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, implementation in compiled.items():
            module._compiled_call_impl = implementation


class TailRunner:
    """Runs a tail, compiled and under the user's ``DistributedDataParallel`` where there are such."""

    def __init__(
        self, tail: nn.Module, wrapped: Wrapped, *, compile_options: Mapping[str, Any] | None
    ) -> None:
        """Nothing is compiled before the first call.

        Args:
            compile_options: Arguments of ``torch.compile``; None leaves the decision to how the model came.

        Raises:
            ConfigError: If ``torch.compile`` does not take these arguments.
        """
        self._tail = _compiled(tail, wrapped, compile_options)
        self._parallel = wrapped.parallel
        self._compiled_from = tail if isinstance(tail, Tail) and self._tail is not tail else None

    def __call__(self, features: Any) -> Any:
        """The model's answer, as part of a training step."""
        if self._compiled_from is not None:
            features = self._compiled_from.asking(features)
        if self._parallel is None:
            return self._tail(features)
        whole = self._parallel.module
        self._parallel.module = self._tail
        try:
            return self._parallel(features)
        finally:
            self._parallel.module = whole

    def alone(self, features: Any) -> Any:
        """The model's answer where nothing is trained: other ranks need not call it at the same time."""
        return self._tail(features)


def _compiled(tail: nn.Module, wrapped: Wrapped, options: Mapping[str, Any] | None) -> nn.Module:
    compiler = wrapped.compiler
    if options is not None:
        compiler = partial(torch.compile, **options)
    elif compiler is not None:
        log.info("the model came compiled: its frozen part runs as a program, its tail is compiled likewise")
    if compiler is None:
        return tail
    try:
        return cast(nn.Module, compiler(tail))
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"torch.compile does not take compile_tail={dict(options or {})!r}: {error}"
        ) from error


def shard_of(
    parallel: DistributedDataParallel | None, rank: int | None, num_ranks: int | None
) -> tuple[int | None, int | None]:
    """Which of how many ranks: what was given, else the process group of ``DistributedDataParallel``."""
    if rank is not None or num_ranks is not None:
        return rank, num_ranks
    if parallel is not None:
        group = parallel.process_group
        return distributed.get_rank(group), distributed.get_world_size(group)
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        log.warning(
            "torch.distributed is initialised with %d ranks, but every rank will see every sample: give "
            "finetune() the DistributedDataParallel, or rank= and num_ranks=",
            distributed.get_world_size(),
        )
    return None, None
