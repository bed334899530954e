"""The command line: one module per command."""

from __future__ import annotations

from collections.abc import Sequence

INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; see :func:`upriver.cli.app.main`. Ctrl-C may arrive while its modules are imported."""
    try:
        from upriver.cli.app import main as run
    except KeyboardInterrupt:
        return INTERRUPTED
    return run(argv)
