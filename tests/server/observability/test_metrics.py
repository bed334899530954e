"""Test the metrics, and that the page and the dashboard mention no others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.server.running import answering, ask, body_of, in_thread, run, running, wait_for
from upriver.errors import DeadlineExceeded, NotAuthorized, QuotaExceeded, UpriverError, WorkerCrashed
from upriver.server.observability.metrics import (
    FEATURES,
    MAX_RECENT,
    PHASES,
    REASONS,
    RECENT_S,
    RESTARTS,
    STORE_ERRORS,
    ServerMetrics,
)
from upriver.types import Timings

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((ROOT / "ops" / "grafana" / "upriver.json").read_text(encoding="utf-8"))
TIMINGS = Timings(phases={"queue": 0.5, "read": 0.2, "forward": 2.0})


def filled() -> ServerMetrics:
    """Return metrics in which every event happened once."""
    metrics = ServerMetrics(tenants=["anna"], stores=["images"])
    metrics.requests.labels("/v1/run", 200).inc()
    metrics.running.inc()
    metrics.errors.labels("protocol").inc()
    metrics.bytes_in("anna", 7)
    metrics.bytes_out_by("anna", 8)
    metrics.queue(3, 4000)
    metrics.memory(30, 20, 100)
    metrics.load(1.5, 0.95)
    metrics.admitted("anna")
    metrics.shed("anna", "queue")
    metrics.draining.set(1)
    metrics.micro_batch("anna", TIMINGS)
    metrics.sent(0.1)
    metrics.batch("anna", 16)
    metrics.program("kept", "anna")
    metrics.program_bytes.set(9)
    metrics.store_read("images", 0.02, 5000)
    metrics.store_error("images", "not_found")
    metrics.restart("memory")
    metrics.audit_failures.inc()
    return metrics


def registered(metrics: ServerMetrics) -> dict[str, tuple[str, frozenset[str]]]:
    """Return type and labels by the name that Prometheus shows."""
    found = {}
    for family in metrics.registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = (family.type, frozenset(labels))
    return found


def series(metrics: ServerMetrics) -> set[str]:
    """Return every name that a query can use."""
    return {sample.name for family in metrics.registry.collect() for sample in family.samples}


# --------------------------------------------------------------------------- the page, the dashboard


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    rows = [
        [cell.strip() for cell in line.split("|")]
        for line in PAGE.splitlines()
        if line.startswith("| `upriver_")
    ]
    found = {row[1].strip("`"): (row[2], frozenset(re.findall(r"`(\w+)`", row[3]))) for row in rows}
    assert len(found) == len(rows), "a metric is listed twice"
    assert all(row[4] for row in rows), "a metric has no meaning"
    return found


def test_the_page_lists_every_metric_with_its_type_and_labels() -> None:
    assert documented() == registered(filled())


def test_the_page_names_no_metric_that_there_is_not() -> None:
    assert set(re.findall(r"\bupriver_\w+", PAGE)) <= series(filled()) | set(registered(filled()))


def test_the_page_lists_every_value_of_a_label() -> None:
    lines = {line.split("`")[1]: line for line in PAGE.splitlines() if line.startswith("| `upriver_")}
    values = {
        "upriver_shed_requests_total": REASONS,
        "upriver_micro_batch_seconds": PHASES,
        "upriver_program_requests_total": ("kept", "read", "stored"),
        "upriver_store_errors_total": STORE_ERRORS,
        "upriver_feature_rows_total": FEATURES,
        "upriver_worker_restarts_total": RESTARTS,
    }
    for name, words in values.items():
        assert all(f"`{word}`" in lines[name] for word in words), name


def test_the_dashboard_asks_for_what_there_is() -> None:
    known = series(filled())
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    assert expressions
    for expression in expressions:
        names = re.findall(r"\bupriver_\w+", expression)
        assert names and set(names) <= known, expression
        assert expression.count("(") == expression.count(")")
        assert expression.count("{") == expression.count("}") > 0


def test_every_panel_says_what_it_shows() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["title"] and panel["fieldConfig"]["defaults"]["unit"], panel["id"]
        assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert len({(place["x"], place["y"]) for place in places}) == len(places)


def test_a_query_on_the_dashboard_groups_by_labels_that_there_are() -> None:
    kinds = registered(filled())
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for group, name in re.findall(
                r"by \(([\w, ]+)\) \((?:rate|increase)?\(?(upriver_\w+)", target["expr"]
            ):
                name = re.sub(r"_(bucket|sum|count)$", "", name)
                wanted = {label.strip() for label in group.split(",")} - {"le", "instance"}
                assert wanted <= kinds[name][1], target["expr"]


# ------------------------------------------------------------------------------------------- counters


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("upriver_requests_total", {"route": "/v1/run", "code": "200"}, 1),
        ("upriver_running_requests", {}, 1),
        ("upriver_errors_total", {"code": "protocol"}, 1),
        ("upriver_bytes_in_total", {"tenant": "anna"}, 7),
        ("upriver_bytes_out_total", {"tenant": "anna"}, 8),
        ("upriver_queue_requests", {}, 3),
        ("upriver_queue_bytes", {}, 4000),
        ("upriver_memory_reserved_bytes", {}, 30),
        ("upriver_memory_used_bytes", {}, 20),
        ("upriver_memory_budget_bytes", {}, 100),
        ("upriver_load_factor", {}, 1.5),
        ("upriver_machine_utilisation", {}, 0.95),
        ("upriver_admitted_requests_total", {"tenant": "anna"}, 1),
        ("upriver_shed_requests_total", {"tenant": "anna", "reason": "queue"}, 1),
        ("upriver_shed_requests_total", {"tenant": "anna", "reason": "memory"}, 0),
        ("upriver_draining", {}, 1),
        ("upriver_micro_batches_total", {"tenant": "anna"}, 1),
        ("upriver_micro_batch_seconds_sum", {"phase": "forward"}, 2.0),
        ("upriver_micro_batch_seconds_sum", {"phase": "send"}, 0.1),
        ("upriver_micro_batch_seconds_count", {"phase": "encode"}, 0),
        ("upriver_forward_rows_bucket", {"tenant": "anna", "le": "16.0"}, 1),
        ("upriver_forward_rows_bucket", {"tenant": "anna", "le": "8.0"}, 0),
        ("upriver_program_requests_total", {"found": "kept", "tenant": "anna"}, 1),
        ("upriver_program_requests_total", {"found": "read", "tenant": "anna"}, 0),
        ("upriver_program_bytes", {}, 9),
        ("upriver_store_read_bytes_total", {"store": "images"}, 5000),
        ("upriver_store_read_seconds_count", {"store": "images"}, 1),
        ("upriver_store_errors_total", {"store": "images", "kind": "not_found"}, 1),
        ("upriver_store_errors_total", {"store": "images", "kind": "object_changed"}, 0),
        ("upriver_worker_restarts_total", {"reason": "memory"}, 1),
        ("upriver_worker_restarts_total", {"reason": "crash"}, 0),
        ("upriver_audit_failures_total", {}, 1),
    ],
)
def test_each_call_moves_its_own_series(name: str, labels: dict[str, str], value: float) -> None:
    assert filled().registry.get_sample_value(name, labels) == value


def test_series_of_the_configuration_are_there_before_anything_happens() -> None:
    registry = ServerMetrics(tenants=["anna", "ben"], stores=["images"]).registry
    for tenant in ("anna", "ben"):
        assert registry.get_sample_value("upriver_admitted_requests_total", {"tenant": tenant}) == 0
    assert registry.get_sample_value("upriver_store_read_bytes_total", {"store": "images"}) == 0
    assert registry.get_sample_value("upriver_worker_restarts_total", {"reason": "timeout"}) == 0


def test_a_worker_makes_no_labels() -> None:
    metrics = ServerMetrics()
    metrics.micro_batch("anyone", Timings(phases={f"made-up-{number}": 1.0 for number in range(100)}))
    metrics.store_error("images", "made-up")
    for number in range(100):
        metrics.errors.labels(f"made-up-{number}").inc()
    labels = {"store": "images", "kind": "store"}
    assert metrics.registry.get_sample_value("upriver_store_errors_total", labels) == 1
    assert metrics.registry.get_sample_value("upriver_errors_total", {"code": "error"}) == 100
    assert [(row.code, row.total) for row in metrics.errors.rows()] == [("error", 100)]
    assert b"made-up" not in metrics.text()


def test_every_error_that_there_is_has_its_own_label() -> None:
    metrics = ServerMetrics()
    codes = {
        kind.code for kind in (NotAuthorized, QuotaExceeded, DeadlineExceeded, WorkerCrashed, UpriverError)
    }
    for code in codes:
        metrics.errors.labels(code).inc()
    assert {row.code for row in metrics.errors.rows()} == codes


def test_two_servers_in_a_process_do_not_meet() -> None:
    one, other = ServerMetrics(), ServerMetrics()
    one.admitted("anyone")
    name, labels = "upriver_admitted_requests_total", {"tenant": "anyone"}
    assert one.registry.get_sample_value(name, labels) == 1
    assert other.registry.get_sample_value(name, labels) == 0


def test_uptime_goes_by_the_clock() -> None:
    now = 100.0
    metrics = ServerMetrics(now=lambda: now)
    now = 112.5
    assert metrics.uptime_s == 12.5
    assert metrics.registry.get_sample_value("upriver_uptime_seconds") == 12.5


def test_errors_of_the_last_minute_are_told_from_the_rest() -> None:
    now = 0.0
    metrics = ServerMetrics(now=lambda: now)
    for _ in range(3):
        metrics.errors.labels("overloaded").inc()
    now = RECENT_S + 1
    metrics.errors.labels("overloaded").inc()
    metrics.errors.labels("bad_sample").inc()
    rows = [(row.code, row.recent, row.total) for row in metrics.errors.rows()]
    assert rows == [("overloaded", 1, 4), ("bad_sample", 1, 1)]


def test_a_flood_of_errors_takes_no_more_memory() -> None:
    metrics = ServerMetrics()
    for _ in range(2 * MAX_RECENT):
        metrics.errors.labels("overloaded").inc()
    [row] = metrics.errors.rows()
    assert (row.recent, row.total) == (MAX_RECENT, 2 * MAX_RECENT)


# ------------------------------------------------------------------------------------- a real server


def stored_bytes(world, *ids):
    return sum(ref.stop - ref.start for ref in world.dataset.locate(ids))


def test_a_request_shows_on_its_whole_way(server, world):
    names = {
        "admitted": ("upriver_admitted_requests_total", 'tenant="anyone"'),
        "answered": ("upriver_requests_total", 'code="200",route="/v1/run"'),
        "micro-batches": ("upriver_micro_batches_total", 'tenant="anyone"'),
        "read": ("upriver_micro_batch_seconds_count", 'phase="read"'),
        "queue": ("upriver_micro_batch_seconds_count", 'phase="queue"'),
        "input": ("upriver_micro_batch_seconds_count", 'phase="input"'),
        "encode": ("upriver_micro_batch_seconds_count", 'phase="encode"'),
        "send": ("upriver_micro_batch_seconds_count", 'phase="send"'),
        "stored bytes": ("upriver_store_read_bytes_total", 'store="default"'),
        "reads": ("upriver_store_read_seconds_count", 'store="default"'),
        "shed": ("upriver_shed_requests_total", ""),
        "restarts": ("upriver_worker_restarts_total", ""),
        "errors": ("upriver_errors_total", ""),
    }
    wait_for(lambda: server.metric("upriver_running_requests") == 0)  # those of other tests
    before = {what: server.metric(*name) for what, name in names.items()}
    assert len(run(server, world.request((0, 1), (2,)))) == 2
    wait_for(lambda: server.metric("upriver_running_requests") == 0)
    moved = {what: server.metric(*name) - before[what] for what, name in names.items()}
    once = dict.fromkeys(("read", "queue", "input", "encode", "send", "reads", "micro-batches"), 2)
    still = dict.fromkeys(("shed", "restarts", "errors"), 0)
    bytes_read = stored_bytes(world, 0, 1, 2)
    assert moved == {"admitted": 1, "answered": 1, **once, **still, "stored bytes": bytes_read}


def test_each_byte_of_a_request_and_its_answer_is_counted_once(server, world):
    names = ("upriver_bytes_in_total", "upriver_bytes_out_total")
    before = [server.metric(name) for name in names]
    request = world.request((0, 1), (2,))
    with answering(server, request) as response:
        answer = response.read()
    wait_for(lambda: server.metric("upriver_running_requests") == 0)
    moved = [server.metric(name) - value for name, value in zip(names, before, strict=True)]
    assert moved == [len(body_of(request)), len(answer)]


def test_what_no_route_answers_is_counted_too(server):
    def told(code):
        return server.metric("upriver_errors_total", f'code="{code}"')

    before = told("not_found"), told("method_not_allowed")
    assert ask(server, "GET", "/nothing")[0] == 404
    assert ask(server, "POST", "/v1/info")[0] == 405
    assert (told("not_found"), told("method_not_allowed")) == (before[0] + 1, before[1] + 1)


@pytest.mark.full
def test_strangers_are_counted(world):
    with running(world.store.uri, token="open-sesame") as server:
        for _ in range(3):
            assert ask(server, "GET", "/v1/info")[0] == 401
        token = {"Authorization": "Bearer open-sesame"}
        lines = ask(server, "GET", "/metrics", headers=token)[2].decode().splitlines()
    assert 'upriver_errors_total{code="not_authorized"} 3.0' in lines


def test_a_request_that_finds_no_worker_is_not_said_to_lack_memory(world):
    with in_thread(world.store.uri) as server:
        assert ask(server, "POST", "/v1/run", body_of(world.request((0,))))[0] == 503
        assert server.metric("upriver_shed_requests_total", 'reason="worker"') == 1
        assert server.metric("upriver_shed_requests_total") == 1


def test_what_a_request_held_is_given_back(server, world):
    before = server.metric("upriver_memory_reserved_bytes")  # other tests left programs
    run(server, world.request((0, 1), (2, 3)))
    wait_for(lambda: server.metric("upriver_running_requests") == 0)
    wait_for(lambda: server.metric("upriver_memory_reserved_bytes") == before)
    assert server.metric("upriver_queue_requests") == server.metric("upriver_queue_bytes") == 0
    assert server.metric("upriver_memory_budget_bytes") > 0


def test_a_server_tells_of_itself(server):
    first = server.metric("upriver_uptime_seconds")
    assert 0 < first <= server.metric("upriver_uptime_seconds")
    assert server.metric("upriver_draining") == 0
    assert server.metric("upriver_process_resident_memory_bytes") > 1 << 20
    assert ask(server, "GET", "/metrics")[1]["content-type"].startswith("text/plain; version=0.0.4")
