"""Provide ``upriver.connect()``, through which a training script reaches the near-data servers."""

from __future__ import annotations

import contextlib
import importlib
import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from upriver._deprecation import deprecated_keywords
from upriver.errors import ConfigError, UpriverError
from upriver.features.keep import Keep
from upriver.finetune.calibration.example_batch import example_of
from upriver.finetune.calibration.faster_prefix import with_faster_prefix
from upriver.finetune.calibration.measurement import Measurement
from upriver.finetune.earlier_rows import earlier_points
from upriver.finetune.feature_source import FeatureSource
from upriver.finetune.job import FinetuneJob
from upriver.finetune.model_wrapper import TailRunner, WrappedModel, uncompiled, unwrap
from upriver.finetune.options import JobOptions, MicroBatchSize, Prefetch, Sampling, Splitting
from upriver.finetune.planner import PlannedJob, Planner, agreement_for
from upriver.finetune.planning.keep_planning import computing_epochs
from upriver.finetune.planning.plan_builder import unsplit_plan
from upriver.finetune.prefetch.read_ahead import ReadAhead
from upriver.finetune.preparation.background import Preparation
from upriver.finetune.preparation.horizon import Horizon
from upriver.finetune.preparation.snapshot import NoSnapshot
from upriver.finetune.preparation.task import Credentials, PreparationTask, Prepared, StoredDataset
from upriver.finetune.replanner import Replanning
from upriver.pipeline import Dataset
from upriver.program.module_state.attributes import AttributeSnapshot
from upriver.program.module_state.frozen_guard import FrozenGuard
from upriver.program.rewrite.faster import PrefixKind
from upriver.program.split.frozen_name import outline_digest, remember_trained, trained_by_others
from upriver.program.split.split import Split, outline, split
from upriver.progress import named_steps
from upriver.rpc import validation
from upriver.rpc.client import ServerClient
from upriver.rpc.discovery import DirectoryClient, DirectoryFollower, is_directory
from upriver.rpc.link_meter import LinkMeter, metered
from upriver.rpc.local_server import EmbeddedServer
from upriver.rpc.server_pool import ServerPool
from upriver.rpc.tls import FilePath, client_context
from upriver.rpc.tolerance import Exact
from upriver.rpc.validation import Indexed
from upriver.types import DEFAULT_MICRO_BATCH, require_type

log = logging.getLogger("upriver")

WORTH_A_PROCESS_S = 0.4
"""Processor seconds of a trace, of one thread, from which another process prepares a job. Preparing takes
ten to thirty times as long as tracing, and starting a process 3 s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outlined:
    """The outline of a model, and what was read while it was made.

    Attributes:
        example: The micro-batch that was traced.
        seconds: Processor seconds of the trace.
    """

    split: Split
    example: torch.Tensor
    seconds: float
    ahead: ReadAhead


class Near:
    """A connection to servers near the data, over a link; `connect` documents its arguments.

    Without addresses, an embedded server starts on this machine when the first job needs it.

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
        self._credentials = Credentials(token=self._token, ca=ca, certificate=certificate, key=key)
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

    @deprecated_keywords(
        sampling=(Sampling, ("shuffle", "drop_last", "on_bad_sample", "rank", "num_ranks")),
        splitting=(Splitting, ("granularity", "compile_tail", "replay")),
        prefetch=(
            Prefetch,
            ("num_workers", "connections", "per_request", "adapt_batch", "window_bytes"),
        ),
        replanning=(
            Replanning,
            {"replan": "enabled", "replan_gain": "gain", "replan_patience": "patience"},
        ),
    )
    def finetune(
        self,
        model: nn.Module,
        dataset: Indexed,
        *,
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
        prefetch: Prefetch | None = None,
        replanning: Replanning | None = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> FinetuneJob:
        """Start a fine-tuning job: capture and prove the frozen part, measure both tiers, choose the cut.

        Where that takes longer than a moment, another process does it on a copy of the model. The job begins
        meanwhile with the frozen part as it is written, on the compute tier. It moves over between two steps,
        and no bit depends on when. :meth:`FinetuneJob.wait_until_split` waits.

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
            exact: ``bitwise`` uses only servers that compute the same bits. ``numeric`` accepts a tolerance,
                which the plan states. ``auto`` is ``bitwise`` if any server proves it when it is first asked,
                else ``numeric``, for the whole job. ``job.exactness`` tells which.
            autocast: ``torch.bfloat16`` or ``torch.float16``: frozen part and tail compute under autocast to
                this type. A ``with torch.autocast`` in the training script would not reach stages that run
                ahead or on servers.
            prefix: How the frozen part is made faster, wherever it runs. ``bf16`` computes it in bfloat16, in
                which features cross the link, too. ``int8`` lets its linear layers multiply 8-bit integers.
                ``compiled`` folds BatchNorm into other layers, and compiles what this process runs. The job
                is then within an error of the model as it is written, which it measures on its first
                micro-batch; ``job.exactness`` and the plan state it. None leaves it as it is written.
            keep: Room for features: those of a sample that is kept are read in later epochs and jobs, and
                not computed again. No bit depends on it. ``auto`` is ``Keep()``, a tenth of the free memory
                and of the free disk, which ranks share; the plan says how much that is. None keeps nothing.
                Features are kept after the frozen part if no input stage draws random numbers, or with
                ``views``; else samples are kept before the first stage that does.
            seed: Decides the order of samples and random input stages.
            sampling: Order, ranks and bad samples; `Sampling` with its defaults if None, as for the others.
            splitting: Where the model may be cut, how its tail runs, and an earlier run to replay.
            prefetch: Threads, requests and memory for what is read ahead.
            replanning: When the job leaves its plan for a better one.
            on_progress: Receives progress messages. By default they are shown on stderr by the first rank,
                or logged if the logger ``upriver`` takes them; ``lambda text: None`` keeps silent.

        Raises:
            ConfigError: If an argument is outside its allowed range, the frozen part does not run with
                ``prefix``, or the connection was closed.
            DatasetError: If the dataset is empty.
            ModelError: If nothing or everything is frozen, a parameter is not initialized yet, or the model
                does not run.
            NotExact: If ``exact`` is ``bitwise``, and all servers answer and none computes the same bits; or
                if features with ``prefix`` are too far from those of the model as it is written.
            NoFeasibleCut: If no cut fits the memory.
        """
        self._check_open()
        require_type("model", model, nn.Module, "with frozen parameters")
        dataset, rows = validation.indexed(dataset)
        wrapped = unwrap(model)
        options = JobOptions.checked(
            rows=rows,
            batch_size=batch_size,
            micro_batch=micro_batch,
            policy=policy,
            cut=cut,
            exact=exact,
            autocast=autocast,
            prefix=prefix,
            keep=keep,
            seed=seed,
            sampling=sampling,
            splitting=splitting,
            prefetch=prefetch,
            replanning=replanning,
            parallel=wrapped.parallel,
        )
        tell = validation.function("on_progress", on_progress)
        with _shown(options) if tell is None else contextlib.nullcontext(tell) as show:
            job = self._prepare(wrapped, dataset, options, show)
        self._jobs.add(job)
        return job

    def _prepare(
        self, wrapped: WrappedModel, dataset: Dataset, options: JobOptions, tell: Callable[[str], None]
    ) -> FinetuneJob:
        """Begin at once if that is worth it. Otherwise prepare the job before it begins."""
        model, direct = wrapped.model, metered(dataset, self.meter)
        remarks: list[str] = []
        with uncompiled(model):
            outlined = self._outlined(model, dataset, direct, options, tell)
        if outlined is not None:
            with contextlib.ExitStack() as unless_begun, uncompiled(model):
                unless_begun.callback(outlined.ahead.close)
                try:
                    if outlined.seconds >= _worth_s(options):
                        job = self._begun(wrapped, dataset, direct, options, outlined)
                        unless_begun.pop_all()
                        return job
                except NoSnapshot as error:
                    remarks.append(
                        f"prepared before the first batch, since the model cannot be copied: {error}"
                    )
                    log.info("%s", remarks[0])

        def split_for(options: JobOptions) -> Split:
            return with_faster_prefix(_split(model, direct, options, tell), direct, options, tell)

        def planner_for(parts: Split, options: JobOptions) -> Planner:
            return Planner(
                self.servers,
                model,
                dataset,
                direct,
                parts,
                options,
                tell=tell,
                bandwidth=self.meter.observed_bandwidth,
                remarks=remarks,
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
            planned = planner.plan()
        self.measured = planner.measured
        try:
            job = self._job(wrapped, direct, parts, options, planned)
        except BaseException:  # such as arguments that torch.compile does not take
            if planned.pool is not None:
                planned.pool.close()
            raise
        if outlined is not None and outlined.split.parts == parts.parts:
            _find_rows(job.feed, model, outlined, options)
        return job

    def _job(
        self,
        wrapped: WrappedModel,
        direct: Dataset,
        parts: Split,
        options: JobOptions,
        planned: PlannedJob,
    ) -> FinetuneJob:
        """Put a job together.

        Args:
            direct: The dataset, read over the metered link.
        """
        model = wrapped.model
        made: list[weakref.ref[FinetuneJob]] = []

        def again(hooked: bool) -> AttributeSnapshot | None:
            job = made[0]() if made else None
            with uncompiled(model), contextlib.suppress(UpriverError):
                if job is None or job.split.program is not None:
                    now: Split | None = _split(model, direct, options, lambda text: None)
                else:
                    now = outline(model, example_of(model, direct, options), autocast=options.autocast)
                    now = now if job.feed.is_as_before(direct) else None
                if now is not None:
                    return (parts if job is None else job.split).still_so(now, hooked=hooked)
            return None

        guard = FrozenGuard(
            model,
            parts.prefix_units,
            also=parts.reads,
            skipped=parts.skipped,
            attributes=parts.attributes,
            again=again,
        )
        run = TailRunner(parts.tail, wrapped, compile_options=options.compile_options)
        job = FinetuneJob(model, direct, parts, options, planned, run=run, guard=guard, connection=self)
        made.append(weakref.ref(job))
        return job

    def _outlined(
        self,
        model: nn.Module,
        dataset: Dataset,
        direct: Dataset,
        options: JobOptions,
        tell: Callable[[str], None],
    ) -> _Outlined | None:
        """Return the outline of a model for a job that may begin with it; None for others."""
        nothing_to_do = options.policy == "nosplit" or options.shares == {dataset.chain.start: 1.0}
        emulated = self.meter.rate_bytes_per_s is not None  # a second process would not share its rate
        if not options.may_begin or nothing_to_do or emulated or not dataset.store.is_shared:
            return None
        example = example_of(model, direct, options)
        tell("tracing the model")
        importlib.import_module("torch._dynamo")  # which every trace needs, and which takes a second once
        order = options.order(0)
        two_steps = -(-order.step(1)[1] // order.micro_batch)
        ahead = ReadAhead(direct, order.micro_batches[:two_steps], after_s=_worth_s(options))
        with contextlib.ExitStack() as unless_outlined:
            unless_outlined.callback(ahead.close)
            keeps = options.keep is not None
            others = trained_by_others(model) if keeps else []
            began = time.thread_time()
            found = outline(model, example, autocast=options.autocast, named=keeps, trained_by_others=others)
            seconds = time.thread_time() - began
            if found is None:
                return None
            unless_outlined.pop_all()
        return _Outlined(split=found, example=example, seconds=seconds, ahead=ahead)

    def _begun(
        self,
        wrapped: WrappedModel,
        dataset: Dataset,
        direct: Dataset,
        options: JobOptions,
        outlined: _Outlined,
    ) -> FinetuneJob:
        """Return a job that begins with its outline, while another process prepares it if that pays.

        Raises:
            NoSnapshot: If the model cannot be copied to another process.
        """
        parts = outlined.split
        horizon = _horizon(parts, dataset, options, outline_s=outlined.seconds)
        # An explicit cut is for a comparison, so it is carried out.
        too_short = horizon.too_short if options.shares is None and not options.in_background else ""
        why = too_short or "the frozen part is not captured yet"
        job = self._job(wrapped, direct, parts, options, _unsplit(parts, dataset, options, why=why))
        job.feed.ahead = outlined.ahead
        _find_rows(job.feed, wrapped.model, outlined, options)
        prepare = self._preparing(job.feed, wrapped.model, dataset, direct, options, outlined, horizon)
        if too_short:
            job.may_expect(prepare, pays=horizon.repaid_by)
        else:
            job.expect(prepare())
        return job

    def _preparing(
        self,
        feed: FeatureSource,
        model: nn.Module,
        dataset: Dataset,
        direct: Dataset,
        options: JobOptions,
        outlined: _Outlined,
        horizon: Horizon,
    ) -> Callable[[], Preparation]:
        """Return a function that lets another process prepare a job.

        It raises `NoSnapshot` if the model cannot be copied to that process.
        """
        task = PreparationTask(
            model=model,
            example=outlined.example,
            dataset=StoredDataset.of(dataset),
            options=replace(options, compile_options=None),
            credentials=self._credentials,
            parts=outlined.split.parts,
        )

        def carry_out(split: Split, prepared: Prepared) -> PlannedJob:
            planner = Planner(
                self.servers,
                model,
                dataset,
                direct,
                split,
                options,
                tell=lambda text: None,
                bandwidth=self.meter.observed_bandwidth,
            )
            planned = planner.carry_out(prepared.decision)
            self.measured = planner.measured
            self.meter.add(prepared.num_bytes)
            return planned

        def prepare() -> Preparation:
            with uncompiled(model):
                return Preparation(
                    task,
                    outlined.split,
                    niceness=horizon.niceness,
                    servers=lambda: self._addresses(dataset),
                    pace=lambda: feed.eager_s,
                    carry_out=carry_out,
                )

        return prepare

    def _addresses(self, dataset: Dataset) -> list[str]:
        """Return the addresses of the servers; start the embedded server if needed."""
        clients = self.servers(dataset)
        for client in clients:
            client.close()
        return [client.url for client in clients]

    def follow(self, pool: ServerPool) -> DirectoryFollower | None:
        """Keep a job's pool in step with the directory; return None if the servers are fixed."""
        if self._directory is None:
            return None
        return DirectoryFollower(self._directory, pool, self._client, urls=pool.urls)

    def forget(self, job: FinetuneJob) -> None:
        """Drop a job that was closed."""
        self._jobs.discard(job)

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


def _split(model: nn.Module, direct: Dataset, options: JobOptions, tell: Callable[[str], None]) -> Split:
    """Split a model as it is now, for a job with these options."""
    return split(
        model,
        example_of(model, direct, options),
        autocast=options.autocast,
        granularity=options.granularity,
        on_progress=tell,
    )


def _horizon(parts: Split, dataset: Dataset, options: JobOptions, *, outline_s: float) -> Horizon:
    """Return how much of its frozen part a job computes."""
    row_bytes = sum(each.shape.num_bytes(1) for each in parts.tail.values.ships)
    return Horizon.of(
        outline_s,
        compared=not parts.attempts[-1].remembered,
        micro_batch=options.micro_batch,
        micro_batches=len(options.order(0).micro_batches),
        epochs=computing_epochs(
            options.keep if options.exact != "numeric" else None,
            chain=dataset.chain,
            views=options.sampling.views,
            epochs=options.epochs,
            num_bytes=len(options.rows) * row_bytes,
        ),
    )


def _unsplit(parts: Split, dataset: Dataset, options: JobOptions, *, why: str) -> PlannedJob:
    """Return the plan of a job that begins on this side alone."""
    return PlannedJob(
        plan=unsplit_plan(options.policy, dataset, stop=parts.freeze, why=why),
        pool=None,
        agreement=agreement_for(options, parts),
        replay=options.replay,
        replanner=None,
        notes=(),
        offers=lambda: (),
    )


def _find_rows(feed: FeatureSource, model: nn.Module, outlined: _Outlined, options: JobOptions) -> None:
    """Name the rows that a job keeps, and those of other jobs that it may begin with."""

    def digest(parts: Split) -> str:
        return outline_digest(
            model, parts, outlined.example, autocast=options.autocast, granularity=options.granularity
        )

    if feed.kept is not None:
        feed.outlined(digest(outlined.split))
        feed.earlier = tuple(earlier_points(outlined.split, digest))
        remember_trained(model, outlined.split.boundary)


def _worth_s(options: JobOptions) -> float:
    """Return the seconds of a trace from which a job begins before it is prepared."""
    return 0.0 if options.in_background else WORTH_A_PROCESS_S


def _shown(options: JobOptions) -> contextlib.AbstractContextManager[Callable[[str], None]]:
    """Return how progress messages are shown by default."""
    if options.rank == 0 and not log.isEnabledFor(logging.INFO):
        return named_steps()
    return contextlib.nullcontext(lambda text: log.info("%s", text))


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
