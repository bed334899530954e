"""Format plain text for people: numbers with units, and aligned columns.

The module lies below the types, so that a plan can print itself in any layer.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_BIT_UNITS = ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+) ?([kKMGT]?)(bit|B)(?:/s)?", re.ASCII)
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?(?:([kMGT]?)B|([KMGT])iB)", re.ASCII)
_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def bytes_text(num_bytes: float) -> str:
    """Format bytes with a decimal unit and three digits, as for networks and disks: ``36.9 kB``."""
    value, unit = float(num_bytes), 0
    while value >= 999.5 and unit < len(_BYTE_UNITS) - 1:
        value, unit = value / 1000.0, unit + 1
    return f"{value:.0f} {_BYTE_UNITS[unit]}" if unit == 0 else f"{value:.3g} {_BYTE_UNITS[unit]}"


def parse_bytes(text: str) -> int:
    """Parse ``4 GiB`` (binary) or ``500 MB`` (decimal) to bytes.

    Raises:
        ValueError: If the text is anything else; the message names the allowed forms.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"a size is a number with a unit as in 512 MiB or 4 GB, got {printable(text, 40)!r}")
    number, decimal, binary = match.groups()
    return int(float(number) * (_BINARY[binary] if binary else _DECIMAL[decimal]))


def rate_text(bytes_per_s: float) -> str:
    """Format a rate in bits with three digits, as for links: ``100 Mbit/s``."""
    value, unit = 8.0 * bytes_per_s, 0
    while value >= 999.5 and unit < len(_BIT_UNITS) - 1:
        value, unit = value / 1000.0, unit + 1
    return f"{value:.3g} {_BIT_UNITS[unit]}"


def parse_rate(text: str) -> float:
    """Parse ``50Mbit``, ``1.5 Gbit/s`` (bits) or ``10MB`` (bytes) to bytes per second. Prefixes are decimal.

    Raises:
        ValueError: If the text is anything else, or the rate not above 0; the message names the allowed
            forms. ``Mb`` is refused, since people use it for either unit.
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
    """Format seconds with three significant digits and no exponent: ``0.0123``, ``4.56``, ``7890``."""
    if seconds < 0.0005:
        return "0" if seconds == 0 else "<0.001"
    decimals = 3 if seconds < 1 else 2 if seconds < 10 else 1 if seconds < 100 else 0
    return f"{seconds:.{decimals}f}"


def shortened(text: str, width: int) -> str:
    """Shorten ``text`` to at most ``width`` characters, with two dots for its omitted start."""
    return text if len(text) <= width else ".." + text[len(text) - width + 2 :]


def printable(text: str, at_most: int) -> str:
    """Return ``text`` without terminal control characters, in at most ``at_most`` characters."""
    safe = "".join(char if char.isprintable() else "?" for char in text[:at_most])
    return safe if len(text) <= at_most else safe[:-1] + "…"


def said(text: str, at_most: int = 500) -> str:
    """Return another machine's text as one line for a message. 500 characters are some five lines."""
    return printable(" ".join(text[: 4 * at_most].split()), at_most)


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three known names that are most like a mistyped one, the nearest first."""
    import difflib  # only errors need it

    return difflib.get_close_matches(name, list(known))


def error_text(error: BaseException, at_most: int = 500) -> str:
    """Return any error as one line: its type, and its text if that can be read."""
    try:
        text = str(error)
    except Exception:
        text = "(what it says cannot be read)"
    kind = type(error).__name__
    return said(f"{kind}: {text}" if text else kind, at_most)


def last_lines(text: str, at_most: int, line_chars: int = 300) -> str:
    """Return the last lines of a traceback or a log in at most ``at_most`` characters, safe to print.

    Each line has at most ``line_chars`` characters. Dots mark an omission.
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
    """Wrap ``text`` to lines of at most 110 characters, all but the first indented."""
    return textwrap.fill(text, width=110, subsequent_indent="  ", break_long_words=False)


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: frozenset[int]) -> str:
    """Align columns two spaces apart, to the right except for the indices in ``left``."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return "\n".join((line(header), line(["-" * width for width in widths]), *map(line, rows)))
