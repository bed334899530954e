"""Handle ``POST /v1/profile``: measure model stages in the workers, between other requests' jobs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from statistics import median
from typing import TypeAlias

import upriver
from upriver.errors import Busy, ProtocolError, TooLarge
from upriver.profile.stage_timing import Seconds, through_first
from upriver.protocol import ProfileRequest, StageCost, StageCosts, check_version, decode_json
from upriver.server.config import ServerConfig
from upriver.server.device_group import DeviceGroup
from upriver.server.execution.run_context import until
from upriver.server.ipc.messages import Hello, StageMeasurements
from upriver.server.tenants import Tenant

BODY_BYTES = 16 << 10
"""Most bytes of a request, which holds a few digests and numbers."""

BUDGET_S = 30.0
"""Seconds after which no further run begins, once each program has a run that counts."""

RETRY_S = 5.0
"""Seconds after which a client asks again while another profile is being measured."""

Runs: TypeAlias = list[list[StageMeasurements]]
"""Runs of each program."""


class ProfileHandler:
    """Measure one profile at a time.

    Each run of each program is a job of its own. So other requests wait for one run at most, and
    `job_timeout_s` applies to each.

    Args:
        unit: Device to measure; a server's devices are of one kind.
    """

    def __init__(self, config: ServerConfig, unit: DeviceGroup) -> None:
        self._config, self._device = config, unit.device
        self._pool, self._runner = unit.pool, unit.runner
        self._at_it = False

    async def measure(
        self,
        body: AsyncIterator[bytes],
        hello: Hello,
        tenant: Tenant,
        *,
        on_request: Callable[[ProfileRequest], None] = lambda request: None,
        wanted: AbstractAsyncContextManager[None] | None = None,
    ) -> StageCosts:
        """Read a request, wait until memory has room for it, and measure.

        Args:
            wanted: Context that cancels its block when the client disconnects.

        Raises:
            Busy: If another profile is being measured.
            Overloaded: If too many requests are running.
            DeadlineExceeded: If it took longer than a request may.
            UpriverError: If it is invalid or not allowed.
        """
        deadline = asyncio.get_running_loop().time() + self._config.deadline_s
        async with AsyncExitStack() as stack, until(deadline):
            request = await read_request(body)  # before a place is taken: a slow sender must hold none
            on_request(request)
            self._enter(stack, tenant)
            async with wanted or nullcontext():
                runs = await self._runs(request, tenant)
        return StageCosts(
            device=self._device,
            threads=self._config.threads_per_worker,
            version=upriver.__version__,
            fingerprint=hello.fingerprint,
            micro_batches=tuple(of_one[0].micro_batch for of_one in runs),
            repeats=len(runs[-1]),
            stages=costs(runs),
        )

    def _enter(self, stack: AsyncExitStack, tenant: Tenant) -> None:
        if self._at_it:
            raise Busy("another profile is being measured, and one is at a time", retry_after_s=RETRY_S)
        self._runner.enter(stack, tenant)
        self._at_it = True
        stack.callback(self._leave)

    def _leave(self) -> None:
        self._at_it = False

    async def _runs(self, request: ProfileRequest, tenant: Tenant) -> Runs:
        """Run each program in turns, so that a machine that slows down slows all of them."""
        runs: Runs = [[] for _ in request.programs]
        end = time.monotonic() + BUDGET_S
        for turn in range(request.repeats):
            if turn and time.monotonic() > end:
                break
            for digest, of_one in zip(request.programs, runs, strict=True):
                async with self._runner.borrowed(tenant, digest, stop=request.stop) as (file, use):
                    of_one.append(await self._pool.measure(file, stop=request.stop, use=use))
            if not turn:
                check_alike([of_one[0] for of_one in runs])
        return runs


async def read_request(body: AsyncIterator[bytes]) -> ProfileRequest:
    """Return the request in a body.

    Raises:
        ProtocolError: If it is malformed.
        TooLarge: If it has more bytes than a request may have.
    """
    data = bytearray()
    async for chunk in body:
        data += chunk
        if len(data) > BODY_BYTES:
            raise TooLarge(f"a profile request has at most {BODY_BYTES} bytes")
    request = decode_json(bytes(data), ProfileRequest, "profile request")
    check_version(request.protocol)
    if len(set(request.programs)) < len(request.programs):
        raise ProtocolError("a program is named twice; name programs of different micro-batches")
    return request


def check_alike(runs: Sequence[StageMeasurements]) -> None:
    """Raise `ProtocolError` unless programs are one network at different micro-batch sizes."""
    if any(run.names != runs[0].names for run in runs):
        counts = [len(run.names) for run in runs]
        raise ProtocolError(f"programs in one profile must have the same stages, got {counts} unlike ones")
    sizes = [run.micro_batch for run in runs]
    if len(set(sizes)) < len(sizes):
        raise ProtocolError(f"programs in one profile must have different micro-batches, got {sizes}")


def costs(runs: Sequence[Sequence[StageMeasurements]]) -> tuple[StageCost, ...]:
    """Return the cost of each stage: medians over runs, and a line through the sizes.

    Args:
        runs: Runs of each program, the requested one first: the line passes through its measured time.
    """
    return tuple(
        StageCost(
            position=index + 1,
            seconds=_line([(of_one[0].micro_batch, _median(of_one, index)) for of_one in runs]),
            peak_bytes=max(of_one[0].peak_bytes[index] for of_one in runs),
        )
        for index in range(len(runs[0][0].names))
    )


def _median(runs: Sequence[StageMeasurements], index: int) -> float:
    return median(run.seconds[index] for run in runs)


def _line(points: Sequence[tuple[int, float]]) -> Seconds:
    """Fit fixed and per-sample seconds. With one size, all of the time counts as per-sample seconds."""
    if len(points) > 1:
        return through_first(points)
    [(samples, seconds)] = points
    return 0.0, seconds / samples
