"""Verify a server before its answers are used: version, fingerprint, program, dataset, canary.

The canary is a real micro-batch of the job that both sides compute. If one bit of the features differs, the
server does not take part in an ``exact="bitwise"`` job, whatever its fingerprint. If servers may run several
micro-batches at once, each such size has its own canary.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from upriver.engine.engine import Engine, OnBadSample
from upriver.engine.fingerprint import fingerprint
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
from upriver.pipeline import Dataset
from upriver.program.graph.executor import Program
from upriver.program.split.crossing_values import CrossingValues
from upriver.protocol import DatasetRef, Larger, RunRequest
from upriver.rpc.client import RunAnswer, ServerClient
from upriver.rpc.http import within
from upriver.rpc.server_pool import Transport
from upriver.rpc.tolerance import Tolerance, difference, largest
from upriver.types import MicroBatch, Timings

log = logging.getLogger("upriver")

MEASURE_S = 120.0
"""Seconds for a canary, from the request to the last byte. The slowest network measured takes 11 s for a
micro-batch on one core, and loading its program from a busy disk as long. Its largest cut takes 82 s over 20
Mbit/s."""

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
    ) -> RunRequest:
        """Return a request that runs the chain from the stored bytes to ``stop``.

        Args:
            micro_batches: Sample ids.
            stop: Position of the results.
            epoch: Epoch of the job.
            larger: Programs for more samples at once. The request names those for which it has enough whole
                micro-batches.
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
        )


class ServerVerifier:
    """Admit a server to a job, or raise the reason against it.

    Args:
        question: The job's requirements.
        engine: The plain way's engine, for the local computation.
        canary: Sample ids of the canary, one micro-batch.
        reference: Computes the canary's features at the freeze point locally; called once, when needed.
        allowed: By how much features may differ (``exact="numeric"``); None asks for equal bits.
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
        engine: Engine,
        *,
        canary: tuple[int, ...],
        reference: Callable[[], MicroBatch],
        allowed: Tolerance | None,
        values: CrossingValues,
    ) -> None:
        self._question = question
        self._engine = engine
        self._canary = canary
        self._make_reference = reference
        self._reference: MicroBatch | None = None
        self._allowed = allowed
        self._values = values
        self._lock = threading.Lock()
        self._proved: set[tuple[str, int]] = set()
        self._proved_larger: set[str] = set()
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
        server, passed = cast(ServerClient, client), set[int]()
        with self._lock:
            passed |= {cut for url, cut in self._proved if url == server.url}
            self._proved -= {(server.url, cut) for cut in passed}  # next time it may be another process
            passed_larger = server.url in self._proved_larger
            self._proved_larger.discard(server.url)
        while missing := set(self.cuts) - passed:  # more may be opened meanwhile
            for cut in sorted(missing):
                self.measure(server, stop=cut)
            passed |= missing
        if not passed_larger:
            self.prove_larger(server)

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
        self._check_fingerprint(server)
        bring(server, self._question.program)
        request = self._question.request([self._canary], stop=stop, epoch=0)
        batch, timings = answer_of(server, request, MEASURE_S)
        self._compare(server, batch, stop)
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

    def vouch(self, server: ServerClient) -> None:
        """Note that the server has just passed the canary at the current cuts, and at the larger sizes."""
        with self._lock:
            self._proved |= {(server.url, cut) for cut in self.cuts}
            self._proved_larger.add(server.url)

    def _measure_larger(self, server: ServerClient, program: Program) -> None:
        """Let a server run the canary's samples, repeated to the program's size: all repeats must be equal.

        It runs up to the freeze point, which covers all stages; each earlier cut runs a part of the same
        stages.
        """
        bring(server, program)
        times = program.micro_batch // len(self._canary)
        request = replace(self._question, program=program).request(
            [self._canary * times], stop=program.num_stages, epoch=0
        )
        seconds = MEASURE_S * program.micro_batch / self._question.program.micro_batch
        batch, _ = answer_of(server, request, seconds)
        got, count = self._at_size(server, batch, program.micro_batch), len(self._canary)
        wanted = self._values.select(self._referred().tensors, range(count))
        for start in range(0, count * times, count):
            found = difference(wanted, self._values.select(got, range(start, start + count)), self._allowed)
            if found:
                raise NotExact(f"{server.url} gives {found} for the canary micro-batch")

    def _at_size(self, server: ServerClient, batch: MicroBatch, size: int) -> tuple[torch.Tensor, ...]:
        """Return the features, or raise `NotExact` unless they hold exactly ``size`` samples."""
        try:
            got = self._values.check(batch.tensors)
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

    def _check_fingerprint(self, server: ServerClient) -> None:
        check_fingerprint(
            server.url, server.info().fingerprint, self._question.program.device, exact=self._allowed is None
        )

    def _referred(self) -> MicroBatch:
        """Return the canary's features as computed locally."""
        with self._lock:
            if self._reference is None:
                self._reference = self._make_reference()
            return self._reference

    def _compare(self, server: ServerClient, batch: MicroBatch, stop: int) -> None:
        wanted, question = self._referred(), self._question
        done = self._engine.resume(
            batch,
            object_names=[ref.object for ref in question.dataset.locate(batch.ids)],
            stop=question.program.num_stages,
            seed=question.seed,
            epoch=0,
            on_bad_sample=question.on_bad_sample,
        )
        found = difference(wanted.tensors, done.tensors, self._allowed)
        if not found:
            self._note_distance(server, wanted, done)
        elif self._allowed is None:
            what = f"{server.url} gives {found} for the canary micro-batch at cut {stop}"
            raise NotExact(what + threads_hint(server))
        else:
            raise NotExact(
                f"{server.url} gives {found} for the canary micro-batch at cut {stop}, where exact='numeric' "
                f"allows {self._allowed}"
            )

    def _note_distance(self, server: ServerClient, wanted: MicroBatch, done: MicroBatch) -> None:
        """Record how much of the tolerance a server needed."""
        if self._allowed is not None:
            apart = largest(wanted.tensors, done.tensors)
            with self._lock:
                self.distances[server.url] = max(apart, self.distances.get(server.url, 0.0))
            log.info("%s: features are at most %.2g of the largest apart", server.url, apart)


def check_fingerprint(url: str, theirs: Mapping[str, str], device: torch.device, *, exact: bool) -> None:
    """Compare the fingerprint of a server with the local one: the settings that decide low bits.

    Args:
        url: Address of the server.
        theirs: Fingerprint of the server.
        device: Device of the local computation.
        exact: Whether low bits must be equal; if not, a difference is only logged.

    Raises:
        NotExact: If low bits must be equal, and the fingerprints differ.
    """
    ours = fingerprint(device)
    different = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if not different:
        return
    shown = ", ".join(
        f"{key} {theirs.get(key, 'none')!r} there, {ours.get(key)!r} here" for key in different[:3]
    )
    if exact:
        raise NotExact(f"{url} computes with other low bits: {shown}; exact='numeric' accepts a tolerance")
    log.info("%s has another fingerprint: %s", url, shown)


def bring(server: ServerClient, program: Program) -> None:
    """Upload a program unless the server has it; if the server has its weights, only the graph is sent."""
    if not server.has_program(program.digest):
        server.put_program(program)


def answer_of(
    server: ServerClient, request: RunRequest, seconds: float, batches: Sequence[MicroBatch] = ()
) -> tuple[MicroBatch, Timings]:
    """Return the answer to a request for one micro-batch, within a time limit.

    Args:
        seconds: Time limit, from the call to the last byte.
        batches: The inputs, if the request names no dataset.

    Raises:
        ServerUnavailable: If the answer is late.
        UpriverError: Any other error of the request.
    """
    return only(server.run(request, batches), seconds, url=server.url)


def only(answer: RunAnswer, seconds: float, *, url: str) -> tuple[MicroBatch, Timings]:
    """Return the single micro-batch of an answer, within a time limit.

    Raises:
        UpriverError: As `answer_of`.
    """
    with answer, within(seconds, answer.close, url=url):
        found = next(answer)
        for _ in answer:
            pass  # to the end, so that the connection can be used again
    return found


def threads_hint(server: ServerClient) -> str:
    """Return a hint on different thread counts, if any: some kernels then add up in another order."""
    there, here = server.info().threads, torch.get_num_threads()
    if there == here:
        return ""
    return (
        f"; it computes with {there} threads and this side with {here}, which changes the bits of some "
        f"networks: start it with --threads {here}, or call torch.set_num_threads({there})"
    )
