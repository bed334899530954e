"""Hold the checked options of a job: which samples it reads and how, and how its model runs."""

from __future__ import annotations

import hashlib
import os
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from upriver.engine.engine import OnBadSample
from upriver.errors import ConfigError
from upriver.finetune.prefetch.replay import Placed, Routes
from upriver.finetune.prefetch.sampler import EpochOrder, epoch_order
from upriver.policies import POLICIES
from upriver.program.graph.autocast import autocast_dtype
from upriver.protocol import DEFAULT_CAPS, MAX_LARGER, MAX_MICRO_BATCH
from upriver.rpc import validation
from upriver.rpc.tolerance import Exact
from upriver.text import printable
from upriver.types import DEFAULT_MICRO_BATCH, DEFAULT_POLICY

Granularity = Literal["module", "op"]

AUTO: Literal["auto"] = "auto"
MicroBatchSize = int | Literal["auto"]
"""A size, or ``auto`` to choose one from measurements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """Options for the samples of a job, their order and how they are fetched; see ``finetune``.

    Attributes:
        rows: Rows of the dataset's index; a range if the job reads all of them.
        chosen: Whether the job chooses its own micro-batch (``micro_batch="auto"``). Until then
            ``micro_batch`` is the default.
        adapt_batch: Most samples that a server may run at once; 0 means one micro-batch.
    """

    rows: Sequence[int]
    batch_size: int
    micro_batch: int
    seed: int
    shuffle: bool
    drop_last: bool
    on_bad_sample: OnBadSample
    num_workers: int
    connections: int
    per_request: int
    window_bytes: int
    rank: int = 0
    num_ranks: int = 1
    chosen: bool = False
    adapt_batch: int = 0

    @classmethod
    def checked(
        cls,
        *,
        rows: Sequence[int],
        batch_size: int,
        micro_batch: MicroBatchSize,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        on_bad_sample: OnBadSample,
        num_workers: int | None,
        connections: int,
        per_request: int,
        window_bytes: int,
        rank: int | None,
        num_ranks: int | None,
        adapt_batch: int = 0,
    ) -> JobOptions:
        """Return options from a caller's arguments.

        Raises:
            ConfigError: If an argument is outside its allowed range; names it.
        """
        most = validation.MAX_THREADS
        workers = min(max(2, len(os.sched_getaffinity(0))), most) if num_workers is None else num_workers
        if type(seed) is not int or not 0 <= seed < 2**63:
            raise ConfigError(f"seed must be a whole number in 0..2**63 - 1, got {seed!r}")
        rank, num_ranks = validation.shard(rank, num_ranks)
        return cls(
            rows=rows,
            batch_size=validation.whole("batch_size", batch_size),
            micro_batch=_micro_batch(micro_batch, num_ranks),
            chosen=_is_auto(micro_batch),
            seed=seed,
            shuffle=validation.flag("shuffle", shuffle),
            drop_last=validation.flag("drop_last", drop_last),
            on_bad_sample=validation.choice("on_bad_sample", on_bad_sample, ("fail", "skip")),
            num_workers=validation.whole("num_workers", workers, most=most),
            connections=validation.whole("connections", connections, most=most),
            per_request=validation.whole("per_request", per_request, most=DEFAULT_CAPS.micro_batches),
            window_bytes=validation.whole("window_bytes", window_bytes, most=sys.maxsize),
            rank=rank,
            num_ranks=num_ranks,
            adapt_batch=_adapt_batch(adapt_batch, batch_size, micro_batch),
        )

    @property
    def larger_sizes(self) -> tuple[int, ...]:
        """Samples that servers may run at once besides one micro-batch: two, four, eight … micro-batches."""
        doubled = (self.micro_batch << times for times in range(1, MAX_LARGER + 1))
        return tuple(size for size in doubled if size <= self.adapt_batch)

    @property
    def subset(self) -> str | None:
        """Digest of the job's rows; None if they are all of the dataset's."""
        if isinstance(self.rows, range):
            return None
        return hashlib.sha256(array("q", self.rows).tobytes()).hexdigest()

    def order(self, epoch: int) -> EpochOrder:
        """Return this rank's part of an epoch."""
        order = epoch_order(
            len(self.rows),
            seed=self.seed,
            epoch=epoch,
            batch_size=self.batch_size,
            micro_batch=self.micro_batch,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            rank=self.rank,
            num_ranks=self.num_ranks,
        )
        if isinstance(self.rows, range):
            return order
        return replace(order, ids=tuple(self.rows[at] for at in order.ids))

    @property
    def step_samples(self) -> int:
        """Samples of this rank's largest training step: an epoch may have fewer than a batch."""
        return min(self.batch_size, -(-len(self.rows) // self.num_ranks))

    def check_steps(self) -> None:
        """Check that an epoch has at least one step.

        Raises:
            ConfigError: If ``drop_last`` leaves none.
        """
        if self.drop_last and self.batch_size * self.num_ranks > len(self.rows):
            ranks = f" on each of {self.num_ranks} ranks" if self.num_ranks > 1 else ""
            raise ConfigError(
                f"drop_last leaves no step in an epoch: batch_size {self.batch_size}{ranks}, "
                f"{len(self.rows)} samples"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class JobChoices:
    """Options for cutting, running and comparing a job's model.

    See :meth:`upriver.finetune.session.Near.finetune`.

    Attributes:
        policy: Name of the policy.
        shares: Cuts and their shares of the samples, used instead of the policy's; None asks the policy.
        compile_options: Arguments of ``torch.compile`` for the tail; None leaves it as the model came.
        replay: Routes of an earlier run; empty if there are none to follow.
    """

    policy: str
    shares: Mapping[int, float] | None
    exact: Exact
    autocast: torch.dtype | None
    granularity: Granularity
    compile_options: Mapping[str, Any] | None
    replay: Routes

    @classmethod
    def checked(
        cls,
        *,
        policy: str | None,
        cut: int | Mapping[int, float] | None,
        exact: Exact,
        autocast: torch.dtype | str | None,
        granularity: Granularity,
        compile_tail: bool | Mapping[str, Any],
        replay: Sequence[Placed | Mapping[str, Any]] | None,
    ) -> JobChoices:
        """Return choices from a caller's arguments.

        Raises:
            ConfigError: If an argument is outside its allowed range, or two arguments exclude each other;
                names them.
        """
        routes = Routes(replay)
        if cut is not None and routes:
            raise ConfigError(f"the routes to replay decide the cut; cut must be None, got {_shown(cut)}")
        if cut is not None and policy is not None:
            raise ConfigError(
                f"policy={_shown(policy)} and cut={_shown(cut)} were both given: a cut is taken instead of "
                "what a policy would choose, so give one of them"
            )
        return cls(
            policy=DEFAULT_POLICY if policy is None else validation.choice("policy", policy, POLICIES),
            shares=validation.cuts(cut),
            exact=validation.choice("exact", exact, ("bitwise", "numeric")),
            autocast=autocast_dtype(autocast),
            granularity=validation.choice("granularity", granularity, ("module", "op")),
            compile_options=validation.compiling(compile_tail),
            replay=routes,
        )


def _adapt_batch(value: object, batch_size: int, micro_batch: MicroBatchSize) -> int:
    """Check ``adapt_batch``: 0, or at least two micro-batches and at most a training batch."""
    least = 2 * micro_batch if isinstance(micro_batch, int) else 1
    if type(value) is int and (value == 0 or least <= value <= batch_size):
        return value
    raise ConfigError(
        f"adapt_batch must be 0, or a whole number of at least two micro-batches and at most batch_size: "
        f"{least}..{batch_size}, got {printable(repr(value), 60)}"
    )


def _micro_batch(value: object, num_ranks: int) -> int:
    """Return the size, or the default for ``auto``; ranks cannot each choose their own."""
    if _is_auto(value) and num_ranks > 1:
        raise ConfigError(
            f"micro_batch must be a whole number with {num_ranks} ranks, which must all have the same, "
            f'got "{AUTO}"'
        )
    if _is_auto(value):
        return DEFAULT_MICRO_BATCH
    if not isinstance(value, int):
        allowed = f'a whole number in 1..{MAX_MICRO_BATCH} or "{AUTO}"'
        raise ConfigError(f"micro_batch must be {allowed}, got {_shown(value)}")
    return validation.whole("micro_batch", value, most=MAX_MICRO_BATCH)


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == AUTO


def _shown(value: object) -> str:
    return printable(repr(value), 60)
