"""What the demo is asked for, and who is told how it goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from upriver.demo.data import SCENES
from upriver.errors import ConfigError
from upriver.types import require_finite


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    """What the demo runs.

    Attributes:
        link_mbit: Rate of the emulated link. A CPU core is about a hundred times slower than a T4, so
            20 Mbit/s stand to it as 1 to 2 Gbit/s to a T4.
        weights: Safetensors file for the network; see :func:`upriver.demo.model.build_model`.
        cache: Where the images are kept between runs; the user's cache by default.
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
        """Rate of the emulated link in bytes."""
        return self.link_mbit * 1e6 / 8


class Watcher(Protocol):
    """Is told what happens."""

    def say(self, text: str) -> None:
        """A line for the user."""

    def advance(self, what: str, done: int, total: int) -> None:
        """How much of a piece of work is done."""
