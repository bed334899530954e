"""Define providers that start workers by number, and the fleets of workers that they start.

A list of addresses cannot grow. A provider can start more workers once the throughput of one is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True, slots=True)
class Serves:
    """The work that workers are to serve: stages of datasets in stores, or a user's own code.

    Attributes:
        allow: Names that they may run, as ``upriver worker --allow``.
        stores: URIs of stores, by name.
    """

    allow: Sequence[str] = ()
    stores: Mapping[str, str] = field(default_factory=dict)


class Fleet(Protocol):
    """Workers that were started for one loader; they end with it, however it ends."""

    @property
    def token(self) -> str | None:
        """Token that they require with every request; None if they require none."""

    @property
    def processes(self) -> int:
        """Number of each worker's processes that make samples."""

    def room(self) -> int:
        """Return how many more workers could be started now."""

    def start(self, count: int) -> Sequence[str]:
        """Start more workers, and wait until they accept requests. Any thread may call this.

        Returns:
            Their addresses; fewer than ``count`` if not all could be started.

        Raises:
            ServerUnavailable: If none could be started, or the fleet was stopped.
        """

    def lost(self) -> Sequence[str]:
        """Return the addresses of workers that ended by themselves; each is returned once."""

    def stop(self) -> None:
        """Stop all workers, including those that are starting. Idempotent."""


@runtime_checkable
class Provider(Protocol):
    """Starts workers for a loader that gets it as an argument."""

    @property
    def number(self) -> int | None:
        """Number of workers to start; None for as many as are needed."""

    @property
    def most(self) -> int:
        """Largest number of workers."""

    def open(self, what: Serves) -> Fleet:
        """Return an empty fleet for one loader.

        Args:
            what: The work that its workers are to serve.

        Raises:
            ConfigError: If there is no machine to start them on.
        """
