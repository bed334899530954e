"""Provide ``upriver.connect()``, through which a training script reaches the near-data servers."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from upriver.engine.engine import OnBadSample
from upriver.errors import ConfigError, DatasetError, UpriverError
from upriver.finetune.calibration.example_batch import example_of
from upriver.finetune.calibration.measurement import Measurement
from upriver.finetune.job import FinetuneJob
from upriver.finetune.model_wrapper import TailRunner, WrappedModel, shard_of, uncompiled, unwrap
from upriver.finetune.options import AUTO, Granularity, JobChoices, JobOptions, MicroBatchSize
from upriver.finetune.planner import Planner
from upriver.finetune.prefetch.replay import Placed
from upriver.finetune.replanner import GAIN, PATIENCE, Patience
from upriver.pipeline import Dataset
from upriver.program.module_state.attributes import AttributeSnapshot
from upriver.program.split.split import Split, split
from upriver.rpc import validation
from upriver.rpc.client import ServerClient
from upriver.rpc.discovery import DirectoryClient, DirectoryFollower, is_directory
from upriver.rpc.link_meter import LinkMeter, MeteredStore
from upriver.rpc.local_server import EmbeddedServer
from upriver.rpc.tls import FilePath, client_context
from upriver.rpc.tolerance import Exact
from upriver.rpc.validation import Indexed
from upriver.types import DEFAULT_MICRO_BATCH, require_type

log = logging.getLogger("upriver")

WINDOW_BYTES = 1 << 30
"""Memory for prefetched micro-batches: two training batches of 512 at most cuts measured."""


class Near:
    """A connection to servers near the data, over a link.

    Args:
        urls: Addresses of servers. Without any, an embedded server starts on this machine when the first job
            needs it.
        token: Sent with every request.
        ca: For https: authorities that vouch for the servers; the system's if None.
        certificate: For https: shown to servers that ask for one.
        key: Private key of the certificate.
        meter: Counts bytes that cross the link, and emulates a slower link if it has a rate.
        server_cpus: CPUs that an embedded server may use.
        server_threads: Threads of an embedded server's compute worker. Defaults to torch's number of threads
            in this process: another number changes the bits of some networks.

    Attributes:
        measured: The measurement that the last job's plan rests on, with its duration; None if there was
            nothing to measure.
    """

    def __init__(
        self,
        urls: Sequence[str] = (),
        *,
        token: str | None = None,
        ca: FilePath | None = None,
        certificate: FilePath | None = None,
        key: FilePath | None = None,
        meter: LinkMeter | None = None,
        server_cpus: set[int] | None = None,
        server_threads: int | None = None,
    ) -> None:
        self.meter = LinkMeter() if meter is None else require_type("meter", meter, LinkMeter, "LinkMeter()")
        self._urls = validation.addresses(urls)
        self._token = validation.token(token)
        if self._token is None and not self._urls:
            self._token = secrets.token_urlsafe(32)  # other users of this machine reach an embedded server
        self._tls = client_context(ca=ca, certificate=certificate, key=key)
        if self._tls is not None and not any(map(validation.encrypts, self._urls)):
            raise ConfigError("ca, certificate and key are for servers at https://…, and none is given")
        self._directory: DirectoryClient | None = None
        if self._urls and is_directory(self._urls[0]):
            self._directory = DirectoryClient(self._urls[0], tls=self._tls)
        self._cpus = validation.cores(server_cpus)
        if server_threads is not None:
            validation.whole("server_threads", server_threads, most=validation.MAX_THREADS)
        self._threads = server_threads
        self._closed = False
        self.measured: Measurement | None = None
        self._embedded: dict[tuple[str, str], EmbeddedServer] = {}
        self._jobs: set[FinetuneJob] = set()
        self._lock = threading.Lock()

    def finetune(
        self,
        model: nn.Module,
        dataset: Indexed,
        *,
        batch_size: int,
        micro_batch: MicroBatchSize = DEFAULT_MICRO_BATCH,
        policy: str | None = None,
        cut: int | Mapping[int, float] | None = None,
        exact: Exact = "bitwise",
        autocast: torch.dtype | str | None = None,
        granularity: Granularity = "module",
        compile_tail: bool | Mapping[str, Any] = False,
        rank: int | None = None,
        num_ranks: int | None = None,
        replay: Sequence[Placed | Mapping[str, Any]] | None = None,
        replan: bool = True,
        replan_gain: float = GAIN,
        replan_patience: int = PATIENCE,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        on_bad_sample: OnBadSample = "fail",
        num_workers: int | None = None,
        connections: int = 4,
        per_request: int = 4,
        adapt_batch: int = 0,
        window_bytes: int = WINDOW_BYTES,
        on_progress: Callable[[str], None] | None = None,
    ) -> FinetuneJob:
        """Prepare a fine-tuning job: capture and prove the frozen part, measure both tiers, choose the cut.

        Args:
            model: Model whose frozen parameters (``requires_grad=False``) define the freeze point. It may
                come in ``DistributedDataParallel``, which still averages gradients, and in ``torch.compile``,
                which then compiles the tail.
            dataset: Training data with its input stages. A `torch.utils.data.Subset` or `random_split` of an
                indexed dataset keeps the order and the samples of its rows.
            batch_size: Samples of a training step, on each rank.
            micro_batch: Samples that the frozen stages see at once, on every tier. ``auto`` chooses the size
                with the shortest predicted epoch, from measurements. The size decides the low bits of
                features, so two such jobs may differ. ``state_dict()`` holds the size; pass it to a job that
                resumes from that state.
            policy: One of ``nosplit``, ``freeze``, ``min``, ``neurosurgeon``, ``hapi_bandwidth``, ``hapi``,
                ``exhaustive``, ``upriver`` (see :mod:`upriver.policies`). Defaults to ``upriver`` if ``cut``
                is not given either.
            cut: Cut to use instead of a policy, which must not be given then. A mapping of cuts to shares of
                the samples divides the micro-batches among them. Cuts up to 0 lie among the input stages.
            exact: ``bitwise`` uses only servers that compute the same bits; ``numeric`` accepts a tolerance,
                which the plan states.
            autocast: ``torch.bfloat16`` or ``torch.float16``: frozen part and tail compute under autocast to
                this type. A ``with torch.autocast`` in the training script would not reach stages that run
                ahead or on servers.
            granularity: ``module`` cuts where modules end, ``op`` between any two operators where that is
                legal.
            compile_tail: Compile the tail; a mapping holds arguments of ``torch.compile``.
            rank: Index of this process among ``num_ranks``. Defaults to the process group of the model's
                ``DistributedDataParallel``, if it has one.
            num_ranks: Processes that train together. Each gets its own part of every epoch's order, all with
                equally many steps. If the samples do not divide evenly, the first samples of the order are
                repeated at its end; with ``drop_last`` the last ones are left out instead.
            replay: ``job.placed`` of an earlier run. Each micro-batch in it is computed at the same place and
                cut again, so that a ``numeric`` run is reproduced to the bit.
            replan: Ask the policy again after each iteration, with what the answers and the link showed.
                Switch to its plan when that is better for long enough. No bit depends on it.
            replan_gain: A switch needs a present plan with a predicted epoch of more than ``1 + replan_gain``
                times the new plan's (0.1: a new epoch more than 1/11 shorter).
            replan_patience: Number of consecutive iterations that must show the gain.
            seed: Decides the order of samples and random input stages.
            shuffle: Use a new order each epoch.
            drop_last: Leave out a last, short batch.
            on_bad_sample: ``fail`` raises, ``skip`` leaves the sample out and counts it.
            num_workers: Local threads that read and decode samples straight from the store.
            connections: Requests in flight.
            per_request: Micro-batches in a request.
            adapt_batch: Most samples that a server may run at once, up to ``batch_size``; with
                ``exact="numeric"`` only. The frozen part is also captured at two, four, eight …
                micro-batches, and a server with enough room and work chooses among them. Requests and window
                are made long enough for that. The chosen sizes are not recorded, so ``replay`` cannot
                reproduce such a run.
            window_bytes: Memory for prefetched micro-batches.
            on_progress: Receives progress messages.

        Raises:
            ConfigError: If an argument is outside its allowed range, or the connection was closed.
            ModelError: If nothing or everything is frozen, a parameter is not initialized yet, or the model
                does not run.
            NoFeasibleCut: If no cut fits the memory.
        """
        self._check_open()
        require_type("model", model, nn.Module, "with frozen parameters")
        dataset, rows = validation.indexed(dataset)
        wrapped = unwrap(model)
        rank, num_ranks = shard_of(wrapped.parallel, rank, num_ranks)
        options = JobOptions.checked(
            rows=rows,
            batch_size=batch_size,
            micro_batch=micro_batch,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            on_bad_sample=on_bad_sample,
            num_workers=num_workers,
            connections=connections,
            per_request=per_request,
            window_bytes=window_bytes,
            rank=rank,
            num_ranks=num_ranks,
            adapt_batch=adapt_batch,
        )
        choices = JobChoices.checked(
            policy=policy,
            cut=cut,
            exact=exact,
            autocast=autocast,
            granularity=granularity,
            compile_tail=compile_tail,
            replay=replay,
        )
        if options.chosen and choices.replay:
            raise ConfigError(f'replay needs the micro_batch of the run that is replayed, got "{AUTO}"')
        if options.adapt_batch:
            _check_adapting(choices)
        patience = Patience(gain=replan_gain, iterations=validation.whole("replan_patience", replan_patience))
        if not len(rows):
            raise DatasetError("the dataset is empty")
        options.check_steps()
        tell = validation.function("on_progress", on_progress) or (lambda text: log.info("%s", text))
        patience_or_none = patience if validation.flag("replan", replan) else None
        job = self._prepare(wrapped, dataset, options, choices, tell=tell, patience=patience_or_none)
        self._jobs.add(job)
        return job

    def _prepare(
        self,
        wrapped: WrappedModel,
        dataset: Dataset,
        options: JobOptions,
        choices: JobChoices,
        *,
        tell: Callable[[str], None],
        patience: Patience | None,
    ) -> FinetuneJob:
        """Split the model, choose its micro-batch, plan, and put the job together."""
        model = wrapped.model
        direct = self._metered(dataset)

        def split_for(options: JobOptions) -> Split:
            return split(
                model,
                example_of(model, direct, options),
                autocast=choices.autocast,
                granularity=choices.granularity,
                on_progress=tell,
            )

        def planner_for(parts: Split, options: JobOptions) -> Planner:
            return Planner(
                self.servers,
                model,
                dataset,
                direct,
                parts,
                options,
                choices,
                tell=tell,
                patience=patience,
                bandwidth=self.meter.observed_bandwidth,
            )

        with uncompiled(model):
            parts = split_for(options)
            planner = planner_for(parts, options)
            best = replace(options, micro_batch=planner.best_size()) if options.chosen else options
            if best != options and (other := split_for(best)).program is not None:
                tell(f"going on with micro-batches of {best.micro_batch}")
                planner.close()
                options, parts = best, other
                planner = planner_for(parts, options)
            run = TailRunner(parts.tail, wrapped, compile_options=choices.compile_options)
            plan, pool = planner.plan()
        self.measured = planner.measured

        def again(hooked: bool) -> AttributeSnapshot | None:
            with uncompiled(model), contextlib.suppress(UpriverError):
                return parts.still_so(split_for(options), hooked=hooked)
            return None

        following = None
        if self._directory is not None and pool is not None:
            following = DirectoryFollower(self._directory, pool, self._client, urls=pool.urls)
        return FinetuneJob(
            model,
            direct,
            parts,
            plan,
            options,
            choices,
            run=run,
            pool=pool,
            link_bytes=lambda: self.meter.total_bytes,
            metered=self._metered,
            closed=self._jobs.discard,
            tolerance=planner.allowed,
            replay=planner.replay,
            replanner=planner.replanner,
            notes=planner.notes,
            larger=planner.offers,
            following=following,
            again=again,
        )

    def servers(self, dataset: Dataset) -> list[ServerClient]:
        """Return a client for each server; start the embedded server if needed.

        Raises:
            ServerUnavailable: If an embedded server cannot be started, or a directory names none.
            ConfigError: If the dataset's store cannot be shared with another process.
        """
        if self._directory is not None:
            named = [server.url.rstrip("/") for server in self._directory.wait().servers]
            return [self._client(url) for url in dict.fromkeys(named)]
        return [self._client(url) for url in self._urls or (self._embed(dataset).url,)]

    def _client(self, url: str) -> ServerClient:
        return ServerClient(url, token=self._token, meter=self.meter, tls=self._tls)

    def _metered(self, dataset: Dataset) -> Dataset:
        """Return the same dataset, read over the metered link."""
        return dataset.with_store(MeteredStore(dataset.store, self.meter))

    def _embed(self, dataset: Dataset) -> EmbeddedServer:
        """Return the embedded server for a dataset's store; start one if none runs."""
        store = dataset.store
        key = (store.name, store.uri)
        with self._lock:
            self._check_open()
            server = self._embedded.get(key)
            if server is not None and not server.running:
                log.warning("the embedded server at %s has ended; starting another", server.url)
                self._embedded.pop(key).close()
                server = None
            if server is None:
                server = self._embedded[key] = EmbeddedServer.start(
                    {store.name: store.uri},
                    threads=self._threads or torch.get_num_threads(),
                    cpu=self._cpus,
                    token=self._token,
                )
            return server

    def close(self) -> None:
        """Close all jobs and the embedded server; no further jobs are possible. Idempotent."""
        with self._lock:
            self._closed = True
        for job in list(self._jobs):
            job.close()
        for server in self._embedded.values():
            server.close()
        self._embedded.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this connection was closed; make another one with upriver.connect()")

    def __enter__(self) -> Near:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _check_adapting(choices: JobChoices) -> None:
    """Raise `ConfigError` unless low bits may depend on how many samples servers run at once."""
    if choices.replay:
        raise ConfigError("adapt_batch must be 0 to replay a run: another size of batch gives other low bits")
    if choices.exact != "numeric":
        raise ConfigError(
            f"adapt_batch needs exact='numeric', as other sizes of batch give other low bits; got "
            f"exact={choices.exact!r}"
        )


def connect(
    *urls: str,
    token: str | None = None,
    ca: FilePath | None = None,
    certificate: FilePath | None = None,
    key: FilePath | None = None,
    meter: LinkMeter | None = None,
    server_cpus: set[int] | None = None,
    server_threads: int | None = None,
) -> Near:
    """Connect to near-data servers, or to an embedded one if no address is given.

    Nothing is sent before a job needs it. A job without an answering server runs everything on the compute
    tier.

    Args:
        urls: ``http://host:port`` or ``https://host:port`` of each server; all of them reach the same stores.
            Or one ``ray+http://host:port``, a directory whose servers come and go: the job uses those it
            names at the moment.
        token: Sent with every request.
        ca: PEM file with the authorities that vouch for servers at ``https://``; the system's if None.
        certificate: PEM file with the certificate that is shown to servers that ask for one.
        key: PEM file with its private key, without a password.
        meter: Counts bytes that cross the link, and emulates a slower link if it has a rate.
        server_cpus: CPUs that an embedded server may use.
        server_threads: Threads of an embedded server's compute worker. Defaults to torch's number of threads
            in this process: another number changes the bits of some networks.

    Raises:
        ConfigError: If an address is invalid, a file cannot be read or has the wrong content, or another
            argument is outside its allowed range.
    """
    return Near(
        urls,
        token=token,
        ca=ca,
        certificate=certificate,
        key=key,
        meter=meter,
        server_cpus=server_cpus,
        server_threads=server_threads,
    )
