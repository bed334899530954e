"""Test the audit log: a line for each request, and no request fails because of it."""

import errno
import json
import logging
import os
import signal
import stat

import pytest

from tests.server.configured import bearer, configured, post_run, tenant
from tests.server.conftest import make_world
from tests.server.running import ask, body_of, wait_for
from upriver.errors import ConfigError
from upriver.protocol import DatasetRef, RunRequest, program_head
from upriver.server.observability import audit_log as module
from upriver.server.observability.audit_log import STRANGERS_PER_MINUTE, AuditEntry, AuditLog

DIGEST, OTHER = "ab" * 32, "cd" * 32
RUN = RunRequest(
    micro_batches=((0, 1, 2, 3), (4, 5)),
    start=-2,
    stop=3,
    micro_batch=4,
    program=DIGEST,
    dataset=DatasetRef(store="images", digest=OTHER),
)


class Clock:
    """Clock that the test sets."""

    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def upload(audit, program=DIGEST):
    audit.upload("alice", request_id="1-1", program=program, bytes_in=10, seconds=0.5)


def test_what_a_line_says(tmp_path):
    audit = AuditLog(tmp_path / "audit", now=Clock(1_790_000_000.5))
    audit.run(
        "alice",
        request_id="1-1",
        dataset=OTHER,
        store="images",
        program=DIGEST,
        samples=6,
        bytes_in=512,
        bytes_out=4096,
        seconds=1.2345678,
        outcome="ok",
    )
    audit.profile("bob", request_id="1-2", programs=[DIGEST], seconds=2.0, outcome="busy")
    upload(audit)
    audit.refused("bob", path="/v1/run", status=429, code="quota", request_id="1-3")
    audit.close()
    time = {"time": "2026-09-21T14:13:20.500Z"}
    run, profile, sent, refused = lines(tmp_path / "audit")
    assert run == time | {
        "who": "alice",
        "what": "run",
        "request_id": "1-1",
        "store": "images",
        "dataset": OTHER,
        "program": DIGEST,
        "samples": 6,
        "bytes_in": 512,
        "bytes_out": 4096,
        "seconds": 1.234568,
        "outcome": "ok",
    }
    assert list(run)[:3] == ["time", "who", "what"]
    assert profile == time | {
        "who": "bob",
        "what": "profile",
        "request_id": "1-2",
        "programs": [DIGEST],
        "seconds": 2.0,
        "outcome": "busy",
    }
    assert sent == time | {
        "who": "alice",
        "what": "upload",
        "request_id": "1-1",
        "program": DIGEST,
        "bytes_in": 10,
        "seconds": 0.5,
        "outcome": "ok",
    }
    assert refused == time | {
        "who": "bob",
        "what": "refused",
        "path": "/v1/run",
        "status": 429,
        "outcome": "quota",
        "request_id": "1-3",
    }


def test_only_its_owner_reads_it(tmp_path):
    AuditLog(tmp_path / "audit").close()
    assert stat.S_IMODE((tmp_path / "audit").stat().st_mode) == 0o600


def test_without_a_file_nothing_is_written():
    audit = AuditLog(None)
    upload(audit)
    audit.reopen()
    audit.close()
    assert audit.failures == 0


def test_a_file_that_cannot_be_made_is_an_error_at_once(tmp_path):
    with pytest.raises(ConfigError, match="no-folder"):
        AuditLog(tmp_path / "no-folder" / "audit")


def test_what_others_chose_stays_one_line_and_short(tmp_path):
    audit = AuditLog(tmp_path / "audit")
    audit.refused(None, path='/a\n{"who": "alice"}\x1b[2J' + "x" * 5000, status=401, code="not_authorized")
    audit.close()
    (line,) = (tmp_path / "audit").read_text().splitlines()
    assert len(line) < 1000
    path = json.loads(line)["path"]
    assert path.startswith('/a?{"who": "alice"}?[2J')
    assert path.isprintable()


def test_two_that_append_to_one_file_do_not_disturb_each_other(tmp_path):
    first, second = AuditLog(tmp_path / "audit"), AuditLog(tmp_path / "audit")
    for number in range(50):
        upload(first, program=f"first-{number}")
        upload(second, program=f"second-{number}")
    found = [line["program"] for line in lines(tmp_path / "audit")]
    assert found == [f"{who}-{number}" for number in range(50) for who in ("first", "second")]
    first.close()
    second.close()


def test_a_line_is_one_write(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(module.os, "write", lambda fd, data: written.append(bytes(data)) or len(data))
    audit = AuditLog(tmp_path / "audit")
    upload(audit)
    upload(audit)
    audit.close()
    assert len(written) == 2
    assert all(data.endswith(b"}\n") and data.count(b"\n") == 1 for data in written)


def test_after_it_was_moved_away_it_goes_on_in_a_new_one(tmp_path):
    audit = AuditLog(tmp_path / "audit")
    upload(audit, "one")
    os.rename(tmp_path / "audit", tmp_path / "audit.1")
    upload(audit, "two")
    audit.reopen()
    upload(audit, "three")
    audit.close()
    assert [line["program"] for line in lines(tmp_path / "audit.1")] == ["one", "two"]
    assert [line["program"] for line in lines(tmp_path / "audit")] == ["three"]


def test_where_no_new_one_can_be_made_it_stays_in_the_old(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    audit = AuditLog(folder / "audit")
    os.rename(folder, tmp_path / "moved")
    audit.reopen()
    upload(audit)
    audit.close()
    assert audit.failures == 1
    assert len(lines(tmp_path / "moved" / "audit")) == 1


def test_a_full_disk_is_counted_and_said_once(caplog):
    audit = AuditLog("/dev/full")
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            upload(audit)
    audit.close()
    assert audit.failures == 3
    (record,) = caplog.records
    assert os.strerror(errno.ENOSPC) in record.getMessage()
    assert "/dev/full" in record.getMessage()


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path, monkeypatch, caplog):
    write, room = os.write, [40, 0]
    monkeypatch.setattr(
        module.os, "write", lambda fd, data: write(fd, data[: room.pop(0)]) if room else write(fd, data)
    )
    failed = []
    audit = AuditLog(tmp_path / "audit", on_failure=lambda: failed.append(1))
    for program in ("cut", "lost", "whole", "next"):
        upload(audit, program)
    audit.close()
    cut, *rest = (tmp_path / "audit").read_text().splitlines()
    assert len(cut) == 40
    assert [json.loads(line)["program"] for line in rest if line] == ["whole", "next"]
    assert audit.failures == len(failed) == 2
    assert len(caplog.records) == 1


def test_strangers_do_not_fill_the_disk(tmp_path):
    clock = Clock(6000.0)
    audit = AuditLog(tmp_path / "audit", now=clock)
    for _ in range(STRANGERS_PER_MINUTE + 25):
        audit.refused(None, path="/", status=401, code="not_authorized")
    upload(audit)  # requests with a token are logged
    assert len(lines(tmp_path / "audit")) == STRANGERS_PER_MINUTE + 1
    clock.now += 60
    for _ in range(2):
        audit.refused(None, path="/", status=401, code="not_authorized")
    audit.close()
    found = lines(tmp_path / "audit")[STRANGERS_PER_MINUTE + 1 :]
    assert [line.get("left_out") for line in found] == [25, None]


def test_an_entry_is_written_once_with_what_was_known(tmp_path):
    audit = AuditLog(tmp_path / "audit")
    whole, early = AuditEntry(audit, "alice", "1-1"), AuditEntry(audit, "alice", "1-2")
    whole.about(RUN)
    whole.bytes_in, whole.bytes_out = 7, 1000
    whole.close("ok")
    whole.close("disconnect")
    early.close("too_large")
    audit.close()
    first, second = lines(tmp_path / "audit")
    keys = ("request_id", "store", "dataset", "program", "samples", "bytes_in", "bytes_out", "outcome")
    assert [first[key] for key in keys] == ["1-1", "images", OTHER, DIGEST, 6, 7, 1000, "ok"]
    assert [second[key] for key in keys] == ["1-2", None, None, None, 0, 0, 0, "too_large"]
    assert first["seconds"] >= 0


# --------------------------------------------------------------------------------------- a real server


@pytest.mark.slow
def test_a_server_writes_down_who_asked_for_what_and_how_it_ended(tmp_path):
    world, path = make_world(tmp_path / "store"), tmp_path / "audit.jsonl"
    text = f'audit_log = "audit.jsonl"\n[stores]\ndefault = "{world.store.uri}"\n'
    text += tenant("alice", "token-a", default=[""]) + tenant("bob", "token-b", default=["nothing"])

    def seen(count):
        return wait_for(lambda: (found := lines(path)) and len(found) >= count and found)

    with configured(tmp_path, text) as server:
        server.wait_ready()
        graph = world.program.graph_bytes
        program = program_head(len(graph)) + graph + bytes(world.program.weights_bytes)
        path_of_it = f"/v1/programs/{world.program.digest}"
        without = program_head(len(graph)) + graph  # as clients try first
        assert ask(server, "PUT", path_of_it, without, bearer("token-a"))[0] == 404
        assert ask(server, "PUT", path_of_it, program, bearer("token-a"))[0] == 201
        request = world.request((0, 1, 2, 3), (4, 5), stop=1)
        status, body = post_run(server, request, "token-a")
        assert status == 200
        seen(3)
        assert post_run(server, request, "token-b")[0] == 403
        seen(4)
        assert ask(server, "POST", "/v1/run", body_of(request), bearer("token-c"))[0] == 401
        first, upload, run, forbidden, stranger = seen(5)
        assert (first["who"], first["what"], first["outcome"]) == ("alice", "upload", "weights_wanted")
        assert (first["program"], first["bytes_in"]) == (world.program.digest, len(without))
        assert (upload["who"], upload["what"], upload["outcome"]) == ("alice", "upload", "ok")
        assert (upload["program"], upload["bytes_in"]) == (world.program.digest, len(program))
        assert (run["who"], run["what"], run["outcome"]) == ("alice", "run", "ok")
        assert (run["dataset"], run["store"]) == (world.dataset.digest, "default")
        assert (run["program"], run["samples"]) == (world.program.digest, 6)
        assert run["bytes_out"] == len(body)
        assert (forbidden["who"], forbidden["outcome"]) == ("bob", "forbidden")
        assert (stranger["who"], stranger["what"], stranger["status"]) == (None, "refused", 401)
        announced = {**bearer("token-a"), "Content-Length": "10000000000"}
        assert ask(server, "PUT", f"/v1/programs/{OTHER}", b"x" * 10, announced)[0] == 413
        line = seen(6)[5]
        assert (line["what"], line["outcome"], line["bytes_in"]) == ("upload", "too_large", 0)
        os.rename(path, tmp_path / "audit.1")
        os.kill(server.process.pid, signal.SIGHUP)
        wait_for(path.exists)
        assert ask(server, "GET", "/v1/info")[0] == 401
        assert [line["what"] for line in seen(1)] == ["refused"]
        assert server.stop() == 0
    everything = path.read_text() + (tmp_path / "audit.1").read_text()
    assert "token-" not in everything
    assert world.store.uri not in everything
