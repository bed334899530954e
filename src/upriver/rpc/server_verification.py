"""Verify a server before its answers are used: its fingerprint, and a canary that both sides compute.

If one bit of the canary's results differs, the server takes no part where bits must be equal, whatever its
fingerprint.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from upriver.engine.fingerprint import fingerprint
from upriver.errors import NotExact
from upriver.protocol import Info
from upriver.rpc.client import ProgramUpload, RunAnswer, ServerClient
from upriver.rpc.http import within
from upriver.rpc.tolerance import Agreement, difference, tolerance_between
from upriver.types import MicroBatch, Timings

log = logging.getLogger("upriver")

MEASURE_S = 120.0
"""Seconds for a canary, from the request to the last byte. The slowest network measured takes 11 s for a
micro-batch on one core, and loading its program from a busy disk as long. Its largest cut takes 82 s over 20
Mbit/s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerVerifier:
    """Refuse servers whose results differ from the local ones.

    Attributes:
        device: Device of the local computation.
        agreement: Whether a canary's results must be equal to the bit.
    """

    device: torch.device
    agreement: Agreement

    def check_fingerprint(self, url: str, info: Info) -> None:
        """Compare a server's fingerprint with the local one; within a tolerance, a difference is only logged.

        The number of threads counts where the model runs on the CPU. The tolerance grows to that of the side
        which computes float32 in fewer bits.

        Raises:
            NotExact: If low bits must be equal, and the fingerprints differ.
        """
        found = fingerprint_difference(info.fingerprint, self.device)
        threads = torch.get_num_threads()
        if self.device.type == info.device == "cpu" and info.threads != threads:
            found = ", ".join(filter(None, (found, f"threads {info.threads} there, {threads} here")))
        if found and self.agreement.allowed is None:
            raise NotExact(f"{url} computes with other low bits: {found}")
        if self.agreement.allowed is not None:
            self.agreement.widen(tolerance_between(info.fingerprint, fingerprint(self.device)))
        if found:
            log.info("%s has another fingerprint: %s", url, found)

    def check_canary(
        self, server: ServerClient, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], canary: str
    ) -> None:
        """Compare a server's results for a canary, which the error names, with the local ones.

        Raises:
            NotExact: If they differ by more than is allowed.
        """
        allowed = self.agreement.allowed
        found = difference(ours, theirs, allowed)
        if found:
            where = "" if allowed is None else f", where {allowed} is allowed"
            raise NotExact(
                f"{server.url} gives {found} for {canary}{where}; "
                f"upriver diff MODEL --server {server.url} names the first operator that differs"
            )


def differing_fields(
    theirs: Mapping[str, str], device: str | torch.device = "cpu"
) -> dict[str, tuple[str | None, str | None]]:
    """Return the fields in which two fingerprints differ, with the values there and here; None if absent."""
    ours = fingerprint(device)
    both = {field: (theirs.get(field), ours.get(field)) for field in sorted(ours.keys() | theirs.keys())}
    return {field: values for field, values in both.items() if values[0] != values[1]}


def fingerprint_difference(theirs: Mapping[str, str], device: str | torch.device = "cpu") -> str:
    """Return some fields in which a server's fingerprint differs from the local one; empty if none does."""
    different = islice(differing_fields(theirs, device).items(), 3)
    return ", ".join(
        f"{field} {('none' if there is None else there)!r} there, {here!r} here"
        for field, (there, here) in different
    )


def bring(server: ServerClient, program: ProgramUpload) -> None:
    """Upload a program unless the server has it; if the server has its weights, only the graph is sent."""
    if not server.has_program(program.digest):
        server.put_program(program)


def only(answer: RunAnswer, seconds: float, *, url: str) -> tuple[MicroBatch, Timings]:
    """Return the single micro-batch of an answer.

    Args:
        seconds: Time limit, from the call to the last byte.

    Raises:
        ServerUnavailable: If the answer is late.
        UpriverError: Any other error of the request.
    """
    with answer, within(seconds, answer.close, url=url):
        found = next(answer)
        for _ in answer:
            pass  # to the end, so that the connection can be used again
    return found
