"""``upriver demo``: the main job on real photographs, the plain way and the near-data way."""

from __future__ import annotations

from upriver.cli.common import DebugOption, JsonOption


def demo(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Fine-tune over a thin link, the plain way and near the data, and compare."""
