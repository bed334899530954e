"""Hold the checked options of a job: which samples it reads and how, and how its model runs."""

from __future__ import annotations

import hashlib
import os
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from upriver.engine.engine import OnBadSample
from upriver.errors import ConfigError, DatasetError
from upriver.features.keep import Keep, room_of
from upriver.finetune.model_wrapper import shard_of
from upriver.finetune.prefetch.replay import Placed, Routes
from upriver.finetune.prefetch.sampler import EpochOrder, epoch_order
from upriver.finetune.replanner import Replanning
from upriver.policies import POLICIES
from upriver.program.graph.autocast import autocast_dtype
from upriver.program.rewrite.faster import PREFIXES, PrefixKind
from upriver.protocol import DEFAULT_CAPS, MAX_LARGER, MAX_MICRO_BATCH
from upriver.rpc import validation
from upriver.rpc.tolerance import EXACT, Exact
from upriver.text import printable
from upriver.types import DEFAULT_MICRO_BATCH, DEFAULT_POLICY, require_type

T = TypeVar("T")

Granularity = Literal["module", "op"]

AUTO: Literal["auto"] = "auto"
MicroBatchSize = int | Literal["auto"]
"""A size, or ``auto`` to choose one from measurements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Samples of an epoch: their order, this process's part of them, and bad ones.

    Attributes:
        shuffle: Use a new order each epoch.
        drop_last: Leave out a last, short batch.
        on_bad_sample: ``fail`` raises, ``skip`` leaves the sample out and counts it.
        rank: Index of this process among ``num_ranks``. Defaults to the process group of the model's
            ``DistributedDataParallel``, if it has one.
        num_ranks: Processes that train together. Each gets its own part of every epoch's order, all with
            equally many steps. If the samples do not divide evenly, the first samples of the order are
            repeated at its end; with ``drop_last`` the last ones are left out instead.
        views: Number of sets of random draws of the input stages: epoch e draws as epoch e mod ``views``, so
            that features can be kept. None draws anew in each epoch. The order is new in each epoch.

    Raises:
        ConfigError: If a field is outside its allowed range; names it.
    """

    shuffle: bool = True
    drop_last: bool = False
    on_bad_sample: OnBadSample = "fail"
    rank: int | None = None
    num_ranks: int | None = None
    views: int | None = None

    def __post_init__(self) -> None:
        validation.flag("shuffle", self.shuffle)
        if self.views is not None:
            validation.whole("views", self.views)
        validation.flag("drop_last", self.drop_last)
        validation.choice("on_bad_sample", self.on_bad_sample, ("fail", "skip"))
        rank, num_ranks = self.rank, self.num_ranks
        if rank is not None and num_ranks is not None:
            validation.whole("num_ranks", num_ranks)
            if type(rank) is not int or not 0 <= rank < num_ranks:
                raise ConfigError(f"rank must be a whole number in 0..{num_ranks - 1}, got {_shown(rank)}")
        elif rank is not None or num_ranks is not None:
            given, missing = ("num_ranks", "rank") if rank is None else ("rank", "num_ranks")
            raise ConfigError(f"{given} was given without {missing}: a shard is one of several")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefetch:
    """Threads, requests and memory for micro-batches that a job reads ahead of training.

    Attributes:
        num_workers: Local threads that read and decode samples straight from the store. Defaults to the CPUs
            of this process, at least two.
        connections: Requests in flight. Two keep a server busy while a response is sent; four also cover a
            second server.
        per_request: Micro-batches in a request: enough that a server overlaps reads with compute, few enough
            that little is redone.
        adapt_batch: Most samples that a server may run at once, up to ``batch_size``; with
            ``exact="numeric"`` only. The frozen part is also captured at two, four, eight … micro-batches,
            and a server with enough room and work chooses among them. Requests and window are made long
            enough for that. The chosen sizes are not recorded, so ``replay`` cannot reproduce such a run.
        window_bytes: Memory for prefetched micro-batches. The default holds two training batches of 512 at
            most cuts measured.

    Raises:
        ConfigError: If a field is outside its allowed range; names it.
    """

    num_workers: int | None = None
    connections: int = 4
    per_request: int = 4
    adapt_batch: int = 0
    window_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if self.num_workers is not None:
            validation.whole("num_workers", self.num_workers, most=validation.MAX_THREADS)
        validation.whole("connections", self.connections, most=validation.MAX_THREADS)
        validation.whole("per_request", self.per_request, most=DEFAULT_CAPS.micro_batches)
        validation.whole("window_bytes", self.window_bytes, most=sys.maxsize)
        if type(self.adapt_batch) is not int or self.adapt_batch < 0:
            raise ConfigError(
                f"adapt_batch must be 0, or a whole number of samples, got {_shown(self.adapt_batch)}"
            )

    @property
    def worker_threads(self) -> int:
        """Number of local threads, as given or by default."""
        return self.num_workers or min(max(2, len(os.sched_getaffinity(0))), validation.MAX_THREADS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Splitting:
    """Places where a model may be cut, the way its tail runs, and the cuts of an earlier run.

    Attributes:
        granularity: ``module`` cuts where modules end, ``op`` between any two operators where that is legal.
        compile_tail: Compile the tail; a mapping holds arguments of ``torch.compile``.
        in_background: Whether the frozen part is captured and proven in another process, while the first
            batches are made the plain way. None decides by the time that the model takes. What must be known
            before the first batch is prepared at once in any case: ``replay``, ``micro_batch="auto"`` and
            ``adapt_batch``.
        epochs: Number of epochs that will be trained, if it is known. Where they cannot repay a preparation
            in another process, the frozen part runs as it is written, and the plan says so.
        replay: ``job.placed`` of an earlier run. Each micro-batch in it is computed at the same place and cut
            again, so that a ``numeric`` run is reproduced to the bit.

    Raises:
        ConfigError: If a field is outside its allowed range; names it.
    """

    granularity: Granularity = "module"
    compile_tail: bool | Mapping[str, Any] = False
    in_background: bool | None = None
    epochs: int | None = None
    replay: Sequence[Placed | Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        validation.choice("granularity", self.granularity, ("module", "op"))
        validation.compiling(self.compile_tail)
        if self.in_background is not None:
            validation.flag("in_background", self.in_background)
        if self.epochs is not None:
            validation.whole("epochs", self.epochs)
        Routes(self.replay)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """Checked options of a job; see :meth:`upriver.finetune.session.Near.finetune`.

    Attributes:
        rows: Rows of the dataset's index; a range if the job reads all of them.
        chosen: Whether the job chooses its own micro-batch (``micro_batch="auto"``). Until then
            ``micro_batch`` is the default.
        shares: Cuts and their shares of the samples, used instead of the policy's; None asks the policy.
        compile_options: Arguments of ``torch.compile`` for the tail; None leaves it as the model came.
        in_background: Whether another process prepares the job; None decides by the model.
        replay: Routes of an earlier run; empty if there are none to follow.
        epochs: Number of epochs; None if unknown.
        prefix: How the frozen part is made faster; None leaves it as it is written.
        keep: Room for kept features; None keeps none.
    """

    rows: Sequence[int]
    batch_size: int
    micro_batch: int
    chosen: bool
    seed: int
    sampling: Sampling
    rank: int
    num_ranks: int
    prefetch: Prefetch
    replanning: Replanning
    policy: str
    shares: Mapping[int, float] | None
    exact: Exact
    autocast: torch.dtype | None
    granularity: Granularity
    compile_options: Mapping[str, Any] | None
    in_background: bool | None
    replay: Routes
    epochs: int | None
    prefix: PrefixKind | None
    keep: Keep | None

    @classmethod
    def checked(
        cls,
        *,
        rows: Sequence[int],
        batch_size: int,
        micro_batch: MicroBatchSize = DEFAULT_MICRO_BATCH,
        policy: str | None = None,
        cut: int | Mapping[int, float] | None = None,
        exact: Exact = "auto",
        autocast: torch.dtype | str | None = None,
        prefix: PrefixKind | None = None,
        keep: Keep | Literal["auto"] | None = "auto",
        seed: int = 0,
        sampling: Sampling | None = None,
        splitting: Splitting | None = None,
        replanning: Replanning | None = None,
        prefetch: Prefetch | None = None,
        parallel: DistributedDataParallel | None = None,
    ) -> JobOptions:
        """Return options from a caller's arguments.

        Args:
            parallel: The model's wrapper, if it has one; names the rank where ``sampling`` does not.

        Raises:
            ConfigError: If an argument is outside its allowed range, or two arguments exclude each other;
                names them.
            DatasetError: If there are no rows.
        """
        sampling = _option("sampling", sampling, Sampling)
        splitting = _option("splitting", splitting, Splitting)
        prefetch = _option("prefetch", prefetch, Prefetch)
        if type(seed) is not int or not 0 <= seed < 2**63:
            raise ConfigError(f"seed must be a whole number in 0..2**63 - 1, got {seed!r}")
        rank, num_ranks = shard_of(parallel, sampling.rank, sampling.num_ranks)
        options = cls(
            rows=rows,
            batch_size=validation.whole("batch_size", batch_size),
            micro_batch=_micro_batch(micro_batch, num_ranks),
            chosen=_is_auto(micro_batch),
            seed=seed,
            sampling=sampling,
            rank=rank,
            num_ranks=num_ranks,
            prefetch=prefetch,
            replanning=_option("replanning", replanning, Replanning),
            policy=DEFAULT_POLICY if policy is None else validation.choice("policy", policy, POLICIES),
            shares=validation.cuts(cut),
            exact=validation.choice("exact", exact, EXACT),
            autocast=autocast_dtype(autocast),
            granularity=splitting.granularity,
            compile_options=validation.compiling(splitting.compile_tail),
            in_background=splitting.in_background,
            replay=Routes(splitting.replay),
            epochs=splitting.epochs,
            prefix=None if prefix is None else validation.choice("prefix", prefix, PREFIXES),
            keep=room_of(keep, ranks=num_ranks),
        )
        options = options._for_prefix()
        if cut is not None and options.replay:
            raise ConfigError(f"the routes to replay decide the cut; cut must be None, got {_shown(cut)}")
        if cut is not None and policy is not None:
            raise ConfigError(
                f"policy={_shown(policy)} and cut={_shown(cut)} were both given: a cut is taken instead of "
                "what a policy would choose, so give one of them"
            )
        if options.chosen and options.replay:
            raise ConfigError(f'replay needs the micro_batch of the run that is replayed, got "{AUTO}"')
        options._check_adapt_batch()
        if not len(rows):
            raise DatasetError("the dataset is empty")
        options._check_steps()
        return options

    def _for_prefix(self) -> JobOptions:
        """Return the options within a tolerance if they ask for a faster prefix, and check that they may."""
        if self.prefix is None:
            return self
        if self.exact == "bitwise":
            raise ConfigError(
                f"exact='bitwise' and prefix={self.prefix!r} were both given: a faster prefix gives other "
                "bits than the model as it is written. Leave prefix out, or give exact='auto' or 'numeric'"
            )
        if self.autocast is not None and self.prefix != "compiled":
            raise ConfigError(
                f"autocast={str(self.autocast)!r} and prefix={self.prefix!r} were both given: each says in "
                "which type the frozen part computes. Give one of them"
            )
        return replace(self, exact="numeric")

    def _check_adapt_batch(self) -> None:
        """Check that ``adapt_batch`` is 0, or lies in the batch and low bits may depend on it."""
        size, least = self.prefetch.adapt_batch, 1 if self.chosen else 2 * self.micro_batch
        if size == 0:
            return
        if not least <= size <= self.batch_size:
            raise ConfigError(
                f"adapt_batch must be 0, or a whole number of at least two micro-batches and at most "
                f"batch_size: {least}..{self.batch_size}, got {size}"
            )
        if self.replay:
            raise ConfigError(
                "adapt_batch must be 0 to replay a run: another size of batch gives other low bits"
            )
        if self.exact != "numeric":
            raise ConfigError(
                f"adapt_batch needs exact='numeric', as other sizes of batch give other low bits; got "
                f"exact={self.exact!r}"
            )

    def _check_steps(self) -> None:
        """Check that ``drop_last`` leaves an epoch at least one step."""
        if self.sampling.drop_last and self.batch_size * self.num_ranks > len(self.rows):
            ranks = f" on each of {self.num_ranks} ranks" if self.num_ranks > 1 else ""
            raise ConfigError(
                f"drop_last leaves no step in an epoch: batch_size {self.batch_size}{ranks}, "
                f"{len(self.rows)} samples"
            )

    @property
    def may_begin(self) -> bool:
        """Return whether the first batch may be made before the job is prepared.

        Ranks must decide alike, since a model may call collectives. So they do not decide by their time.
        """
        decided = self.chosen or self.replay or self.prefetch.adapt_batch or self.prefix
        alike = self.num_ranks == 1 or self.in_background
        return self.in_background is not False and bool(alike) and not decided

    def view(self, epoch: int) -> int:
        """Return the epoch as which the random input stages of an epoch draw."""
        return epoch if self.sampling.views is None else epoch % self.sampling.views

    @property
    def larger_sizes(self) -> tuple[int, ...]:
        """Samples that servers may run at once besides one micro-batch: two, four, eight … micro-batches."""
        doubled = (self.micro_batch << times for times in range(1, MAX_LARGER + 1))
        return tuple(size for size in doubled if size <= self.prefetch.adapt_batch)

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
            shuffle=self.sampling.shuffle,
            drop_last=self.sampling.drop_last,
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


def _option(name: str, given: T | None, kind: type[T]) -> T:
    """Return a caller's option, or one with all defaults."""
    return kind() if given is None else require_type(name, given, kind, f"{kind.__name__}(...)")


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
