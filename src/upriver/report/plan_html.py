"""Render plans as one self-contained HTML page, without external scripts, fonts or images.

The page's own styles draw bars, and inline SVG draws lines. The page fits a phone: one column, and wide
tables scroll by themselves. Every text from a file or a model is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from upriver.report.choices import DOES_NOT_FIT, choice_text, fastest, marks, table_of, unit_of
from upriver.report.plan_plot import GREYS, TIERS
from upriver.report.sweep import SweepPoint, epoch_text
from upriver.report.sweep_svg import epochs_svg
from upriver.text import bytes_text, rate_text, seconds_text
from upriver.types import CutRow, Plan

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --faint: #8882; --chosen: #1f6f8b33; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 60rem; }
h1 { font-size: 1.4rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: 0; }
dd { margin: 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; width: 100%; }
th, td { padding: .25rem .5rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th.word, td.word { text-align: left; }
tr.chosen { background: var(--chosen); }
tr.misfit { color: #888; }
.key span { display: inline-block; margin-right: 1rem; font-size: .85rem; }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .3em; }
.cut { display: grid; grid-template-columns: 8.5rem 1fr 3.5rem; gap: 0 .5rem; align-items: center;
  font-size: .8rem; padding: .1rem .2rem; border-bottom: 1px solid var(--faint); }
.cut.chosen { background: var(--chosen); }
.cut .name { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.cut .who { grid-column: 2 / 4; font-weight: 600; overflow-wrap: anywhere; }
.cut svg { display: block; width: 100%; height: 1rem; }
.cut .time { text-align: right; }
.why { border-left: .25rem solid var(--line); padding-left: .75rem; margin: 1rem 0; overflow-wrap: anywhere; }
.line { display: block; width: 100%; max-width: 45rem; height: auto; }
"""


def render_html(
    plans: Mapping[str, Plan],
    *,
    title: str,
    facts: Mapping[str, str],
    notes: Iterable[str] = (),
    points: Sequence[SweepPoint] = (),
) -> str:
    """Render the page: the question, each policy's choice and reason, every cut, and a sweep if given.

    Args:
        plans: Plans by policy name, all for the same question, so that they share one table.
        facts: Facts of the question by name: machines, link, samples.
        notes: Notes on the origin of the numbers.
    """
    rows, marked, unit = table_of(plans), marks(plans), unit_of(plans)
    parts = [
        f"<h1>{escape(title)}</h1>",
        _facts(facts),
        *(f"<p>{escape(note)}</p>" for note in notes),
        "<h2>What each policy chose</h2>",
        _choices(plans),
        *([f"<h2>Every cut</h2>{_key(unit)}{_bars(rows, marked)}"] if rows else []),
        "<h2>Why</h2>",
        *(
            f'<p class="why"><strong>{escape(name)}</strong>: {escape(plan.why)}</p>'
            for name, plan in plans.items()
        ),
        *([_sweep(points)] if points else []),
        *([f"<h2>The numbers</h2>{_numbers(rows, marked, unit)}"] if rows else []),
    ]
    return _page(title, "\n".join(parts))


def _page(title: str, body: str) -> str:
    # Forbid all external loads, whatever a name in a file tries.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
{body}
</body>
</html>
"""


def _facts(facts: Mapping[str, str]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f"<dl>{items}</dl>"


def _table(header: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], words: frozenset[int]) -> str:
    """Render a table that scrolls by itself. Each row has a class and its unescaped cells."""

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f'<{tag} class="word">{escape(value)}</{tag}>'
            if i in words
            else f"<{tag}>{escape(value)}</{tag}>"
            for i, value in enumerate(values)
        )

    body = "".join(f'<tr class="{kind}">{cells("td", values)}</tr>' for kind, values in rows)
    head = f"<thead><tr>{cells('th', header)}</tr></thead>"
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'


def _choices(plans: Mapping[str, Plan]) -> str:
    best = fastest(plans.values())
    rows = []
    for name, plan in plans.items():
        cost = plan.predicted
        times = (
            [seconds_text(s) for s in (cost.epoch_s, cost.storage_s, cost.network_s, cost.compute_s)]
            if cost
            else ["-"] * 4
        )
        moved = bytes_text(cost.bytes) if cost else "-"
        kind = "chosen" if plan is best else "misfit" if cost is None else ""
        rows.append((kind, [name, choice_text(plan), *times, moved]))
    unit = unit_of(plans)
    header = ("policy", "cut", f"{unit} s", "storage s", "network s", "compute s", f"bytes of one {unit}")
    return _table(header, rows, frozenset({0, 1}))


def _key(unit: str) -> str:
    colours = [(label, colour) for label, _, colour in TIERS] + [(DOES_NOT_FIT, GREYS[0])]
    spans = "".join(f'<span><i style="background:{colour}"></i>{label}</span>' for label, colour in colours)
    together = "work at once" if unit == "epoch" else "follow each other"
    text = f"Predicted seconds for which each is busy, and at the right the {unit}: the three {together}."
    return f'<p class="key">{spans}<br>{text}</p>'


def _bars(rows: Sequence[CutRow], marked: Mapping[int, Sequence[str]]) -> str:
    longest = max(sum(_seconds(row)) for row in rows)
    return "".join(_bar(row, marked.get(row.cut, ()), longest) for row in rows)


def _bar(row: CutRow, names: Sequence[str], longest: float) -> str:
    colours = [colour for _, _, colour in TIERS] if row.feasible else GREYS
    start, rects = 0.0, []
    for seconds, colour in zip(_seconds(row), colours, strict=True):
        width = 1000 * seconds / longest if longest > 0 else 0.0
        rects.append(f'<rect x="{start:.1f}" y="0" width="{width:.1f}" height="10" fill="{colour}"/>')
        start += width
    label = f"{row.cut} {row.name}"
    told = ", ".join(f"{name} {seconds_text(getattr(row.cost, field))} s" for name, field, _ in TIERS)
    who = f'<span class="who">{escape(", ".join(names))}</span>' if names else ""
    return (
        f'<div class="cut{" chosen" if names else ""}">'
        f'<span class="name" title="{escape(row.why_not or label)}">{escape(label)}</span>'
        f'<svg viewBox="0 0 1000 10" preserveAspectRatio="none" role="img" aria-label="{told}">'
        f"{''.join(rects)}</svg>"
        f'<span class="time">{seconds_text(row.cost.epoch_s)} s</span>{who}</div>\n'
    )


def _seconds(row: CutRow) -> list[float]:
    return [getattr(row.cost, field) for _, field, _ in TIERS]


def _numbers(rows: Sequence[CutRow], marked: Mapping[int, Sequence[str]], unit: str) -> str:
    header = ("cut", "after", "bytes a sample", f"{unit} s", "storage s", "network s", "compute s", "fits")
    lines = [
        (
            "chosen" if row.cut in marked else "" if row.feasible else "misfit",
            [
                str(row.cut),
                row.name,
                bytes_text(row.bytes_per_sample),
                seconds_text(row.cost.epoch_s),
                *map(seconds_text, _seconds(row)),
                row.why_not or "yes",
            ],
        )
        for row in rows
    ]
    return _table(header, lines, frozenset({1, 7}))


def _sweep(points: Sequence[SweepPoint]) -> str:
    names = list(points[0].plans)
    rates = [rate_text(point.bandwidth_bytes_per_s) for point in points]

    def grid(cells: Iterable[Sequence[str]]) -> str:
        lines = [("", [rate, *values]) for rate, values in zip(rates, cells, strict=True)]
        return _table(("bandwidth", *names), lines, frozenset())

    choices = grid([choice_text(point.plans[name]) for name in names] for point in points)
    epochs = grid([epoch_text(point.plans[name]) for name in names] for point in points)
    return (
        f"<h2>Predicted {unit_of(points[0].plans)} over the bandwidth</h2>{epochs_svg(points)}{epochs}"
        f"<h2>Chosen cut over the bandwidth</h2>{choices}"
    )
