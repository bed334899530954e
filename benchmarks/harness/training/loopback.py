"""Run both hosts on the loopback device, on a machine without network namespaces."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

from benchmarks.harness.hosts import Side, sigterm_raises, undisturbed
from benchmarks.harness.testbed import Rates, Testbed, TestbedError


class Loopback(Testbed):
    """A storage side and a compute side without a link between them: nothing is shaped or counted."""

    addresses: Mapping[Side, str] = {"storage": "127.0.0.1", "compute": "127.0.0.1"}

    def __init__(self, rate: float | None = None) -> None:
        super().__init__(check=False)
        self._names = {}
        self._ports = _free_ports()
        self.set_rate(rate)

    def __enter__(self) -> Loopback:
        with ExitStack() as stack:
            stack.enter_context(sigterm_raises())
            stack.callback(self.end_all)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        with undisturbed():
            self._stack.close()

    def set_rate(self, rate: float | None, *, burst: int | None = None) -> None:
        """Refuse any rate.

        Raises:
            TestbedError: If a rate is given.
        """
        if rate is not None:
            raise TestbedError("the loopback device has no rate to set: network namespaces are needed")

    def check(self) -> Rates:
        """Return no rates, as nothing is shaped."""
        return Rates(from_storage=0.0, from_compute=0.0)

    def bytes_carried(self) -> Rates:
        """Return no bytes: the device carries others' too."""
        return Rates(from_storage=0.0, from_compute=0.0)


def _free_ports() -> Iterator[int]:
    while True:
        with socket.create_server(("127.0.0.1", 0)) as found:
            port: int = found.getsockname()[1]
        yield port
