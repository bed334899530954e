"""Test the dashboard: correct, escaped, harmless, and readable in a real browser."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.observability.test_snapshot import FULL
from tests.server.running import ask, run, running, wait_for
from upriver.rpc.client import ServerClient
from upriver.server.http.dashboard import POLICY, REFRESH_S, duration_text, page, response
from upriver.server.observability.snapshot import ErrorRow, ProgramRow, Snapshot, TenantRow, WorkerRow

CHROMIUM = shutil.which("chromium", path="/usr/bin:/usr/local/bin")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed here")

HOSTILE = "<script>alert(1)</script>\"' onload=x &amp; </td></style><img src=//evil.example>"
VOID = frozenset({"meta", "rect", "link", "br", "img", "input"})


class Page(HTMLParser):
    """Parse a page: tables by id as dictionaries, and everything that a harmless page lacks."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[dict[str, str]]] = {}
        self.facts: dict[str, str] = {}
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.metas: list[dict[str, str | None]] = []
        self.style = self.text = ""
        self._open: list[str] = []
        self._table, self._header, self._cells = "", list[str](), list[str]()
        self._term = ""
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        found = dict(attrs)
        if tag == "meta":
            self.metas.append(found)
        if tag == "table":
            self._table = found["id"] or ""
            self.tables[self._table] = []
        if tag in ("th", "td"):
            self._cells.append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self._open.pop() == tag
        if tag == "tr" and "thead" in self._open:
            self._header, self._cells = self._cells, []
        elif tag == "tr":
            row = dict(zip(self._header, self._cells, strict=True))
            self.tables[self._table].append(row)
            self._cells = []

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "style":
            self.style += data
            return
        self.text += data
        if inside in ("th", "td"):
            self._cells[-1] += data
        elif inside == "dt":
            self._term = data
        elif inside == "dd":
            self.facts[self._term] = self.facts.get(self._term, "") + data


def row(rows: list[dict[str, str]], **wanted: str) -> dict[str, str]:
    [found] = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return found


# ------------------------------------------------------------------------------------------ the page


def test_every_number_is_there() -> None:
    seen = Page(page(FULL))
    assert row(seen.tables["tenants"], tenant="anna") == {
        "tenant": "anna",
        "weight": "2",
        "admitted": "3",
        "waiting": "4",
        "set aside": "5 B",
        "micro-batches": "6",
    }
    assert row(seen.tables["quotas"], tenant="anna") == {
        "tenant": "anna",
        "requests": "7",
        "waiting": "8 B",
        "memory": "50%",
        "programs kept": "9 B",
        "stored": "10 B",
    }
    for table in ("tenants", "quotas"):
        assert [found["tenant"] for found in seen.tables[table]] == ["anna", "ben"]
    assert seen.tables["workers"] == [
        {"process": "17", "state": "busy", "program": "0123456789ab", "in state, s": "1.50", "restarts": "2"},
        {"process": "-", "state": "starting", "program": "-", "in state, s": "0", "restarts": "0"},
    ]
    assert seen.tables["programs"] == [
        {"program": "0123456789ab", "tenant": "anna", "memory": "1.05 MB", "users": "1"}
    ]
    assert seen.tables["errors"] == [{"code": "overloaded", "last minute": "1", "since the start": "9"}]
    assert seen.facts["waiting"] == "4 requests, 12.3 kB"
    assert seen.facts["memory"] == "700 B set aside of 1 kB, 300 B taken by workers"
    assert seen.facts["workers busy"] == "75%"
    assert seen.facts["machine busy"] == "90%"
    assert seen.facts["slower than at best"] == "1.25 times"
    assert seen.facts["up for"] == "1 d 1 h"
    assert seen.facts["state"].startswith("draining")


def test_the_bar_is_drawn_to_scale() -> None:
    assert re.findall(r'<rect class="(\w+)" width="(\d+)"', page(FULL)) == [
        ("reserved", "700"),
        ("used", "300"),
    ]
    shown = Page(page(FULL)).text
    assert "taken by workers" in shown and "set aside; the whole bar is the budget" in shown
    over = Snapshot(budget_bytes=10, reserved_bytes=10_000, used_bytes=5)
    assert re.findall(r'width="(\d+)" height="10"', page(over)) == ["1000", "500"]


def test_a_server_that_has_just_begun_has_a_page() -> None:
    seen = Page(page(Snapshot()))
    assert not seen.tables
    assert seen.text.count("none") == 5
    assert seen.facts["state"] == "up"


def harmless(seen: Page) -> None:
    assert seen.tags <= {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "dl", "dt", "dd", "p", "div"),
        *("svg", "rect", "span", "table", "thead", "tbody", "tr", "th", "td"),
    }
    assert seen.attributes <= {
        *("lang", "charset", "name", "content", "http-equiv", "id", "class", "role", "aria-label"),
        *("viewbox", "preserveaspectratio", "width", "height"),
    }


def test_names_are_text_and_nothing_else() -> None:
    hostile = Snapshot(
        tenants=(TenantRow(name=HOSTILE),),
        workers=(WorkerRow(pid=1, state="busy", program=HOSTILE),),
        programs=(ProgramRow(tenant=HOSTILE, digest=HOSTILE, nbytes=1),),
        errors=(ErrorRow(code=HOSTILE, recent=1, total=1),),
    )
    seen = Page(page(hostile))
    harmless(seen)
    assert seen.tables["tenants"][0]["tenant"] == seen.tables["quotas"][0]["tenant"] == HOSTILE
    assert seen.tables["workers"][0]["program"] == HOSTILE
    assert seen.tables["programs"][0]["tenant"] == seen.tables["programs"][0]["program"] == HOSTILE
    assert seen.tables["errors"][0]["code"] == HOSTILE


@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=40))
def test_any_name_stays_in_its_cell(name: str) -> None:
    seen = Page(page(Snapshot(tenants=(TenantRow(name=name),))))
    harmless(seen)
    assert seen.tables["tenants"][0]["tenant"] == name


def test_a_browser_may_load_nothing_but_the_style_of_the_page() -> None:
    answer = response(FULL)
    assert answer.headers["content-security-policy"] == POLICY
    assert "default-src 'none'" in POLICY and "unsafe" not in POLICY
    style = Page(bytes(answer.body).decode()).style
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in POLICY
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["content-type"] == "text/html; charset=utf-8"


def test_it_asks_for_itself_again_and_fits_a_phone() -> None:
    metas = Page(page(FULL)).metas
    assert {"http-equiv": "refresh", "content": str(REFRESH_S)} in metas
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in metas


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (3600, "1 h 0 min"), (90061, "1 d 1 h"), (-1, "0 s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


# ------------------------------------------------------------------------------------- a real server


def basic(token):
    return {"Authorization": "Basic " + base64.b64encode(f"anybody:{token}".encode()).decode()}


def test_the_page_of_a_server_has_its_workers_and_what_they_did(server, world):
    def now():
        status, headers, body = ask(server, "GET", "/ui")
        assert (status, headers["content-security-policy"]) == (200, POLICY)
        return Page(body.decode())

    def done():
        return int(row(now().tables["tenants"], tenant="anyone")["micro-batches"])

    assert row(now().tables["quotas"], tenant="anyone") == {
        "tenant": "anyone",
        "requests": "128",
        "waiting": "8.59 GB",
        "memory": "100%",
        "programs kept": "4.29 GB",
        "stored": "68.7 GB",
    }
    before = done()
    assert len(run(server, world.request((0, 1), (2,)))) == 2
    wait_for(lambda: done() == before + 2)
    # The server is ready with its first worker: the second one may still be starting.
    wait_for(lambda: {found["state"] for found in now().tables["workers"]} <= {"idle", "busy"})
    workers = now().tables["workers"]
    assert sorted(found["process"] for found in workers) == sorted(map(str, server.workers()))


@pytest.mark.full
def test_a_worker_that_does_nothing_works_with_no_program(server, world):
    def workers():
        return Page(ask(server, "GET", "/ui")[2].decode()).tables["workers"]

    with ServerClient(server.url) as client:
        client.put_program(world.program)
    assert run(server, world.request((0, 1), stop=2))
    wait_for(lambda: {found["state"] for found in workers()} == {"idle"})
    assert {found["program"] for found in workers()} == {"-"}


def test_an_error_told_to_a_client_is_on_the_page(server):
    def count():
        errors = Page(ask(server, "GET", "/ui")[2].decode()).tables.get("errors", [])
        return sum(int(found["since the start"]) for found in errors if found["code"] == "protocol")

    before = count()
    assert ask(server, "GET", "/v1/probe?bytes=many")[0] == 400
    assert count() == before + 1


@pytest.mark.slow
@pytest.mark.full
def test_a_browser_sends_the_token_as_a_password(world):
    with running(world.store.uri, token="open-sesame") as server:
        status, headers, _ = ask(server, "GET", "/ui", headers={"Accept": "text/html"})
        assert status == 401
        assert any("Basic" in value for value in headers.get_all("www-authenticate"))
        assert ask(server, "GET", "/ui", headers=basic("wrong"))[0] == 401
        assert ask(server, "GET", "/ui", headers={"Authorization": "Bearer open-sesame"})[0] == 200
        assert ask(server, "GET", "/ui", headers=basic("open-sesame"))[0] == 200
        # Otherwise a foreign page could start work here through a browser that was once let in.
        assert ask(server, "POST", "/v1/run", b"", headers=basic("open-sesame"))[0] == 401


# ------------------------------------------------------------------------------------------ a browser


def browse(url, folder, *options):
    """Return the page as Chromium shows it (or the output for ``options``), and the browser's complaints."""
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",  # root has no sandbox, and the page is our own
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--no-proxy-server",
        "--enable-logging=stderr",
        f"--user-data-dir={folder}",
        *(options or ("--dump-dom",)),
        url,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, done.stderr


@needs_chromium
@pytest.mark.full
def test_chromium_shows_live_numbers(server, world, tmp_path):
    def seen(number):
        dom, complaints = browse(f"{server.url}/ui", tmp_path / str(number))
        assert "style-src" not in complaints, complaints
        return Page(dom)

    before = int(row(seen(1).tables["tenants"], tenant="anyone")["micro-batches"])
    run(server, world.request((0, 1), (2,), (3,)))
    wait_for(lambda: server.metric("upriver_running_requests") == 0)
    after = seen(2)
    assert int(row(after.tables["tenants"], tenant="anyone")["micro-batches"]) == before + 3
    assert len(after.tables["workers"]) == 2
    assert after.facts["state"] == "up"


@needs_chromium
@pytest.mark.full
def test_chromium_comes_in_with_the_token(world, tmp_path):
    with running(world.store.uri, token="open-sesame") as server:
        dom, _ = browse(f"http://anybody:open-sesame@{server.address}/ui", tmp_path)
        assert Page(dom).facts["state"] == "up"


@needs_chromium
@pytest.mark.full
@pytest.mark.parametrize("size", ["390,844", "1280,800"], ids=["phone", "desk"])
def test_chromium_paints_the_page_at_any_size(server, tmp_path, size):
    from PIL import Image

    picture = tmp_path / "page.png"
    browse(f"{server.url}/ui", tmp_path / "profile", f"--window-size={size}", f"--screenshot={picture}")
    with Image.open(picture) as image:
        assert len(image.convert("RGB").getcolors(maxcolors=1 << 24) or ()) > 16  # text has many greys
