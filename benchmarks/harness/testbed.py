"""Run two hosts on one machine: real processes in two network namespaces, with a shaped link between them.

A benchmark makes a `Testbed` and starts its processes in it::

    with Testbed(rate=2.5e6) as bed:                         # 20 Mbit/s, in bytes per second
        server = bed.run_server({"default": "file:///data"})
        objects = bed.run_objects(Path("/data"))             # the same store, for the other side
        done = bed.run("compute", [sys.executable, "train.py", server.url, objects.uri], timeout_s=600)

Everything ends and is removed with the block, however the block ends. The next benchmark removes the
leftovers of a killed one. ``python -m benchmarks.harness.testbed --mbit 20`` makes a testbed, measures its
link and prints the rates; ``--sweep`` only removes leftovers. Needs root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.harness import netns
from benchmarks.harness.children import module_command, paths
from benchmarks.harness.hosts import Cores, Hosts, Side, last_lines, sigterm_raises, undisturbed, words
from benchmarks.harness.netns import FRAME_BYTES, PAYLOAD_SHARE, TestbedError, Unavailable

__all__ = ["Rates", "Service", "Side", "Testbed", "TestbedError", "Unavailable", "burst_for"]

ADDRESSES: Mapping[Side, str] = {"storage": "192.0.2.1", "compute": "192.0.2.2"}
"""Addresses from the network reserved for documentation: no real host has them. Every testbed has the same.
"""

TOLERANCE = 0.1
"""Largest relative error of a link's rate: the effect of a busy machine on one second's transfer."""

CHECK_S = 1.0
CHECK_BYTES = 64 << 20
"""Most bytes of a check. A check moves what the link carries in a second, each way."""

READY_TIMEOUT_S = 120.0
FIRST_PORT = 7000
LOG_BYTES = 1 << 20

_here = Path(__file__).resolve().parent
_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Bytes, or bytes per second, from one side to the other."""

    from_storage: float
    from_compute: float

    def __sub__(self, other: Rates) -> Rates:
        """Return the bytes since ``other`` was taken."""
        return Rates(
            from_storage=self.from_storage - other.from_storage,
            from_compute=self.from_compute - other.from_compute,
        )


@dataclass(frozen=True, kw_only=True)
class Service:
    """A process that listens in one of the namespaces.

    Attributes:
        url: URL for the other side.
        process: Its first process.
        log: Its output; `said` reads it.
        uri: Of an object server: the store, for the other side.
        options: Of an object server: the options with which that store is opened.
    """

    url: str
    process: subprocess.Popen[Any]
    log: IO[bytes]
    uri: str = ""
    options: Mapping[str, str] | None = None

    def said(self) -> str:
        """Return its output so far. The output exists until the testbed ends."""
        return _content(self.log)


class Testbed(Hosts):
    """A storage side and a compute side with a link; `Hosts` starts and ends processes.

    Args:
        rate: Rate of the link, each way, in bytes per second on the wire, headers included; a TCP stream's
            payload is 95.6 % of that. None leaves it unshaped.
        burst: Bytes that may leave at once after a pause; see `burst_for`.
        cores: The core that each side's processes are pinned to; the first and the last one of this process's
            otherwise (0 and 1 on a machine with two).
        check: Whether to measure the link before it is used.

    Attributes:
        addresses: Addresses of both sides.
        token: Token that the servers started here require; in the environment of every process.
        measured: Rate of the link at its last check, in payload bytes per second.

    Raises:
        Unavailable: From ``with``: If the user is not root, a program is missing, or the kernel refuses.
        TestbedError: From ``with``: If the link does not have the requested rate, twice running.
    """

    addresses: Mapping[Side, str] = ADDRESSES

    def __init__(
        self,
        rate: float | None = None,
        *,
        burst: int | None = None,
        cores: Mapping[Side, int] | None = None,
        check: bool = True,
    ) -> None:
        allowed = sorted(os.sched_getaffinity(0))
        number = next(_numbers)
        super().__init__(
            {side: netns.name_of(number, side) for side in ADDRESSES},
            cores or {"storage": allowed[0], "compute": allowed[-1]},
            secrets.token_hex(16),
        )
        self.rate = _checked_rate(rate)
        self.measured: Rates | None = None
        self._burst = _checked_burst(burst)
        self._largest_burst = 0
        self._check = check
        self._ports: Iterator[int] = itertools.count(FIRST_PORT)

    def __enter__(self) -> Testbed:
        netns.require_rights()
        netns.sweep()
        with ExitStack() as stack:
            stack.enter_context(sigterm_raises())
            stack.callback(netns.remove, self.namespaces)
            stack.callback(self.end_all)
            netns.create({self._names[side]: address for side, address in ADDRESSES.items()})
            self.set_rate(self.rate, burst=self._burst)
            if self._check:
                self.check()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        with undisturbed():
            self._stack.close()

    @property
    def namespaces(self) -> list[str]:
        """Return the names of the two network namespaces, for ``ip netns``."""
        return list(self._names.values())

    # ----------------------------------------------------------------------------------------- the link

    def set_rate(self, rate: float | None, *, burst: int | None = None) -> None:
        """Change the link, both ways, during its use. It is not checked, because others are using it.

        Data queued at the end of the old rate goes on at the new one. A link that was faster keeps its burst,
        as a queued packet may need all of it: a connection opened while packets could be large keeps making
        large ones at any later rate.

        Args:
            rate: In bytes per second on the wire; None for no shape.
            burst: In bytes; see `burst_for`.
        """
        self.rate, self._burst = _checked_rate(rate), _checked_burst(burst)
        segments = netns.segments_for(self._burst_bytes)
        if self.rate is not None:
            self._largest_burst = max(self._largest_burst, self._burst_bytes)
        for name in self.namespaces:
            netns.shape(name, self.rate, burst_bytes=self._largest_burst, segments=segments)

    def check(self) -> Rates:
        """Measure the link with one bounded transfer each way, and once more after a wrong rate.

        Nothing else may use the link meanwhile.

        Returns:
            Payload bytes per second; also kept as ``measured``.

        Raises:
            TestbedError: If it is off by more than a tenth twice running.
        """
        for last in (False, True):
            measured = self.measured = Rates(
                from_storage=self._transfer("storage", "compute"),
                from_compute=self._transfer("compute", "storage"),
            )
            wrong = self._wrong(measured)
            if not wrong:
                break
            if last:
                raise TestbedError(wrong)
        return measured

    def _wrong(self, measured: Rates) -> str:
        """Return how the link differs from the request, or an empty text if it does not."""
        if self.rate is None:
            return ""
        wanted = self.rate * PAYLOAD_SHARE
        both = (measured.from_storage, measured.from_compute)
        if all(abs(rate / wanted - 1) <= TOLERANCE for rate in both):
            return ""
        return (
            f"a link of {_mbit(self.rate)} should carry {_mbit(wanted)} of payload each way; measured: "
            f"{_mbit(both[0])} from storage to compute, {_mbit(both[1])} back. Is the machine busy, or the "
            "rate more than it can move?"
        )

    def bytes_carried(self) -> Rates:
        """Return the bytes that have left each side so far, checks and headers included.

        On links of 25 Mbit/s and less that is every byte on the wire. On faster ones several packets travel
        as one, with one header for all: up to 4 % less is counted than a real wire would carry.
        """
        return Rates(
            from_storage=netns.sent_bytes(self._names["storage"]),
            from_compute=netns.sent_bytes(self._names["compute"]),
        )

    @property
    def _burst_bytes(self) -> int:
        return burst_for(self.rate) if self._burst is None else self._burst

    def _transfer(self, source: Side, target: Side) -> float:
        """Return the payload bytes per second of one TCP stream."""
        payload = CHECK_BYTES if self.rate is None else self.rate * PAYLOAD_SHARE * CHECK_S
        num_bytes = round(
            min(CHECK_BYTES, max(payload, 40 * self._largest_burst))
        )  # a burst is then at most 2.5 % of it
        limit_s = 10.0 if self.rate is None else 5.0 + 3 * num_bytes / self.rate
        receiver = self.popen(target, _probe("receive", ADDRESSES[target], limit_s), stdout=subprocess.PIPE)
        sender = None
        try:
            port = receiver.stdout.readline().decode().strip() if receiver.stdout else ""
            sender = self.popen(source, _probe("send", ADDRESSES[target], port, num_bytes, limit_s))
            answer, _ = receiver.communicate(timeout=2 * limit_s)
            found = json.loads(answer)
        except (ValueError, subprocess.TimeoutExpired):
            raise TestbedError(f"no transfer from {source} to {target} came about") from None
        finally:
            for process in (receiver, sender):
                if process is not None:
                    self.end(process)
        return float(found["num_bytes"] / max(found["seconds"], 1e-9))

    # ------------------------------------------------------------------------------------- the processes

    def run_server(
        self,
        stores: Mapping[str, str],
        *options: object,
        side: Side = "storage",
        core: Cores = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = READY_TIMEOUT_S,
    ) -> Service:
        """Start ``upriver serve`` and wait until the other side sees it ready.

        Args:
            stores: Names to URIs, as this side reaches them.
            options: More of its command line, such as ``"--threads", 1``.
            side: Side of the testbed that it runs on.
            core: As for `popen`.
            env: As for `popen`.
            timeout_s: Most seconds until it is ready.
        """
        named = [f"--store={name}={uri}" for name, uri in stores.items()]
        serve = [sys.executable, "-m", "upriver", "serve", *named, *options]
        found = {**paths(), **(env or {})}
        return self._serve(side, serve, "/readyz", core=core, env=found, timeout_s=timeout_s)

    def run_objects(
        self,
        directory: Path,
        *,
        side: Side = "storage",
        core: Cores = None,
        timeout_s: float = READY_TIMEOUT_S,
    ) -> Service:
        """Serve a directory as an S3 bucket, for the side without access to its files.

        A server on the same side may use ``file://`` for the same directory: names and ETags are the same.
        """
        serve = module_command("harness.object_server", directory, "--bucket", "store")
        found = self._serve(side, serve, "/", core=core, env=paths(), timeout_s=timeout_s)
        options = {"endpoint": found.url, "region": "none", "anonymous": "true"}
        return Service(url=found.url, process=found.process, log=found.log, uri="s3://store", options=options)

    def _serve(
        self,
        side: Side,
        argv: Sequence[object],
        path: str,
        *,
        core: Cores,
        env: Mapping[str, str] | None,
        timeout_s: float,
    ) -> Service:
        port = next(self._ports)
        url = f"http://{self.addresses[side]}:{port}"
        log = self._stack.enter_context(_nameless())
        bound = [*argv, "--host", self.addresses[side], "--port", port]
        process = self.popen(side, bound, core=core, env=env, stdout=log, stderr=log)
        other: Side = "compute" if side == "storage" else "storage"
        asking = self.popen(other, _probe("ready", url + path, timeout_s))
        try:
            while asking.poll() is None and process.poll() is None:
                time.sleep(0.02)
            if asking.returncode != 0:
                state = "not ready in time" if process.returncode is None else "ended"
                raise TestbedError(f"{words(argv)}: {state}{last_lines(_content(log))}")
        except BaseException:
            self.end(process)
            raise
        finally:
            self.end(asking)
        return Service(url=url, process=process, log=log)


def burst_for(rate: float | None) -> int:
    """Return the burst of a link of this rate: 2 ms, at least 4 KB and at most 256 KB.

    With a smaller burst, late timers cost rate. With a larger one, a small transfer goes faster than the
    link.
    """
    return 1 << 18 if rate is None else int(min(max(0.002 * rate, 1 << 12), 1 << 18))


def _checked_rate(rate: float | None) -> float | None:
    if rate is not None and not 1000 <= rate < 1e12:
        raise TestbedError(f"rate must be None or from 1000 to 1e12 bytes per second, got {rate}")
    return rate


def _checked_burst(burst: int | None) -> int | None:
    if burst is not None and burst < 2 * FRAME_BYTES:
        raise TestbedError(
            f"burst must be None or at least {2 * FRAME_BYTES} bytes (two packets), got {burst}"
        )
    return burst


def _probe(*arguments: object) -> list[object]:
    """Return the command of a short program, started without imports that it does not need."""
    return [sys.executable, "-I", "-S", _here / "probe.py", *arguments]


def _mbit(bytes_per_s: float) -> str:
    return f"{8 * bytes_per_s / 1e6:.4g} Mbit/s"


def _nameless() -> IO[bytes]:
    """Return a file without a name, so that nothing can be left."""
    return tempfile.TemporaryFile()  # the testbed's stack closes it


def _content(log: IO[bytes]) -> str:
    """Return a file from its beginning, at any position of its writers."""
    return os.pread(log.fileno(), LOG_BYTES, 0).decode(errors="replace")


def main() -> None:
    """Make a testbed, print what its link carries, and remove it."""
    parser = argparse.ArgumentParser(description="Make the two namespaces, measure their link, remove them.")
    parser.add_argument("--mbit", type=float, default=None, help="rate of the link; unshaped without")
    parser.add_argument("--sweep", action="store_true", help="only remove what killed benchmarks left behind")
    chosen = parser.parse_args()
    try:
        if chosen.sweep:
            netns.require_rights()
            print("\n".join(netns.sweep()) or "nothing was left behind")
            return
        with Testbed(None if chosen.mbit is None else chosen.mbit * 1e6 / 8) as bed:
            assert bed.measured is not None
            print(
                f"payload: {_mbit(bed.measured.from_storage)} from storage to compute, "
                f"{_mbit(bed.measured.from_compute)} back"
            )
    except TestbedError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
