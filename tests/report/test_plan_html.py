"""Test the HTML page: self-contained, well-formed, everything in it escaped."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.planning import alexnet, cluster, clusters, profiles, workloads
from tests.report.asking import plans, points
from upriver.policies import POLICIES
from upriver.report.plan_html import render_html
from upriver.text import seconds_text
from upriver.types import Cluster, ComputeTier, Plan, Profile, StorageTier, Workload

VOID = {"meta", "rect", "polyline", "circle", "path", "br"}
ALLOWED = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "h1",
        "h2",
        "p",
        "dl",
        "dt",
        "dd",
        "div",
        "span",
        "i",
    ),
    *("table", "thead", "tbody", "tr", "th", "td", "strong", "br"),
    *("svg", "rect", "polyline", "circle", "path", "text"),
}


class Page(HTMLParser):
    """Check that tags are closed in turn, and collect the content of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text: list[str] = []
        self.counts: dict[str, int] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def page(asked: dict[str, Plan], **more: object) -> str:
    options: dict[str, object] = {"title": "Where to cut", "facts": {"model": "alexnet"}, **more}
    return render_html(asked, **options)  # type: ignore[arg-type]


def test_nothing_is_loaded_from_anywhere() -> None:
    text = page(plans(alexnet(), cluster()), points=points(alexnet(), cluster()))
    parsed = Page(text)
    assert {name for _, name, _ in parsed.attributes}.isdisjoint({"src", "href", "srcset", "action", "data"})
    assert not any(name.startswith("on") for _, name, _ in parsed.attributes)
    assert "url(" not in text and "@import" not in text and "http://" not in text and "https://" not in text
    assert ("meta", "name", "viewport") in parsed.attributes
    assert "default-src 'none'" in text


def test_it_shows_every_choice_every_cut_and_why() -> None:
    asked = plans(alexnet(storage_s=6e-5), replace(cluster(), compute=ComputeTier(memory_bytes=1.2e9)))
    parsed = Page(page(asked, notes=("Measured here.",)))
    text = " ".join(" ".join(parsed.text).split())
    for name, plan in asked.items():
        assert " ".join(plan.why.split()) in text and name in text
        if plan.predicted:
            assert seconds_text(plan.predicted.epoch_s) in text
    rows = next(iter(asked.values())).table
    assert parsed.counts["svg"] == len(rows) == 18
    assert all(row.name in text and row.why_not in text for row in rows)
    assert "alexnet" in text and "Measured here." in text and "does not fit" in text
    assert any(len(plan.routes) > 1 for plan in asked.values()) == bool(re.search(r"\d+ [\d.]+% \+", text))


def test_bars_are_as_long_as_the_seconds() -> None:
    asked = plans(alexnet(storage_s=6e-5), cluster())
    rows = next(iter(asked.values())).table
    longest = max(row.cost.storage_s + row.cost.network_s + row.cost.compute_s for row in rows)
    widths = [float(width) for width in re.findall(r'<rect x="[\d.]+" y="0" width="([\d.]+)"', page(asked))]
    expected = [
        1000 * seconds / longest
        for row in rows
        for seconds in (row.cost.storage_s, row.cost.network_s, row.cost.compute_s)
    ]
    assert widths == pytest.approx(expected, abs=0.051)


@given(profile=profiles(), cluster=clusters(), workload=workloads)
@settings(max_examples=examples(30), deadline=None)
def test_every_question_has_a_page(profile: Profile, cluster: Cluster, workload: Workload) -> None:
    sweep = points(profile, cluster, (1e5, 1e9), workload)
    Page(page(plans(profile, cluster, workload), points=sweep))


@given(name=st.text(alphabet=st.sampled_from("<>&\"'/=ab \n"), max_size=30))
@settings(max_examples=examples(50), deadline=None)
def test_names_are_text_and_nothing_else(name: str) -> None:
    odd = alexnet()
    odd = replace(odd, model=name, stages=(replace(odd.stages[0], name=name), *odd.stages[1:]))
    asked = {
        "hapi": replace(POLICIES["hapi"](odd, cluster(), Workload(batch_size=9, num_samples=9)), why=name)
    }
    parsed = Page(page(asked, title=name, facts={name: name}, notes=(name,)))
    plain = Page(page(plans(alexnet(), cluster()) | {}, notes=("x",)))
    assert set(parsed.counts) <= set(plain.counts)
    if name.strip():
        assert parsed.text.count(name) >= 6


def test_what_never_fits_and_what_has_no_cuts() -> None:
    tiny = replace(cluster(), compute=ComputeTier(memory_bytes=0), storage=StorageTier(memory_bytes=0))
    Page(page(plans(alexnet(), tiny), points=points(alexnet(), tiny)))
    bare = replace(
        plans(alexnet(), cluster())["hapi"], table=(), predicted=None, why="it could not be captured"
    )
    parsed = Page(page({"hapi": bare}))
    assert "svg" not in parsed.counts and any("could not be captured" in text for text in parsed.text)
