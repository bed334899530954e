"""Render ``/ui``, a page that shows the server's present state in a browser, without a script.

The page reloads itself every two seconds. It loads nothing, and its content security policy allows no more
than its inline style. Every text is escaped.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape

from starlette.responses import HTMLResponse, Response

from upriver.server.observability.snapshot import ProgramRow, Snapshot, TenantRow, WorkerRow
from upriver.text import bytes_text, seconds_text

REFRESH_S = 2
"""Seconds between two reloads. Short enough to watch a queue grow; rendering a small page costs the front
little."""

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --bar: #1f6f8b; --part: #1f6f8b66; --alarm: #b3261e; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 60rem; }
h1 { font-size: 1.4rem; margin: 0 0 .5rem; }
h2 { font-size: 1.1rem; margin: 1.5rem 0 .25rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .5rem 0; }
dd { margin: 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; width: 100%; }
th, td { padding: .25rem .5rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th.word, td.word { text-align: left; }
.bar { display: block; width: 100%; height: 1rem; border: 1px solid var(--line); }
.reserved { fill: var(--part); background: var(--part); }
.used { fill: var(--bar); background: var(--bar); }
.key { font-size: .85rem; margin: .25rem 0; }
.key span { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }
.alarm { color: var(--alarm); font-weight: 600; }
.none { color: #888; margin: .25rem 0; }
@media (prefers-color-scheme: dark) { :root { --bar: #6fc3df; --part: #6fc3df66; --alarm: #ff8a80; } }
"""

_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

POLICY = (
    f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""Content security policy: whatever text a name on the page holds, a browser loads, runs and sends nothing
for it."""

_WORDS = frozenset({"tenant", "state", "program", "code"})


def response(snapshot: Snapshot) -> Response:
    """Return the page as a response that browsers must not cache, frame or sniff."""
    headers = {
        "Content-Security-Policy": POLICY,
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(page(snapshot), headers=headers)


def page(snapshot: Snapshot) -> str:
    """Return the page as HTML."""
    title = "upriver: draining" if snapshot.draining else "upriver"
    body = "\n".join(
        (
            "<h1>upriver</h1>",
            _overview(snapshot),
            _section("Tenants", "tenants", _TENANTS, map(_tenant, snapshot.tenants)),
            _section("Quotas", "quotas", _QUOTAS, map(_quota, snapshot.tenants)),
            _section("Workers", "workers", _WORKERS, map(_worker, snapshot.workers)),
            _section("Programs kept", "programs", _PROGRAMS, map(_program, snapshot.programs)),
            _section(
                "Errors told to clients",
                "errors",
                ("code", "last minute", "since the start"),
                ((row.code, str(row.recent), str(row.total)) for row in snapshot.errors),
            ),
        )
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="{REFRESH_S}">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
{body}
</body>
</html>
"""


# ---------------------------------------------------------------------------------------- overview


def _overview(snapshot: Snapshot) -> str:
    facts = {
        "state": "draining: the last requests finish, no new ones are taken" if snapshot.draining else "up",
        "up for": duration_text(snapshot.uptime_s),
        "waiting": f"{snapshot.queue_requests} requests, {bytes_text(snapshot.queue_bytes)}",
        "expected wait": f"{seconds_text(snapshot.expected_wait_s)} s",
        "workers busy": f"{snapshot.utilisation:.0%}",
        "machine busy": f"{snapshot.machine:.0%}",
        "slower than at best": f"{snapshot.k:.2f} times",
        "memory": _memory_text(snapshot),
    }
    items = "".join(
        f"<dt>{escape(name)}</dt><dd{_alarm(name, snapshot)}>{escape(value)}</dd>"
        for name, value in facts.items()
    )
    return f'<dl id="overview">{items}</dl>{_bar(snapshot)}'


def _alarm(name: str, snapshot: Snapshot) -> str:
    return ' class="alarm"' if name == "state" and snapshot.draining else ""


def _memory_text(snapshot: Snapshot) -> str:
    used, reserved, budget = map(
        bytes_text, (snapshot.used_bytes, snapshot.reserved_bytes, snapshot.budget_bytes)
    )
    return f"{reserved} set aside of {budget}, {used} taken by workers"


def _bar(snapshot: Snapshot) -> str:
    """Draw reserved and used memory against the budget, as SVG: the policy forbids inline styles."""
    reserved, used = (_thousandths(n, snapshot) for n in (snapshot.reserved_bytes, snapshot.used_bytes))
    return (
        '<svg class="bar" viewBox="0 0 1000 10" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(_memory_text(snapshot))}">'
        f'<rect class="reserved" width="{reserved}" height="10"/>'
        f'<rect class="used" width="{used}" height="10"/></svg>'
        '<p class="key">Memory:<span class="used"></span>taken by workers'
        '<span class="reserved"></span>set aside; the whole bar is the budget.</p>'
    )


def _thousandths(nbytes: int, snapshot: Snapshot) -> int:
    return min(1000, 1000 * nbytes // snapshot.budget_bytes) if snapshot.budget_bytes > 0 else 0


def duration_text(seconds: float) -> str:
    """Return a duration in its two largest units: ``3 d 4 h``, ``5 min 6 s``, ``7 s``."""
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    rest = max(0, int(seconds))
    parts: list[str] = []
    for size, unit in units:
        count, rest = divmod(rest, size)
        if count or parts or unit == "s":
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


# ------------------------------------------------------------------------------------------ tables

_TENANTS = ("tenant", "weight", "admitted", "waiting", "set aside", "micro-batches")
_QUOTAS = ("tenant", "requests", "waiting", "memory", "programs kept", "stored")
_WORKERS = ("process", "state", "program", "in state, s", "restarts")
_PROGRAMS = ("program", "tenant", "memory", "users")


def _tenant(row: TenantRow) -> Sequence[str]:
    reserved, done = bytes_text(row.reserved_bytes), str(row.micro_batches)
    return row.name, f"{row.weight:g}", str(row.admitted), str(row.waiting), reserved, done


def _quota(row: TenantRow) -> Sequence[str]:
    sizes = (row.max_waiting_bytes, row.program_bytes, row.stored_bytes)
    waiting, programs, stored = map(bytes_text, sizes)
    return row.name, str(row.max_requests), waiting, f"{100 * row.memory_share:.3g}%", programs, stored


def _worker(row: WorkerRow) -> Sequence[str]:
    pid = str(row.pid) if row.pid else "-"
    return pid, row.state, row.program or "-", seconds_text(row.seconds), str(row.restarts)


def _program(row: ProgramRow) -> Sequence[str]:
    return row.digest, row.tenant, bytes_text(row.nbytes), str(row.users)


def _section(title: str, name: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table that scrolls by itself when it is wider than a phone's screen."""
    body = "".join(f"<tr>{_cells('td', header, row)}</tr>" for row in rows)
    if not body:
        return f'<h2>{escape(title)}</h2><p class="none" id="{name}">none</p>'
    head = f"<thead><tr>{_cells('th', header, header)}</tr></thead>"
    return (
        f'<h2>{escape(title)}</h2><div class="wide">'
        f'<table id="{name}">{head}<tbody>{body}</tbody></table></div>'
    )


def _cells(tag: str, header: Sequence[str], values: Sequence[str]) -> str:
    return "".join(
        f'<{tag} class="word">{escape(value)}</{tag}>'
        if name in _WORDS
        else f"<{tag}>{escape(value)}</{tag}>"
        for name, value in zip(header, values, strict=True)
    )
