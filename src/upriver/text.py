"""Plain text for people: numbers with units, and columns that line up.

Lies below the nouns, so that a plan can print itself in any layer.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_BIT_UNITS = ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+) ?([kKMGT]?)(bit|B)(?:/s)?", re.ASCII)
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def bytes_text(num_bytes: float) -> str:
    """Bytes with a decimal unit and three digits, as network and disk sizes are quoted: ``36.9 kB``."""
    value, unit = float(num_bytes), 0
    while value >= 999.5 and unit < len(_BYTE_UNITS) - 1:
        value, unit = value / 1000.0, unit + 1
    return f"{value:.0f} {_BYTE_UNITS[unit]}" if unit == 0 else f"{value:.3g} {_BYTE_UNITS[unit]}"


def rate_text(bytes_per_s: float) -> str:
    """A rate in bits, as links are sold, with three digits: ``100 Mbit/s``."""
    value, unit = 8.0 * bytes_per_s, 0
    while value >= 999.5 and unit < len(_BIT_UNITS) - 1:
        value, unit = value / 1000.0, unit + 1
    return f"{value:.3g} {_BIT_UNITS[unit]}"


def parse_rate(text: str) -> float:
    """``50Mbit``, ``1.5 Gbit/s`` (bits) or ``10MB`` (bytes) as bytes per second; a prefix is decimal.

    Raises:
        ValueError: If it is anything else, or not above 0; the message says what was allowed. ``Mb`` is
            refused, since people mean either by it.
    """
    match = _RATE.fullmatch(text.strip())
    rate = 0.0
    if match is not None:
        number, prefix, unit = match.groups()
        rate = float(number) * _PREFIXES[prefix] / (8.0 if unit == "bit" else 1.0)
    if not 0 < rate < math.inf:
        raise ValueError(
            f"a rate is a number above 0 with bit or B as in 50Mbit, 1.5Gbit or 10MB, got {text!r}"
        )
    return rate


def seconds_text(seconds: float) -> str:
    """Seconds with three significant digits and no exponent: ``0.0123``, ``4.56``, ``7890``."""
    if seconds < 0.0005:
        return "0" if seconds == 0 else "<0.001"
    decimals = 3 if seconds < 1 else 2 if seconds < 10 else 1 if seconds < 100 else 0
    return f"{seconds:.{decimals}f}"


def shortened(text: str, width: int) -> str:
    """``text`` in at most ``width`` characters; what is left out in front shows as two dots."""
    return text if len(text) <= width else ".." + text[len(text) - width + 2 :]


def printable(text: str, at_most: int) -> str:
    """``text`` without what a terminal would obey, in at most ``at_most`` characters."""
    safe = "".join(char if char.isprintable() else "?" for char in text[:at_most])
    return safe if len(text) <= at_most else safe[:-1] + "…"


def said(text: str, at_most: int = 500) -> str:
    """What another machine said, as one line that fits into a message: 500 characters are some five lines."""
    return printable(" ".join(text[: 4 * at_most].split()), at_most)


def error_text(error: BaseException, at_most: int = 500) -> str:
    """An error of anybody's code as one line: its type, and what it says if it can say it."""
    try:
        text = str(error)
    except Exception:
        text = "(what it says cannot be read)"
    kind = type(error).__name__
    return said(f"{kind}: {text}" if text else kind, at_most)


def last_lines(text: str, at_most: int, line_chars: int = 300) -> str:
    """The last lines of a traceback or a log in at most ``at_most`` characters, safe to print.

    Args:
        text: Where something is left out of it, dots say so.
        at_most: Of all of it.
        line_chars: Of each line.
    """
    kept, left = list[str](), at_most - 2
    for line in reversed(text.rstrip().split("\n")):
        line = printable(line.replace("\t", "    "), line_chars)
        left -= len(line) + 1
        if left < 0:
            kept.append("…")
            break
        kept.append(line)
    return "\n".join(reversed(kept))


def wrapped(text: str) -> str:
    """``text`` in lines of at most 110 characters, all but the first indented."""
    return textwrap.fill(text, width=110, subsequent_indent="  ", break_long_words=False)


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: frozenset[int]) -> str:
    """Columns two spaces apart, right-aligned but for those whose index is in ``left``."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return "\n".join((line(header), line(["-" * width for width in widths]), *map(line, rows)))
