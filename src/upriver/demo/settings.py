"""Define the demo's settings, and the protocol for its progress."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from upriver.demo.data import SCENES
from upriver.errors import ConfigError
from upriver.types import require_finite


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    """Settings of the demo.

    Attributes:
        link_mbit: Rate of the emulated link. A CPU core is about a hundred times slower than a T4. So 20
            Mbit/s are to it as 1 to 2 Gbit/s are to a T4.
        weights: Safetensors file for the network; see :func:`upriver.demo.model.build_model`.
        cache: Folder of the images between runs; the user's cache by default.
    """

    epochs: int = 3
    images: int = 224
    heldout: int = 60
    batch_size: int = 32
    link_mbit: float = 20.0
    seed: int = 0
    weights: Path | None = None
    cache: Path | None = None

    def __post_init__(self) -> None:
        require_finite("link_mbit", self.link_mbit, positive=True)
        scenes = len(SCENES)
        for name, least in (("epochs", 1), ("batch_size", 1), ("images", scenes), ("heldout", scenes)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")

    @property
    def link_bytes_per_s(self) -> float:
        """Rate of the emulated link in bytes per second."""
        return self.link_mbit * 1e6 / 8


class Watcher(Protocol):
    """Receiver of progress messages."""

    def say(self, text: str) -> None:
        """Show a line to the user."""

    def advance(self, what: str, done: int, total: int) -> None:
        """Show the progress of a task."""
