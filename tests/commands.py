"""Build the commands of ``upriver`` once: ``pytest --fork`` does so, and ``make test`` asks for it.

typer reads the annotations of all commands again for each call, a tenth of a second, and tests call ``main``
hundreds of times in one process. ``make test-full`` calls it as users do.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any


def install() -> None:
    """Let typer keep the commands that it built: nothing about a call is kept in them."""
    main: Any = importlib.import_module("typer.main")
    main.get_command = functools.cache(main.get_command)
