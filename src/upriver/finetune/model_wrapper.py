"""Take a model out of its wrappers, and run its tail inside them.

``DistributedDataParallel(model)`` averages gradients and ``torch.compile(model)`` compiles. Both hold a whole
model, but a job runs only the tail. So the job takes the model out of its wrappers and splits it. During a
call the tail stands in the model's place, and the wrapper's hooks, buckets and buffers work as usual.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class WrappedModel:
    """A model as the user gave it, separated from its wrappers.

    Attributes:
        parallel: The wrapper that averages gradients, if any.
        compiler: Compiles as the user's ``torch.compile`` did, if there was one.
    """

    model: nn.Module
    parallel: DistributedDataParallel | None = None
    compiler: Compiler | None = None


def unwrap(model: nn.Module) -> WrappedModel:
    """Take a model out of ``DistributedDataParallel`` and ``torch.compile``, in any order.

    Raises:
        ConfigError: If it has another wrapper, in which a tail cannot take its place.
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
        log.warning("model.compile() was called: its tail is compiled only with Splitting(compile_tail=True)")
    return WrappedModel(model=model, parallel=parallel, compiler=compiler)


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Disable ``module.compile()`` within a block, so that modules can be traced."""
    compiled = {m: m._compiled_call_impl for m in model.modules() if m._compiled_call_impl is not None}
    for module in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, implementation in compiled.items():
            module._compiled_call_impl = implementation


class TailRunner:
    """Run a tail, compiled and under the user's ``DistributedDataParallel`` if the model came so."""

    def __init__(
        self, tail: nn.Module, wrapped: WrappedModel, *, compile_options: Mapping[str, Any] | None
    ) -> None:
        """Wrap the tail; nothing is compiled before the first call.

        Args:
            compile_options: Arguments of ``torch.compile``; None compiles the tail only if the model came
                compiled.

        Raises:
            ConfigError: If ``torch.compile`` rejects these arguments.
        """
        self._tail = _compiled(tail, wrapped, compile_options)
        self._parallel = wrapped.parallel
        self._compiled_from = tail if isinstance(tail, Tail) and self._tail is not tail else None

    def __call__(self, features: Any) -> Any:
        """Return the model's output, as part of a training step."""
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
        """Return the model's output without training; other ranks need not call it at the same time."""
        return self._tail(features)


def _compiled(tail: nn.Module, wrapped: WrappedModel, options: Mapping[str, Any] | None) -> nn.Module:
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
) -> tuple[int, int]:
    """Return (rank, num_ranks) as given, else from the process group of ``DistributedDataParallel``.

    One process alone is rank 0 of 1.
    """
    if rank is not None and num_ranks is not None:
        return rank, num_ranks
    if parallel is not None:
        group = parallel.process_group
        return distributed.get_rank(group), distributed.get_world_size(group)
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        log.warning(
            "torch.distributed is initialised with %d ranks, but every rank will see every sample: give "
            "finetune() the DistributedDataParallel, or sampling=Sampling(rank=…, num_ranks=…)",
            distributed.get_world_size(),
        )
    return 0, 1
