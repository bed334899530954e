"""Check a server before it runs the rest of requests, and measure its costs meanwhile.

As in a fine-tuning job, the checks are version, fingerprint, program and a canary. The canary is the example
of the capture. Both sides compute it, whole and from the cut with the fewest crossing bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from upriver.errors import Overloaded, ProgramNotFound, UpriverError
from upriver.inference.costs import ANY_TIME, CutCosts, HandlingTimes, crossing_bytes
from upriver.inference.exchange import Exchange, ExchangeResult, packing
from upriver.inference.uplink import Uplink
from upriver.link import LEAST_PROBE, ROUND_TRIPS, LinkEstimator
from upriver.profile.profile_cache import ProfileKey, load_profile, save_profile
from upriver.program.capture.whole_model import CapturedModel
from upriver.program.graph.executor import Program
from upriver.protocol import Load
from upriver.rpc.client import ServerClient
from upriver.rpc.load_report import UNCHANGED, profile_key
from upriver.rpc.server_verification import MEASURE_S, ServerVerifier, bring
from upriver.rpc.tolerance import Agreement
from upriver.types import Tier, Timings

log = logging.getLogger("upriver")

PROBES = 3
"""Large transfers of the first link estimate. The first probe is small and only sets the size of the
others."""

CANARIES = 2
"""Runs from the narrowest cut; the first run also makes the server look up what crosses there."""

BUSY = 0.9
"""Share of a server's machine in use from which on measured stage times are not the best ones. This is
LoADPart's threshold and the servers' default."""

REPEATS = 3
"""Counted runs of each stage where a server measures its stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmittedNetwork:
    """A network that a server may be asked for.

    Attributes:
        costs: Seconds of its stages on both sides, and the handling of requests.
        provisional: Whether the best stage times are unknown, because the server was busy during the
            measurement or had no time for it.
        cuts: Cuts from which the example ran.
        load: Load of the server.
    """

    costs: CutCosts
    provisional: bool
    cuts: tuple[int, ...]
    load: Load


def admit(
    client: ServerClient,
    captured: CapturedModel,
    device_s: Sequence[float],
    *,
    push: bool,
    agreement: Agreement,
    link: LinkEstimator,
    uplink: Uplink,
) -> AdmittedNetwork:
    """Check that a server computes what the device computes, and measure the server and the link.

    Raises:
        NotExact: If the server's fingerprint or answer differs by more than is allowed.
        ProgramNotFound: If the server lacks the program and must not be sent it.
        UpriverError: If the server cannot be used now.
    """
    process, program = client.process(), captured.program
    info = client.info(process=process)
    verifier = ServerVerifier(device=program.device, agreement=agreement)
    verifier.check_fingerprint(client.url, info)
    _bring(client, captured, push=push)
    with uplink.probing(time.monotonic()):
        probe(client, link, small=ROUND_TRIPS, large=PROBES)
    narrowest = min(range(program.num_stages), key=lambda each: (crossing_bytes(program, each), -each))
    with uplink.in_use():
        whole = canary(client, captured, 0, verifier, process=process)
        again = [canary(client, captured, narrowest, verifier, process=process) for _ in range(CANARIES)]
    agreement.prove()
    handling = handling_of(program, narrowest, again, link)
    key, seen = profile_key("", program, client, info), [each.timings for each in (whole, *again)]
    before, today = _kept(key, program), _at_best(program, seen)
    known = bool(before) and sum(before) / UNCHANGED <= sum(today) <= sum(before) * UNCHANGED
    measured, later = ((), False) if known else _measured(client, program)
    load = client.load(process=process)  # the same process to the end, even after failures in between
    seconds = tuple(each / load.k for each in measured) or today
    if known or (later and sum(before) < sum(today)):  # a first run takes longer than later ones
        seconds = before or today
    costs = CutCosts(program=program, device_s=device_s, server_s=seconds, handling=handling, process=process)
    provisional = not known and (later or load.machine >= BUSY)
    if measured and not provisional:
        save_profile(key, costs.profile, costs.cluster(ANY_TIME))
    return AdmittedNetwork(costs=costs, provisional=provisional, cuts=(0, narrowest), load=load)


def _bring(client: ServerClient, captured: CapturedModel, *, push: bool) -> None:
    if push:
        bring(client, captured.program)
    elif not client.has_program(captured.program.digest):
        lacks = f"{client.url} has not the program {captured.program.digest}"
        raise ProgramNotFound(
            f"{lacks}; let it be sent (without push=False or --no-push){_push_command(captured)}"
        )


def _push_command(captured: CapturedModel) -> str:
    """Return the command that puts the program into a store; empty where no command makes it."""
    program = captured.program
    if captured.granularity == "end":
        return ""
    options = f"--granularity {captured.granularity} --micro-batch {program.micro_batch}"
    if captured.autocast is not None:
        options += f" --autocast {str(captured.autocast).removeprefix('torch.')}"
    if len(captured.example.tensors) == 1 and len(sample := captured.example.tensors[0].shape[1:]):
        shape = ",".join(map(str, sample))
        options += f" (and --input-shape {shape} where MODEL comes without an example)"
    return f", or put it into a store of the server's: upriver push MODEL STORE {options}"


def probe(client: ServerClient, link: LinkEstimator, *, small: int, large: int, every_s: float = 5.0) -> None:
    """Send meaningless bytes, and have the link record how long they took.

    A few bytes precede each large transfer and do not count. They use up what a link that was idle carries at
    once, and open TCP's window. A large transfer is small itself, and its rate would be another one.

    Args:
        link: The link to the server, which says how large the large transfers are.
        small: Number of one-byte transfers.
        large: Number of large transfers.
        every_s: Interval between probes.

    Raises:
        UpriverError: If the server does not answer.
    """
    for size in [1] * small + [0] * large:
        if not size:
            client.probe_upload(LEAST_PROBE)
        found = client.probe_upload(size or link.probe_bytes(every_s))
        link.add_transfer(found.num_bytes, found.first_byte_s + found.seconds)


def canary(
    client: ServerClient, captured: CapturedModel, cut: int, verifier: ServerVerifier, *, process: str
) -> ExchangeResult:
    """Have a server compute the example from a cut on, and compare the answer.

    Raises:
        NotExact: If the server's answer differs.
        UpriverError: If the server cannot be asked now.
    """
    crossing = captured.program.run(captured.example.tensors, 0, cut)
    finished = Exchange(client, captured, cut, crossing, process=process).finish(MEASURE_S)
    verifier.check_canary(client, captured.reference, finished.tensors, f"the example at cut {cut}")
    return finished


def handling_of(
    program: Program, cut: int, seen: Sequence[ExchangeResult], link: LinkEstimator
) -> HandlingTimes:
    """Return what requests cost apart from stages and link, from some requests with few crossing bytes.

    The quickest of them counts. The device measures the seconds per byte for both sides. A request over a
    thin link does not show them, and a server is hardly slower than the device.
    """
    encode, decode = packing()
    crossing, bandwidth = crossing_bytes(program, cut), link.bandwidth()
    on_link_s = (link.latency_s or 0.0) + (crossing / bandwidth if bandwidth is not None else 0.0)
    return HandlingTimes(
        front_s=max(0.0, min(each.up_s for each in seen) - on_link_s - (encode + decode) * crossing),
        beside_s=min(each.beside_s for each in seen),
        encode_s_per_byte=encode,
        decode_s_per_byte=decode,
        told_bytes=max(
            0, min(each.down_bytes for each in seen) - crossing_bytes(program, program.num_stages)
        ),
    )


def _kept(key: ProfileKey, program: Program) -> tuple[float, ...]:
    """Return the seconds of each stage that an earlier process measured; empty where there are none."""
    kept = load_profile(key, stages=[stage.name for stage in program.stages], input_stages=())
    return () if kept is None else tuple(sum(stage.seconds[Tier.STORAGE]) for stage in kept.profile.stages)


def _measured(client: ServerClient, program: Program) -> tuple[tuple[float, ...], bool]:
    """Return the seconds of each stage as the server measures them now, and whether it may measure later.

    The seconds are empty where the server does not measure.
    """
    positions = range(1, program.num_stages + 1)
    try:
        found = client.profile([program.digest], repeats=REPEATS)
        lines = {cost.position: cost.seconds for cost in found.stages}
        return tuple(lines[at][0] + program.micro_batch * lines[at][1] for at in positions), False
    except (UpriverError, KeyError) as error:
        log.info("%s does not measure stages now, its first answers have to do: %s", client.url, error)
        return (), isinstance(error, Overloaded)


def _at_best(program: Program, seen: Sequence[Timings]) -> tuple[float, ...]:
    """Return the seconds of each stage on an otherwise idle server, from some answers."""
    return tuple(
        min((each.stages[at] / each.k for each in seen if at in each.stages), default=0.0)
        for at in range(1, program.num_stages + 1)
    )
