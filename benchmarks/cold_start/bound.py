"""Compute the least time of a first answer from the times of each stage alone.

Symbols, in seconds
    F    from a request to its first byte: a read of one byte through a connection that has to be
         opened first, as a fresh process has none
    D    of the link, for the bytes that the answer needs: up to the end of the last weight, in execution
         order, that the call reads. On a shaped link: those bytes over its payload rate (TCP's and
         Ethernet's headers off), or over its measured rate, if that is more. Without a shape: a download of
         the whole object into this process's memory by ranged reads, with nothing else done, less F, in
         proportion
    L    of a core: CRC32C and one copy into fresh memory, of bytes that this process has already
    E    the first call of a model whose weights have all arrived, in a fresh process

Each is measured in turns with the runs it is compared with, on the same cores. A loader is judged by the
bound of each turn over its own run in it. The report gives the median of the repeats, as for the runs: the
shortest would charge a loader for chance, which affects all alike.

    one core     bound = F + max(d + L + E, D + l + e)
    more         bound = F + max(d + L + e, d + l1 + E, D + l + e)

That is F + max(D, L + E), or F + max(D, L, E), with the parts that cannot overlap: nothing can be loaded or
executed before the first group has arrived, nor can the last group be before its arrival. Groups count as
single weights, the smallest unit to wait for: d is the first one's part of D, l1 and l are the first one's
and the last one's of L, by bytes. e is E from the operator on that first reads the last weight, measured by a
later call under the barrier. So e is rather too small, and the bound too.

The bound leaves out the core time of receiving on a shaped link, constructing the model, and the manifest.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.netns import PAYLOAD_SHARE

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The times of the stages, as above.

    Attributes:
        first_byte_s: F.
        download_s: D.
        load_s: L.
        execute_s: E.
        first_download_s: d.
        first_load_s: l1.
        last_load_s: l.
        last_execute_s: e.
    """

    first_byte_s: float
    download_s: float
    load_s: float
    execute_s: float
    first_download_s: float
    first_load_s: float
    last_load_s: float
    last_execute_s: float

    @classmethod
    def of(cls, rows: Iterable[Row], rate: float | None) -> Parts:
        """Return the median of each time. Runs are reported by their medians too, so chance affects both.

        Args:
            rows: Results of ``job.parts``, all of one model and link. ``carried`` is the measured rate
                of the link, in payload bytes per second.
            rate: Rate of the link in bytes per second on the wire; None for no shape.

        Raises:
            ValueError: If there are no rows.
        """
        rows = list(rows)
        if not rows:
            raise ValueError("a bound takes at least one measurement of its parts")
        sizes = rows[0]

        def usual(field: str) -> float:
            return statistics.median(row[field] for row in rows)

        needed = sizes["needed_bytes"]
        if rate is None:
            per_byte = usual("download_s") / sizes["object_bytes"]
        else:
            per_byte = 1 / max(rate * PAYLOAD_SHARE, *(row.get("carried") or 0.0 for row in rows))
        load_s = usual("load_s")
        return cls(
            first_byte_s=usual("first_byte_s"),
            download_s=needed * per_byte,
            load_s=load_s,
            execute_s=usual("execute_s"),
            first_download_s=sizes["first_bytes"] * per_byte,
            first_load_s=load_s * sizes["first_bytes"] / needed,
            last_load_s=load_s * sizes["last_bytes"] / needed,
            last_execute_s=usual("last_execute_s"),
        )

    def bound(self, *, one_core: bool) -> float:
        """Return the least time, in seconds."""
        busy = self.load_s + self.execute_s
        ends = [self.download_s + self.last_load_s + self.last_execute_s]
        if one_core:
            ends.append(self.first_download_s + busy)
        else:
            ends.append(self.first_download_s + self.load_s + self.last_execute_s)
            ends.append(self.first_download_s + self.first_load_s + self.execute_s)
        return self.first_byte_s + max(ends)
