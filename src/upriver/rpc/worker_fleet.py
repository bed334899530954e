"""Workers that can be had without an address: what starts them, and those that were started.

A list of addresses cannot grow. Whoever is asked for workers by number can be asked for more, once it is
known what one of them delivers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True, slots=True)
class Serves:
    """What workers are to serve: stages of datasets in stores, or a user's own code.

    Attributes:
        allow: Names of what they may run, as an ``upriver worker`` is told.
        stores: Names to URIs.
    """

    allow: Sequence[str] = ()
    stores: Mapping[str, str] = field(default_factory=dict)


class Fleet(Protocol):
    """Workers that were started for one loader; they end with it, however it ends."""

    @property
    def token(self) -> str | None:
        """What they ask for with every request; None where they ask for nothing."""

    @property
    def processes(self) -> int:
        """Processes of each that make samples."""

    def room(self) -> int:
        """How many more could be started now."""

    def start(self, count: int) -> Sequence[str]:
        """Start some more, and wait until they take requests. Any thread may call this.

        Returns:
            Their addresses; fewer where not all could be had.

        Raises:
            ServerUnavailable: If none could be had, or the fleet was stopped.
        """

    def lost(self) -> Sequence[str]:
        """Addresses of those that have ended by themselves; each is told once."""

    def stop(self) -> None:
        """End all, also those that are being started. May be called again."""


@runtime_checkable
class Provider(Protocol):
    """What can start workers, as it is handed to a loader."""

    @property
    def number(self) -> int | None:
        """How many there are to be; None for as many as are needed."""

    @property
    def most(self) -> int:
        """How many there are at most."""

    def open(self, what: Serves) -> Fleet:
        """A fleet of none yet, for one loader.

        Args:
            what: Its workers are to serve.

        Raises:
            ConfigError: If there is no machine to start them on.
        """
