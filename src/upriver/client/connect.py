"""``upriver.connect()``: the door through which a training script finds the near-data servers."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn

from upriver.client import checks
from upriver.client.embedded import EmbeddedServer
from upriver.client.job import FinetuneJob, JobOptions
from upriver.client.link import LinkMeter, MeteredStore
from upriver.client.planner import Planner, example_of
from upriver.client.servers import Exact
from upriver.client.transport import ServerClient
from upriver.engine.engine import OnBadSample
from upriver.errors import ConfigError, DatasetError
from upriver.pipeline import Dataset
from upriver.policies import POLICIES
from upriver.program.split import split
from upriver.protocol import DEFAULT_CAPS, MAX_MICRO_BATCH
from upriver.types import DEFAULT_MICRO_BATCH, require_type

log = logging.getLogger("upriver")

WINDOW_BYTES = 1 << 30
"""Memory that prefetched micro-batches may take: two training batches of 512 at most cuts measured."""


class Near:
    """Servers near the data, and the link to them.

    Args:
        urls: Addresses of servers; none starts an embedded one, on this machine, when the first job needs it.
        token: Sent with every request.
        meter: Counts what crosses the link, and emulates a thinner one if it has a rate.
        server_cpus: For an embedded server: the CPUs it may use.
        server_threads: For an embedded server: threads of its compute worker. As many as torch uses
            here where not given: another number changes the bits of some networks.
    """

    def __init__(
        self,
        urls: Sequence[str] = (),
        *,
        token: str | None = None,
        meter: LinkMeter | None = None,
        server_cpus: set[int] | None = None,
        server_threads: int | None = None,
    ) -> None:
        self.meter = LinkMeter() if meter is None else require_type("meter", meter, LinkMeter, "LinkMeter()")
        self._urls = checks.addresses(urls)
        self._token = checks.token(token)
        self._cpus = checks.cores(server_cpus)
        if server_threads is not None:
            checks.whole("server_threads", server_threads, most=checks.MAX_THREADS)
        self._threads = server_threads
        self._closed = False
        self._embedded: dict[tuple[str, str], EmbeddedServer] = {}
        self._jobs: list[FinetuneJob] = []
        self._lock = threading.Lock()

    def finetune(
        self,
        model: nn.Module,
        dataset: Dataset,
        *,
        batch_size: int,
        micro_batch: int = DEFAULT_MICRO_BATCH,
        policy: str = "hapi",
        cut: int | None = None,
        exact: Exact = "bitwise",
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        on_bad_sample: OnBadSample = "fail",
        num_workers: int | None = None,
        connections: int = 4,
        per_request: int = 4,
        window_bytes: int = WINDOW_BYTES,
        on_progress: Callable[[str], None] | None = None,
    ) -> FinetuneJob:
        """Prepare a fine-tuning job: capture and prove the frozen part, measure both tiers, choose the cut.

        Args:
            model: Frozen parameters (``requires_grad=False``) say where the freeze point is.
            dataset: What to train on, with its input stages.
            batch_size: Samples of a training step.
            micro_batch: Samples that the frozen stages see at once, on every tier.
            policy: One of ``nosplit``, ``freeze``, ``min``, ``hapi``.
            cut: Take this cut instead of a policy's.
            exact: ``bitwise`` uses only servers that compute the same bits; ``numeric`` accepts a tolerance.
            seed: Decides the order of samples and random input stages.
            shuffle: A new order each epoch.
            drop_last: Leave out a last, short batch.
            on_bad_sample: ``fail`` raises, ``skip`` leaves the sample out and counts it.
            num_workers: Threads that read and decode here when samples come straight from the store.
            connections: Requests in flight.
            per_request: Micro-batches in a request.
            window_bytes: Memory that prefetched micro-batches may take.
            on_progress: Told what is being done.

        Raises:
            ConfigError: If an argument is outside what is allowed, or the connection was closed.
            ModelError: If nothing or everything is frozen, or a skipped module has hooks.
            NoFeasibleCut: If no cut fits the memory.
        """
        self._check_open()
        require_type("model", model, nn.Module, "with frozen parameters")
        require_type("dataset", dataset, Dataset, "from upriver.index()")
        options = _options(
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
        )
        checks.choice("policy", policy, POLICIES)
        checks.choice("exact", exact, ("bitwise", "numeric"))
        if len(dataset) == 0:
            raise DatasetError("the dataset is empty")
        if drop_last and batch_size > len(dataset):
            raise ConfigError(
                f"drop_last leaves no step in an epoch: batch_size {batch_size}, {len(dataset)} samples"
            )
        tell = checks.function("on_progress", on_progress) or (lambda text: log.info("%s", text))
        direct = dataset.with_store(MeteredStore(dataset.store, self.meter))
        parts = split(model, example_of(model, direct, options), on_progress=tell)
        planner = Planner(self.servers, model, dataset, direct, parts, options, exact=exact, tell=tell)
        plan, pool = planner.plan(policy, cut)
        job = FinetuneJob(
            model, direct, parts, plan, options, pool=pool, link_bytes=lambda: self.meter.total_bytes
        )
        self._jobs.append(job)
        return job

    def servers(self, dataset: Dataset) -> list[ServerClient]:
        """A client for each server, the embedded one started if it is needed.

        Raises:
            ServerUnavailable: If an embedded server cannot be started.
            ConfigError: If the dataset's store cannot be shared with another process.
        """
        urls, token = self._urls, self._token
        if not urls:
            server = self._embed(dataset)
            urls, token = (server.url,), self._token
        return [ServerClient(url, token=token, meter=self.meter) for url in urls]

    def _embed(self, dataset: Dataset) -> EmbeddedServer:
        store = dataset.store
        with self._lock:
            self._check_open()
            key = (store.name, store.uri)
            if key not in self._embedded:
                server = EmbeddedServer.start(
                    {store.name: store.uri},
                    threads=self._threads or torch.get_num_threads(),
                    cpu=self._cpus,
                    token=self._token,
                )
                self._embedded[key] = server
            return self._embedded[key]

    def close(self) -> None:
        """End all jobs and the embedded server; no further jobs. May be called again."""
        with self._lock:
            self._closed = True
        for job in self._jobs:
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


def connect(
    *urls: str,
    token: str | None = None,
    meter: LinkMeter | None = None,
    server_cpus: set[int] | None = None,
    server_threads: int | None = None,
) -> Near:
    """Connect to near-data servers; without an address, to an embedded one.

    Nothing is sent before a job needs it, and a job without a server that answers runs the plain way.

    Args:
        urls: ``http://host:port`` of each server; all of them reach the same stores.
        token: Sent with every request.
        meter: Counts what crosses the link, and emulates a thinner one if it has a rate.
        server_cpus: For an embedded server: the CPUs it may use.
        server_threads: For an embedded server: threads of its compute worker. As many as torch uses
            here where not given: another number changes the bits of some networks.

    Raises:
        ConfigError: If an address is none, or another argument is outside what is allowed.
    """
    return Near(urls, token=token, meter=meter, server_cpus=server_cpus, server_threads=server_threads)


def _options(
    *,
    batch_size: int,
    micro_batch: int,
    seed: int,
    shuffle: bool,
    drop_last: bool,
    on_bad_sample: Literal["fail", "skip"],
    num_workers: int | None,
    connections: int,
    per_request: int,
    window_bytes: int,
) -> JobOptions:
    most = checks.MAX_THREADS
    workers = min(max(2, len(os.sched_getaffinity(0))), most) if num_workers is None else num_workers
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise ConfigError(f"seed must be a whole number in 0..2**63 - 1, got {seed!r}")
    return JobOptions(
        batch_size=checks.whole("batch_size", batch_size),
        micro_batch=checks.whole("micro_batch", micro_batch, most=MAX_MICRO_BATCH),
        seed=seed,
        shuffle=checks.flag("shuffle", shuffle),
        drop_last=checks.flag("drop_last", drop_last),
        on_bad_sample=checks.choice("on_bad_sample", on_bad_sample, ("fail", "skip")),
        num_workers=checks.whole("num_workers", workers, most=most),
        connections=checks.whole("connections", connections, most=most),
        per_request=checks.whole("per_request", per_request, most=DEFAULT_CAPS.micro_batches),
        window_bytes=checks.whole("window_bytes", window_bytes),
    )
