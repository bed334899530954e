"""Admit servers to a job: each computes the job's canary at every cut and size that it may be asked for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from upriver.engine.engine import OnBadSample
from upriver.errors import (
    ConfigError,
    Forbidden,
    NotAuthorized,
    NotExact,
    Overloaded,
    ServerUnavailable,
    StoreError,
    UpriverError,
)
from upriver.finetune.calibration.local_canary import LocalCanary
from upriver.pipeline import Dataset
from upriver.program.graph.executor import Program
from upriver.program.split.crossing_values import CrossingValues
from upriver.protocol import DatasetRef, Larger, RunRequest
from upriver.rpc.client import ServerClient
from upriver.rpc.server_pool import Transport
from upriver.rpc.server_verification import MEASURE_S, ServerVerifier, bring, only
from upriver.rpc.tolerance import Agreement, largest
from upriver.types import MicroBatch, Timings

log = logging.getLogger("upriver")

ABOUT_SERVER = (ServerUnavailable, NotAuthorized, Forbidden, Overloaded, StoreError)
"""Errors independent of the size. Any other error at a larger size means that the size is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequirements:
    """A job's requirements of a server, for any samples and cut."""

    dataset: Dataset
    program: Program
    seed: int
    on_bad_sample: OnBadSample

    def request(
        self,
        micro_batches: Sequence[tuple[int, ...]],
        *,
        stop: int,
        epoch: int,
        larger: Sequence[Larger] = (),
        keep: bool = False,
    ) -> RunRequest:
        """Return a request that runs the chain from the stored bytes to ``stop``.

        Args:
            micro_batches: Sample ids.
            stop: Position of the results.
            larger: Programs for more samples at once. The request names those for which it has enough whole
                micro-batches.
            keep: Whether the server may keep the rows, and answer from kept ones.
        """
        size = self.program.micro_batch
        most = size * sum(len(ids) == size for ids in micro_batches) if stop > 0 else 0
        return RunRequest(
            micro_batches=tuple(micro_batches),
            start=self.dataset.chain.start,
            stop=stop,
            micro_batch=size,
            program=self.program.digest if stop > 0 else None,
            dataset=DatasetRef(store=self.dataset.store.name, digest=self.dataset.digest),
            seed=self.seed,
            epoch=epoch,
            on_bad_sample=self.on_bad_sample,
            larger=tuple(each for each in larger if each.micro_batch <= most),
            keep=keep,
        )


class ServerGate:
    """Admit a server to a job, or raise the reason against it.

    Args:
        reference: Returns the canary's features at the freeze point, as computed locally.
        agreement: Whether features must be equal to the bit; decided by the first servers.
        values: Sample dimensions of the features at the freeze point.

    Attributes:
        cuts: Cuts at which servers are asked.
        distances: Largest difference seen, by address.
        larger: The program at larger sizes that servers may choose; empty unless low bits may differ.
        left_out: (samples, reason) of each size that was removed from ``larger``.
    """

    def __init__(
        self,
        question: JobRequirements,
        canary: LocalCanary,
        *,
        reference: Callable[[], MicroBatch],
        agreement: Agreement,
        values: CrossingValues,
    ) -> None:
        self._question, self._canary = question, canary
        self._reference, self._values = reference, values
        self.agreement = agreement
        self._verifier = ServerVerifier(device=question.program.device, agreement=agreement)
        self._lock = threading.Lock()
        self._vouched: dict[str, tuple[int, ...]] = {}
        self.cuts: tuple[int, ...] = (question.program.num_stages,)
        self.distances: dict[str, float] = {}
        self.larger: tuple[Program, ...] = ()
        self.left_out: list[tuple[int, str]] = []

    @property
    def offers(self) -> tuple[Larger, ...]:
        """The larger sizes, as requests name them."""
        return tuple(
            Larger(program=program.digest, micro_batch=program.micro_batch) for program in self.larger
        )

    def admit(self, client: Transport) -> None:
        """Check a server that joins or returns; a :class:`~upriver.rpc.server_pool.ServerPool` calls it.

        Raises:
            NotExact: If its bits differ from the local ones.
            UpriverError: If it cannot be used now.
        """
        server = cast(ServerClient, client)
        vouched = self._vouched.pop(server.url, None)  # next time it may be another process
        try:
            self._measure_all(server, set(vouched or ()))
        except NotExact as error:
            if self.agreement.mode is not None or not self.agreement.try_tolerance(str(error)):
                raise
            try:
                self._measure_all(server, set())
            finally:
                self.agreement.withdraw()
        if vouched is None:
            self.prove_larger(server)

    def _measure_all(self, server: ServerClient, passed: set[int]) -> None:
        """Let a server compute the canary at all cuts, but for those that it has passed."""
        while missing := set(self.cuts) - passed:  # more may be opened meanwhile
            for cut in sorted(missing):
                self.measure(server, stop=cut)
            passed |= missing

    def open_cuts(
        self,
        cuts: Sequence[int],
        servers: Callable[[], Sequence[ServerClient]],
        *,
        refused: Callable[[str, Overloaded], None],
    ) -> None:
        """Run the canary at more cuts on admitted servers; servers that join later run it there too.

        Args:
            cuts: Cuts in addition to the open ones.
            servers: Returns the admitted servers; called once joining servers are measured at these cuts too.
            refused: Called with the address of a server without room, and its error.

        Raises:
            NotExact: If a server fails; then no server is asked at these cuts.
            UpriverError: If a server cannot be asked now; likewise.
        """
        before = self.cuts
        self.cuts = tuple(sorted({*before, *cuts}))
        try:
            for server in servers():
                try:
                    for cut in cuts:
                        self.measure(server, stop=cut)
                except Overloaded as error:
                    refused(server.url, error)
                    raise
        except UpriverError:
            self.cuts = before
            raise

    def measure(self, server: ServerClient, *, stop: int) -> Timings:
        """Let a server compute the canary up to a cut, compare, and return its timings.

        Raises:
            NotExact: If the fingerprint or the features differ.
            UpriverError: If the server cannot be used now.
        """
        self._verifier.check_fingerprint(server.url, server.info())
        bring(server, self._question.program)
        request = self._question.request([self._canary.ids], stop=stop, epoch=0)
        batch, timings = only(server.run(request), MEASURE_S, url=server.url)
        ours, theirs = self._referred().tensors, self._canary.finish(batch).tensors
        self._verifier.check_canary(server, ours, theirs, f"the canary micro-batch at cut {stop}")
        self.agreement.prove()
        if self.agreement.allowed is not None:
            self._note_distance(server, largest(ours, theirs))
        return timings

    def prove_larger(self, server: ServerClient) -> None:
        """Let a server compute the canary at each larger size; leave out sizes at which it fails.

        A size is left out for all servers, since a request does not know its server.

        Raises:
            UpriverError: If the server cannot be used now, whatever the size.
        """
        for program in self.larger:
            try:
                self._measure_larger(server, program)
            except ABOUT_SERVER:
                raise
            except UpriverError as error:
                self._leave_out(program, error)

    def vouch(self, url: str) -> None:
        """Note that a server has just passed the canary at the current cuts, and at the larger sizes."""
        self._vouched[url] = self.cuts

    def _measure_larger(self, server: ServerClient, program: Program) -> None:
        """Let a server run the canary's samples, repeated to the program's size: all repeats must be equal.

        It runs up to the freeze point, which covers all stages; each earlier cut runs a part of the same
        stages.
        """
        bring(server, program)
        ids = self._canary.ids
        times = program.micro_batch // len(ids)
        request = replace(self._question, program=program).request(
            [ids * times], stop=program.num_stages, epoch=0
        )
        seconds = MEASURE_S * program.micro_batch / self._question.program.micro_batch
        batch, _ = only(server.run(request), seconds, url=server.url)
        got, count = self._at_size(server, batch, program.micro_batch), len(ids)
        wanted = self._values.select(self._values.as_read(self._referred().tensors), range(count))
        for start in range(0, count * times, count):
            repeat = self._values.select(got, range(start, start + count))
            self._verifier.check_canary(server, wanted, repeat, "the canary micro-batch")

    def _at_size(self, server: ServerClient, batch: MicroBatch, size: int) -> tuple[torch.Tensor, ...]:
        """Return the features, or raise `NotExact` unless they hold exactly ``size`` samples."""
        try:
            got = self._values.check(self._values.as_read(batch.tensors))
        except ConfigError:
            got = ()
        if not got or self._values.samples_of(got) != size:
            raise NotExact(f"{server.url} gives features of another form than for {size} samples")
        return got

    def _leave_out(self, program: Program, error: UpriverError) -> None:
        with self._lock:
            if program not in self.larger:
                return
            self.larger = tuple(each for each in self.larger if each is not program)
            self.left_out.append((program.micro_batch, str(error)))
        log.warning("servers run no %d samples at once: %s", program.micro_batch, error)

    def _referred(self) -> MicroBatch:
        with self._lock:  # servers join in threads of their own
            return self._reference()

    def _note_distance(self, server: ServerClient, apart: float) -> None:
        """Record how much of the tolerance a server needed."""
        with self._lock:
            self.distances[server.url] = max(apart, self.distances.get(server.url, 0.0))
        log.info("%s: features are at most %.2g of the largest apart", server.url, apart)
