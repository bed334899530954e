"""Write the page and the plots about a near-data server, claim by claim."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.measuring import machine, versions
from benchmarks.harness.memory_group import EVERY_S, can_limit
from benchmarks.harness.photographs import JPEG_BYTES, PIXELS
from benchmarks.harness.records import Records
from benchmarks.server.claim import Claim, Rows
from upriver.report.figure import new_figure

SIZE = (8.0, 4.5)
"""Size of a plot, in inches."""


def write(claims: Sequence[Claim], records: Records, folder: Path, name: str) -> str:
    """Write the page and its plots from the existing records. Return the text of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    text = page(claims, records, name)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    for claim in claims:
        rows = Rows(claim, records)
        if rows.complete:
            draw(claim, rows, folder / picture(claim, name))
    return text


def page(claims: Sequence[Claim], records: Records, name: str) -> str:
    """Return the text of the page."""
    found = {claim: Rows(claim, records) for claim in claims}
    sections = [section(claim, rows, name) for claim, rows in found.items()]
    every = [row for rows in found.values() for row in rows.rows]
    return TEMPLATE.format(
        verdicts="\n".join(f"- {claim.title}: {short(claim, rows)}" for claim, rows in found.items()),
        sections="\n".join(sections),
        every=f"{1e3 * EVERY_S:g} ms",
        pixels="{} x {}".format(*PIXELS),
        kilobytes=f"{JPEG_BYTES // 1000} kB",
        groups="can" if can_limit() else "cannot",
        commits=", ".join(sorted({row["commit"] for row in every})) or "-",
        machine=machine(),
        versions=versions("torch", "torchvision", "pillow", "uvicorn", "psutil"),
    )


def short(claim: Claim, rows: Rows) -> str:
    """Return the verdict in one word, or the progress."""
    if not rows.complete:
        return f"not finished, {rows.state}"
    word = {True: "met", False: "missed", None: "not judged"}[claim.verdict(rows).met]
    return f"**{word}**" + (f" so far, {rows.state}" if rows.missing else "")


def section(claim: Claim, rows: Rows, name: str) -> str:
    """Return a claim, whether it holds, the figures, and how they were measured."""
    notes = "\n".join(f"- {note}" for note in (*claim.notes(), f"{claim.repeats} repeats of each, in turns."))
    head = f"## {claim.title}\n\n**Claim.** {claim.says}\n"
    if not rows.complete:
        return f"{head}\nNot finished: {rows.state}.\n\n{notes}\n"
    so_far = f" ({rows.state})" if rows.missing else ""
    shown = f"![{claim.title}]({picture(claim, name)})"
    return f"{head}\n**{claim.verdict(rows)}**{so_far}\n\n{claim.tables(rows)}\n{shown}\n\n{notes}\n"


def picture(claim: Claim, name: str) -> str:
    """Return the file name of a claim's plot."""
    return f"{name}_{claim.name}.png"


def draw(claim: Claim, rows: Rows, path: Path) -> None:
    """Draw a claim's plot."""
    figure = new_figure(*SIZE, claim.title)
    claim.draw(rows, figure)
    figure.savefig(path)


TEMPLATE = """# What a near-data server shows under many tenants

{verdicts}

{sections}
## How all of it was measured

- A real server from a TOML file, with tenants and tokens, on one core: front and workers, each worker with
  one thread. The load comes over HTTP on the loopback device, by the package's own client, from another
  process on another core. Nothing in between is shaped.
- Photographs of {pixels} pixels and about {kilobytes} as JPEG files in a `file://` store; random weights,
  which compute as fast as others. Networks are frozen as in `split_overhead` unless a name says up to
  where.
- Every answer is checked: a digest of all its tensors against that of the same samples computed apart, by the
  engine in another process, before the server was asked. Answers whose low bits are left to the server are
  held to values within the tolerance of `exact="numeric"`. Wrong ones are counted as such above.
- Repeats of what is compared take turns; figures are medians (lowest to highest). Servers are warm: programs
  were read and every tenant was answered once, unless it is said otherwise.
- Memory: the proportional set size of each process, summed up, looked at every {every} unless it is said
  otherwise, by a process on the core of the load, of which that takes half at most. Control groups with a
  limit on memory {groups} be made on the machine of this report.
- Commits {commits}; {machine}.
  {versions}.

## What it does not show

Accelerators; several machines; stores over a network; TLS. On a machine with two cores the server has one, so
its front, its workers and what the kernel does for them share it.

Run it again: `python -m benchmarks.server`; it goes on from the records, which are of the code as it is.
`--only memory fairness` takes some claims, `--minutes 20` begins nothing more after 20 minutes.
"""
