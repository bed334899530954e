"""``upriver train``: fine-tune from a TOML file."""

from __future__ import annotations

from upriver.cli.common import DebugOption, JsonOption


def train(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Fine-tune from a TOML file."""
