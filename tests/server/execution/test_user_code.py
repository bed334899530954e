"""Test user code on a worker: its results equal those made here, and its errors are reported."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from tests.dataloader.toy_datasets import Divided, Noisy, Plain, same
from tests.examples import examples
from tests.server import workloads
from tests.server.running import (
    answering,
    ask,
    body_of,
    changed,
    messages,
    refused,
    running,
    wait_for,
)
from tests.server.test_drain import alive
from upriver.errors import (
    CodeFailed,
    ConfigError,
    DoesNotFit,
    Forbidden,
    Overloaded,
    ProtocolError,
    TooLarge,
    WorkerCrashed,
)
from upriver.pipeline.mapstyle import MapStyle
from upriver.protocol import (
    BY_DEFAULT,
    DEFAULT_CAPS,
    TRACE_CHARS,
    CodeRef,
    Collate,
    DatasetRef,
    End,
    Larger,
    RunRequest,
    decode_info,
    error_body,
    error_from,
    read_frame,
)
from upriver.protocol.tree import build, flatten
from upriver.rpc.client import ServerClient
from upriver.server import ServerConfig
from upriver.server.code_allowlist import check_code, check_found, require_allow
from upriver.server.execution import user_code, user_code_runs
from upriver.server.execution.run_context import ResolvedRequest
from upriver.server.ipc.messages import RunCode
from upriver.server.sandbox import environment
from upriver.server.scheduling.footprint import ANSWER_BYTES
from upriver.server.tenants import ANYONE
from upriver.text import error_text
from upriver.types import DONE, RAW, START, MicroBatch

NAME = workloads.NAME
OURS = (NAME, "tests.dataloader.toy_datasets")
MARK = (
    'import os\nfrom pathlib import Path\nPath(os.environ["MARK"]).write_text("imported")\n\n\nclass Data:\n'
)
MARK += "    def __getitem__(self, index):\n        return index\n"


def asking(name, *micro_batches, collate=None, numbers=None, arguments=None, **fields):
    """Make a request for samples of a dataset among the workloads, or elsewhere."""
    micro_batches = micro_batches or ((0, 1, 2),)
    if collate is not None:
        collate = Collate(name=collate, batches=tuple(numbers or range(len(micro_batches))))
    full = name if ":" in name else f"{NAME}:{name}"
    return RunRequest(
        **{
            "code": CodeRef(name=full, arguments=arguments or {}, collate=collate),
            "micro_batches": tuple(micro_batches),
            "micro_batch": max(map(len, micro_batches)),
            "start": START,
            "stop": DONE,
            "seed": 3,
            "epoch": 1,
            **fields,
        }
    )


def made(client, request, batches=()):
    """Return an answer's samples of each micro-batch, or each batch."""
    return [build(batch.tree, batch.tensors) for batch, _ in client.run(request, batches)]


def here(dataset, request, collate=None):
    """Make the same samples in this process."""
    source, found = MapStyle(dataset, request.seed), []
    for at, ids in enumerate(request.micro_batches):
        samples = [source.make(index, epoch=request.epoch, sample=index) for index in ids]
        if collate is not None:
            number = request.code.collate.batches[at]
            samples = source.join(samples, collate, epoch=request.epoch, batch=number)
        found.append(samples)
    return found


def read_here(dataset, request):
    """Return the micro-batches that are sent along for a dataset that is read here."""
    source = MapStyle(dataset, request.seed)
    for ids in request.micro_batches:
        raws = [source.make(sample, epoch=request.epoch, sample=sample, stop=RAW) for sample in ids]
        tree, tensors = flatten(raws)
        yield MicroBatch(ids=ids, position=RAW, tensors=tuple(tensors), tree=tree)


def failure(client, request, kind=CodeFailed, batches=()):
    """Return the error of an answer, which is one line."""
    with pytest.raises(kind) as caught:
        made(client, request, batches)
    assert type(caught.value) is kind
    said = str(caught.value)
    assert "\n" not in said and "Traceback" not in said and len(said) < 2000
    return said


@contextmanager
def working(allow=OURS, **settings):
    """Start a server; yield it with a client."""
    with running("", stores={}, allow=allow, **settings) as server, ServerClient(server.url) as client:
        yield server.wait_ready(), client


@pytest.fixture(scope="module")
def worker():
    with working(workers=2) as found:
        yield found


@pytest.fixture(scope="module")
def client(worker):
    return worker[1]


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """Write two modules that record where they are imported; return the path of the record."""
    (tmp_path / "marking.py").write_text(MARK)
    (tmp_path / "marking_too.py").write_text(MARK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    return tmp_path / "mark"


# ------------------------------------------------------------------------------------------ results


@pytest.mark.parametrize("kind", [Noisy, Divided, Plain])
@pytest.mark.full
def test_samples_are_those_that_would_be_made_here(client, kind):
    request = asking(kind.__name__, (0, 5, 22), (7,), (5, 5), arguments={"count": 23})
    answer = list(client.run(request))
    assert [batch.ids for batch, _ in answer] == list(request.micro_batches)
    assert all(batch.position == DONE and timings.phases["input"] > 0 for batch, timings in answer)
    assert same([build(batch.tree, batch.tensors) for batch, _ in answer], here(kind(23), request))


@settings(max_examples=examples(25), deadline=None)
@given(
    micro_batches=st.lists(
        st.lists(st.integers(0, 22), min_size=1, max_size=4).map(tuple), min_size=1, max_size=3
    ),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 2**63 - 1),
    how=st.sampled_from([None, BY_DEFAULT, f"{NAME}:drawing"]),
    number=st.integers(0, 2**48),
)
def test_whatever_is_asked_for_is_what_would_be_made_here(client, micro_batches, seed, epoch, how, number):
    numbers = [number] * len(micro_batches)
    request = asking("Noisy", *micro_batches, collate=how, numbers=numbers, seed=seed, epoch=epoch)
    collate = {None: None, BY_DEFAULT: default_collate}.get(how, workloads.drawing)
    assert same(made(client, request), here(Noisy(), request, collate))


def test_samples_that_are_read_here_are_computed_there(client):
    request = asking("Divided", (0, 5, 22), (7,), (5, 5), start=RAW)
    assert same(made(client, request, list(read_here(Divided(), request))), here(Divided(), request))
    whole = asking("Divided", (4, 2), (3,), start=RAW, collate=BY_DEFAULT, numbers=[9, 4])
    got = made(client, whole, list(read_here(Divided(), whole)))
    assert same(got, here(Divided(), whole, default_collate))


def test_what_was_sent_along_can_be_kept(client):
    first = None
    for sample in range(6):
        request = asking("Hoard", (sample,), start=RAW)
        ((kept, own),) = made(client, request, list(read_here(workloads.Hoard(), request)))[0]
        assert own == bytes([sample])
        first = kept if first is None or not same(kept["bytes"], first["bytes"]) else first
        number = kept["bytes"][0]
        assert torch.equal(kept["tensor"], torch.full((50_000,), number))
        assert np.array_equal(kept["array"], np.full(5, number))


@pytest.mark.parametrize(
    ("name", "collate"), [(BY_DEFAULT, default_collate), (f"{NAME}:drawing", workloads.drawing)]
)
def test_batches_are_collated_there_as_they_would_be_here(client, name, collate):
    request = asking("Noisy", (3, 1), (4, 4, 9), collate=name, numbers=[7, 2])
    assert same(made(client, request), here(Noisy(), request, collate))


def test_a_dataset_is_made_by_whatever_can_be_called(client):
    request = asking("Names.plain", arguments={"count": 4})
    assert same(made(client, request), here(Plain(4), request))
    request = asking("broken", (0, 2), arguments={"count": 4, "bad": [1]})
    assert same(made(client, request), here(Plain(4), request))


def test_several_datasets_side_by_side(client):
    requests = [
        asking("Noisy", (count,), arguments={"count": count}) for count in range(user_code.MAX_DATASETS + 3)
    ]
    requests += [asking("Divided", (1,)), asking("Plain", (1,), collate=BY_DEFAULT)]
    wanted = [here(Noisy(), request) for request in requests[:-2]]
    wanted += [here(Divided(), requests[-2]), here(Plain(), requests[-1], default_collate)]
    for _ in range(2):
        assert same([made(client, request) for request in requests], wanted)


def test_of_rows_of_a_large_tensor_no_more_is_sent_than_they_are(worker):
    server, client = worker
    before = server.metric("upriver_bytes_out_total")
    request = asking("Rows", (0, 4999), arguments={"count": 5000})
    assert same(made(client, request), here(workloads.Rows(5000), request))
    assert server.metric("upriver_bytes_out_total") - before < 64 << 10


@pytest.mark.full
def test_a_worker_says_what_it_allows(worker, server):
    allowed, none = (decode_info(ask(each, "GET", "/v1/info")[2]) for each in (worker[0], server))
    assert (allowed.allow, allowed.stores, allowed.worker_network) == (OURS, (), True)
    assert none.allow == ()


# ---------------------------------------------------------------------------------------- allowlist

ALLOW = ("my_package.data", "other:birds")


@pytest.mark.parametrize(
    ("name", "may"),
    [
        ("my_package.data:x", True),
        ("my_package.data:X.make", True),
        ("my_package.data.sub:x", True),
        ("my_package.database:x", False),
        ("my_package:x", False),
        ("my_package:data.x", False),
        ("other:birds", True),
        ("other:birds.wings", False),
        ("other:bird", False),
        ("other.birds:x", False),
        ("builtins:exec", False),
        ("my_package.data:_x", False),
        ("my_package.data:X._make", False),
        ("my_package.data:X.__init__", False),
        ("my_package.data._sub:x", False),
    ],
)
def test_names_are_allowed_as_packages_modules_and_callables(name, may):
    asked = [
        CodeRef(name=name),
        CodeRef(name="other:birds", collate=Collate(name=name, batches=(0,))),
    ]
    for code_ref in asked:
        if may:
            check_code(code_ref, ALLOW)
            continue
        with pytest.raises(Forbidden, match=name) as caught:
            check_code(code_ref, ALLOW)
        assert "underscore" in str(caught.value) or "my_package.data, other:birds" in str(caught.value)
    check_code(CodeRef(name="other:birds", collate=Collate(name=BY_DEFAULT, batches=(0,))), ALLOW)


@pytest.mark.parametrize("names", [("a b",), ("a.",), ("_a",), ("a:_b",), ("a:b:c",), ("",), (3,), "a.b"])
def test_what_an_operator_allows_is_names(names):
    with pytest.raises(ConfigError, match="allow"):
        require_allow(names)
    with pytest.raises(ConfigError, match="allow"):
        ServerConfig(stores={}, allow=names)


def test_without_code_there_must_be_a_store_and_with_it_no_bubblewrap():
    with pytest.raises(ConfigError, match="store"):
        ServerConfig(stores={})
    with pytest.raises(ConfigError, match="sandbox"):
        ServerConfig(stores={}, allow=ALLOW, sandbox="bubblewrap")
    with pytest.raises(ConfigError, match="token"):
        ServerConfig(stores={}, allow=ALLOW, host="0.0.0.0")
    assert ServerConfig(stores={}, allow=ALLOW, host="0.0.0.0", token="sesame").allow == ALLOW


def test_what_a_module_has_imported_is_not_allowed_along_with_it():
    class Callable:
        """Object of the module's own, which may hold any code."""

        def __call__(self):
            pass

    for steps in (
        [os, os.system],
        [workloads.run],
        [len],
        [Noisy],
        [Callable()],
        [partial(workloads.broken)],
        [],
    ):
        with pytest.raises(Forbidden, match="named"):
            check_found(f"{NAME}:x", steps, (NAME,))
    for steps in ([workloads.drawing], [workloads.Names], [workloads.Names, workloads.Names.plain]):
        check_found(f"{NAME}:x", steps, (NAME,))
    check_found(f"{NAME}:Noisy", [Noisy], OURS)
    for found in (workloads.run, Callable(), Noisy):
        check_found(f"{NAME}:x", [found], (f"{NAME}:x",))


def test_what_is_not_allowed_is_refused_before_it_is_imported(mark):
    with working(allow=(NAME, "marking:Data")) as (server, client):
        for name in ("marking_too:Data", "marking:Other", "marking:_Data", "os:system", f"{NAME}:_hidden"):
            for request in (asking(name), asking("Noisy", collate=name)):
                status, error = refused(server, body_of(request))
                assert (status, error["code"]) == (403, "forbidden")
                assert name in error["message"]
                assert f"{NAME}, marking:Data" in error["message"] or "underscore" in error["message"]
        assert not mark.exists()
        assert made(client, asking("marking:Data", (4,))) == [[4]]
        assert mark.read_text() == "imported"


def test_names_that_lead_elsewhere_are_refused_and_nothing_is_called(client, tmp_path):
    told = failure(client, asking("os.system", arguments={"command": f"touch {tmp_path}/x"}), Forbidden)
    assert "module os" in told
    told = failure(client, asking("run", arguments={"args": ["touch", f"{tmp_path}/x"]}), Forbidden)
    assert "comes from subprocess" in told
    assert not (tmp_path / "x").exists()


def test_a_server_without_code_says_who_runs_it(server):
    status, error = refused(server, body_of(asking("Noisy")))
    assert (status, error["code"]) == (403, "forbidden")
    assert f"upriver worker --allow {NAME}:Noisy" in error["message"]


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("nowhere", {}, f"there is no {NAME}:nowhere here: AttributeError: "),
        ("Names.nowhere", {}, f"there is no {NAME}:Names.nowhere here: AttributeError: "),
        ("NOT_CALLABLE", {}, f"{NAME}:NOT_CALLABLE must be callable, got int"),
        ("Nothing", {}, f"{NAME}:Nothing cannot be made: ConfigError: dataset must be map-style"),
        ("Noisy", {"size": 3}, f"{NAME}:Noisy cannot be made: TypeError: "),
        ("Unmade", {}, f"{NAME}:Unmade cannot be made: PermissionError: cannot log in with"),
        ("Unmade", {"leave": True}, f"{NAME}:Unmade cannot be made: SystemExit: 3"),
    ],
)
def test_a_dataset_that_cannot_be_made(client, name, arguments, said):
    assert failure(client, asking(name, arguments=arguments)).startswith(said)


@pytest.mark.full
def test_a_module_that_cannot_be_imported(tmp_path, monkeypatch):
    (tmp_path / "half.py").write_text("def make(:\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with working(allow=("half", "no_such_package")) as (_, client):
        told = failure(client, asking("no_such_package.data:x"))
        assert told == (
            "no_such_package.data cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"
        )
        assert failure(client, asking("half:make")).startswith("half cannot be imported: SyntaxError: ")


def test_a_sample_that_raises_is_told_in_one_line(client):
    request = asking("broken", (0, 1), (2, 3), arguments={"count": 9, "bad": [3]})
    with client.run(request) as answer:
        first, _ = next(answer)
        assert same(build(first.tree, first.tensors), here(Plain(9), request)[0])
        with pytest.raises(CodeFailed) as caught:
            next(answer)
    assert str(caught.value) == f"{NAME}:broken, sample 3: LookupError: sample 3 is gone"
    whole = asking("broken", (2, 3), arguments={"count": 9, "bad": [3]}, collate=BY_DEFAULT)
    assert failure(client, whole) == f"{NAME}:broken, sample 3: LookupError: sample 3 is gone"


@pytest.mark.parametrize(
    ("sample", "kind", "said"),
    [
        (0, CodeFailed, f"{NAME}:Odd, sample 0: ['image'] is a PIL.Image.Image, which cannot be sent"),
        (1, CodeFailed, f"{NAME}:Odd, sample 1: ValueError: one twoxxx"),
        (2, CodeFailed, f"{NAME}:Odd, sample 2: Mute: (what it says cannot be read)"),
        (
            3,
            CodeFailed,
            f"{NAME}:Odd, sample 3: the sample is a builtins.str with half a surrogate pair, which cannot",
        ),
        (4, CodeFailed, f"{NAME}:Odd, sample 4: SystemExit: 1"),
        (5, Overloaded, "a worker ran out of memory on this"),
        (6, TooLarge, f"{NAME}:Odd: an answer has at most 1024 tensors"),
        (7, TooLarge, "the header of an answer has at most 1048576 bytes"),
    ],
)
def test_what_is_wrong_with_a_sample_is_told(worker, sample, kind, said):
    server, client = worker
    assert failure(client, asking("Odd", (9, sample)), kind).startswith(said)
    assert made(client, asking("Odd", (9,))) == [[9]]
    assert server.metric("upriver_worker_restarts_total") == 0


def test_what_goes_wrong_with_collating_is_told(client):
    request = asking("Plain", (1, 2), collate=f"{NAME}:failing", numbers=[6])
    assert failure(client, request) == f"{NAME}:Plain, batch 6 collated by {NAME}:failing: KeyError: 'label'"
    request = asking("Plain", collate=f"{NAME}:nowhere")
    assert failure(client, request).startswith(f"there is no {NAME}:nowhere here")
    request = asking("Odd", (0, 0), collate=f"{NAME}:Names.plain")
    assert "collated by" in failure(client, request)


def test_a_part_that_the_dataset_does_not_have_is_told(client):
    request = asking("Noisy", (1,), start=RAW)
    tree, tensors = flatten([b"raw"])
    sent = MicroBatch(ids=(1,), position=RAW, tensors=tuple(tensors), tree=tree)
    assert "Noisy has no stretch" in failure(client, request, batches=[sent])


@pytest.mark.full
@pytest.mark.slow
def test_a_dataset_that_kills_its_process_takes_nothing_with_it(tmp_path):
    note = tmp_path / "child"
    with working() as (server, client):
        request = asking("Killer", (0, 1), arguments={"bad": [1], "note": str(note)})
        assert "exit code 7" in failure(client, request, WorkerCrashed)
        wait_for(lambda: server.metric("upriver_worker_restarts_total") == 2)
        server.wait_workers()
        assert made(client, changed(request, micro_batches=((0, 2),))) == [[0, 2]]
        child = int(note.read_text())
        wait_for(lambda: not alive(child))


@pytest.mark.slow
@pytest.mark.full
def test_a_sample_that_takes_for_ever_is_given_up():
    with working(workers=2, job_timeout_s=6) as (server, client):  # one worker is ready for the second try
        request = asking("Slow", (0, 1), arguments={"seconds": 3600, "only": [1]})
        assert "timed out" in failure(client, request, WorkerCrashed)
        assert server.metric("upriver_worker_restarts_total", 'reason="timeout"') == 2
        server.wait_workers()
        assert made(client, changed(request, micro_batches=((0, 2),))) == [[0, 2]]


# -------------------------------------------------------------------------------- invalid requests


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"on_bad_sample": "skip"}, "never skipped"),
        ({"larger": (Larger(program="0" * 64, micro_batch=6),)}, "larger"),
        ({"start": 0}, "code runs from"),
        ({"stop": 1}, "code runs from"),
        ({"program": "0" * 64}, "not both"),
        ({"dataset": DatasetRef(store="default", digest="0" * 64)}, "not both"),
        ({"code": CodeRef(name=f"{NAME}:Noisy", arguments={"x": "y" * (64 << 10)})}, "arguments"),
        (
            {"code": CodeRef(name=f"{NAME}:Noisy", collate=Collate(name=BY_DEFAULT, batches=(1, 2)))},
            "each of 1 batches",
        ),
    ],
)
def test_requests_that_cannot_be_meant(worker, change, said):
    request = changed(asking("Noisy"), **change)
    with pytest.raises(ProtocolError, match=said):
        request.check(DEFAULT_CAPS)
    status, error = refused(worker[0], body_of(request))
    assert (status, error["code"]) == (400, "protocol")
    assert said in error["message"]


@pytest.mark.parametrize("name", ["x", "a:b:c", "a:b c", "a.:b", "1:b", "a:b\n", "default"])
def test_names_of_another_form(worker, name):
    request = changed(asking("Noisy"), code=CodeRef(name=name))
    status, error = refused(worker[0], body_of(request))
    assert (status, error["code"]) == (400, "protocol")


def test_a_batch_may_have_more_samples_than_a_frame_tensors():
    asking("Noisy", tuple(range(DEFAULT_CAPS.tensors + 1)), collate=BY_DEFAULT).check(DEFAULT_CAPS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tree": None}, "must be a list of 2 samples"),
        ({"tree": ["t", 0]}, "must be a list of 2 samples"),
        ({"tree": ["l", 1]}, "must be a list of 2 samples"),
        ({"ids": (1, 3)}, "must hold samples"),
        ({"position": START}, "must hold samples"),
    ],
)
def test_what_is_sent_along_is_a_sample_for_each_id(worker, change, said):
    request = asking("Divided", (1, 2), start=RAW)
    (sent,) = read_here(Divided(), request)
    status, error = refused(worker[0], body_of(request, replace(sent, **change)))
    assert (status, error["code"]) == (400, "protocol")
    assert said in error["message"]


def test_no_more_and_no_less_is_sent_than_announced(worker, server):
    request = asking("Divided", (1, 2), start=RAW)
    (sent,) = read_here(Divided(), request)
    status, error = refused(worker[0], body_of(request))
    assert (status, error["message"]) == (400, "1 data frames were announced, got 0")
    for body in (body_of(request, sent, sent), body_of(changed(request, start=START), sent)):
        status, error = refused(worker[0], body)
        assert (status, error["message"]) == (400, "more data frames than announced")
    tensors = RunRequest(micro_batches=((1, 2),), micro_batch=2, start=0, stop=0)
    status, error = refused(server, body_of(tensors, replace(sent, position=0)))
    assert status == 400
    assert "only samples for a user's code" in error["message"]


def test_what_is_sent_along_and_is_no_sample_is_told(client):
    request = asking("Divided", (1, 2), start=RAW)
    (sent,) = read_here(Divided(), request)
    for tree in (["l", ["t", 7], 1], ["l", ["x"], 1], ["l", ["b", 0], {}]):
        failure(client, request, ProtocolError, batches=[replace(sent, tree=tree)])
    assert same(made(client, request, [sent]), here(Divided(), request))


# ------------------------------------------------------------------------------------------- memory


@pytest.mark.full
def test_an_answer_may_take_more_than_was_thought(tmp_path):
    with working(code_bytes=1 << 20) as (server, client):
        request = asking("Large", (0, 1), (2,), arguments={"nbytes": 24 << 20})
        for _ in range(2):
            assert same(made(client, request), here(workloads.Large(24 << 20), request))
        wait_for(lambda: server.metric("upriver_running_requests") == 0)
        idle = server.metric("upriver_memory_reserved_bytes")
        slow = asking("Slow", (0, 1), (2, 3), arguments={"seconds": 5, "only": [3]})
        with answering(server, slow) as response:
            read_frame(response)
            assert server.metric("upriver_memory_reserved_bytes") - idle == (1 << 20) + ANSWER_BYTES
            assert isinstance(messages(response)[-1], End)


@pytest.mark.full
def test_an_answer_that_finds_no_room_is_refused_and_the_worker_goes_on():
    with working(memory_budget_bytes=520 << 20, code_bytes=1 << 20) as (server, client):
        told = failure(client, asking("Large", (0, 1), arguments={"nbytes": 100 << 20}), DoesNotFit)
        assert "of memory, and the server has" in told
        assert made(client, asking("Odd", (9,))) == [[9]]
        assert server.metric("upriver_worker_restarts_total") == 0


@pytest.mark.full
def test_a_request_for_more_than_there_is_never_waits():
    with working(memory_budget_bytes=520 << 20, code_bytes=600 << 20) as (server, _):
        status, error = refused(server, body_of(asking("Noisy")))
        assert (status, error["code"]) == (413, DoesNotFit.code)


def asked(request, *batches, body_nbytes=0):
    return ResolvedRequest(
        request=request,
        tenant=ANYONE,
        dataset=None,
        batches=batches,
        known={},
        deadline=0.0,
        body_nbytes=body_nbytes,
    )


def kind(request):
    return user_code_runs.WorkloadKind.of(user_code_runs.code_run(asked(request), request.code, 0))


def test_what_was_seen_is_held_from_the_start():
    answers, most = user_code_runs.LargestAnswers(1000), 10**9
    one, other = asking("Noisy"), asking("Noisy", arguments={"count": 4})
    assert answers.bytes_of(asked(one), one.code, most_bytes=most) == ANSWER_BYTES + 1000
    answers.saw(kind(one), 50_000)
    answers.saw(kind(one), 20)
    assert answers.bytes_of(asked(one), one.code, most_bytes=most) == ANSWER_BYTES + 150_000
    for same_size in (other, asking("Noisy", collate=BY_DEFAULT), asking("Plain")):
        assert answers.bytes_of(asked(same_size), same_size.code, most_bytes=most) == ANSWER_BYTES + 1000
    again = asking("Noisy", (4,), seed=9, epoch=7)
    assert answers.bytes_of(asked(again), again.code, most_bytes=most) == ANSWER_BYTES + 150_000


def test_what_was_sent_counts_and_what_was_seen_keeps_nobody_away():
    answers, request = user_code_runs.LargestAnswers(1000), asking("Divided", (1,), (2,), start=RAW)
    sent = [
        MicroBatch(ids=(1,), position=RAW, tensors=(torch.zeros(size),), tree=["l"]) for size in (10, 999)
    ]
    found = answers.bytes_of(asked(request, *sent), request.code, most_bytes=10**9)
    assert found == ANSWER_BYTES + 3 * 4 * 999
    answers.saw(kind(request), 10**9)
    for most, body in ((ANSWER_BYTES + 10**6, 0), (ANSWER_BYTES + 10**6, 5000)):
        found = answers.bytes_of(asked(request, body_nbytes=body), request.code, most_bytes=most)
        assert found == most - body
    assert answers.bytes_of(asked(request), request.code, most_bytes=5) == ANSWER_BYTES + 1000


def test_kinds_that_were_seen_long_ago_are_forgotten(monkeypatch):
    monkeypatch.setattr(user_code_runs, "MAX_KINDS", 2)
    answers, requests = (
        user_code_runs.LargestAnswers(1),
        [asking("Noisy", arguments={"count": n}) for n in range(3)],
    )
    for request in requests:
        answers.saw(kind(request), 1000)
    found = [answers.bytes_of(asked(each), each.code, most_bytes=10**9) - ANSWER_BYTES for each in requests]
    assert found == [1, 3000, 3000]


# ---------------------------------------------------------------------------------------- permissions


def test_a_dataset_sees_what_the_user_does_but_for_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("UPRIVER_TOKEN", "the-servers-own")
    monkeypatch.setenv("SWIFT_SECRET", "of-a-store")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with working(hidden_variables=["SWIFT_SECRET"]) as (_, client):
        (((seen,),),) = [made(client, asking("Surroundings", (0,), arguments={"folder": str(tmp_path)}))]
    environment = seen["environment"]
    assert environment["SOME_SECRET"] == "known to the front alone"  # it is the user's, as this code is
    assert not {"UPRIVER_TOKEN", "SWIFT_SECRET"} & environment.keys()
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["PATH"] == os.environ["PATH"]
    assert (seen["working directory"], seen["network"]) == (os.getcwd(), os.readlink("/proc/self/ns/net"))
    assert (tmp_path / "written").stat().st_size == 4096
    assert (seen["threads"], seen["child"], seen["gradients"]) == (1, -signal.SIGTERM, True)


def test_modules_are_found_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = environment.code_environment({"PYTHONPATH": "/x", "HOME": "/me"}, threads=2)
    assert seen["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)
    assert (seen["HOME"], seen["MKL_NUM_THREADS"]) == ("/me", "2")
    assert "PYTHONDONTWRITEBYTECODE" not in seen


@pytest.mark.full
def test_what_runs_is_finished_before_a_worker_ends():
    with working(grace_s=60) as (server, _):
        slow = {"seconds": 5, "only": [1]}
        request = asking("Slow", *((number,) for number in range(8)), arguments=slow)
        workers = server.wait_workers()
        with answering(server, request) as response:
            found = [read_frame(response)]
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: ask(server, "GET", "/readyz")[0] == 503)
            status, error = refused(server, body_of(request))
            assert (status, error["code"]) == (503, "overloaded")
            found += messages(response)
        batches = [each for each in found if isinstance(each, MicroBatch)]
        assert [build(batch.tree, batch.tensors) for batch in batches] == [[number] for number in range(8)]
        assert server.process.wait(timeout=60) == 0
        assert not any(map(alive, workers))


@pytest.mark.full
def test_the_audit_log_has_the_name_and_no_argument(tmp_path):
    path = tmp_path / "audit.jsonl"
    with working(audit_log=str(path)) as (server, client):
        arguments = {"password": "open-sesame"}
        failure(client, asking("Unmade", arguments=arguments))
        made(client, asking("Plain", (0, 1), (2,)))
        refused(server, body_of(asking("os:system")))
        found = wait_for(lambda: (lines := path.read_text().splitlines()) and len(lines) == 3 and lines)
    assert "open-sesame" not in path.read_text()
    lines = {line["dataset"]: line for line in map(json.loads, found)}
    for name, sent, outcome in (
        (f"{NAME}:Unmade", arguments, "code_failed"),
        (f"{NAME}:Plain", {}, "ok"),
        ("os:system", {}, "forbidden"),
    ):
        line = lines[name]
        assert line["arguments"] == hashlib.sha256(msgspec.json.encode(sent)).hexdigest()
        assert (line["outcome"], line["samples"], line["store"], line["program"]) == (outcome, 3, None, None)


# ------------------------------------------------------------------------------------ in one process


def test_a_traceback_is_logged_without_secrets(capfd):
    for arguments in ({"password": "open-sesame"}, {"password": "open-sesame", "later": True}):
        run = RunCode(
            name=f"{NAME}:Unmade", arguments=msgspec.json.encode(arguments), start=START, ids=(0,), slot=0
        )
        with pytest.raises(CodeFailed, match="open-sesame"):  # its client's own
            user_code.UserCode((NAME,)).make(run, None)
        logged = capfd.readouterr().err
        assert "Traceback" in logged and "PermissionError: cannot log in with ***" in logged
        assert "open-sesame" not in logged


def test_a_traceback_is_told_in_its_last_lines_without_secrets(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sk-123456789")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    for name, arguments in (
        ("Unmade", {"password": "open-sesame"}),
        ("Endless", {"variable": "SOME_API_KEY"}),
        ("Endless", {"variable": "TOKENIZERS_PARALLELISM", "chars": 100_000}),
    ):
        run = RunCode(
            name=f"{NAME}:{name}", arguments=msgspec.json.encode(arguments), start=START, ids=(0,), slot=0
        )
        with pytest.raises(CodeFailed) as caught:
            user_code.UserCode((NAME,)).make(run, None)
        told = error_from(msgspec.json.decode(msgspec.json.encode(error_body(caught.value))))
        assert isinstance(told, CodeFailed)
        assert (str(told), told.trace) == (str(caught.value), caught.value.trace)
        assert len(told.trace) <= TRACE_CHARS and "workloads.py" in told.trace
        assert not {"open-sesame", "sk-123456789"} & set(told.trace.split())
        assert "sk-123456789" not in str(told)
    assert "false" in told.trace and "…" in told.trace


def test_a_traceback_of_anybodys_is_held_to_ours():
    body = {"error": {"code": "code_failed", "message": "x"}}
    assert error_from(body).trace == ""  # from a worker of an earlier version
    body["error"] |= {"traceback": "first\n" + "\x1b[2Jline\tof\udc00code\n" * 10_000 + "last\n"}
    trace = error_from(body).trace
    assert len(trace) <= TRACE_CHARS and trace.startswith("…\n") and trace.endswith("\nlast")
    assert set(trace.split("\n")[1:-1]) == {"?[2Jline    of?code"}
    assert error_from(error_body(error_from(body))).trace == trace
    body["error"]["traceback"] = ["no", "text"]
    assert isinstance(error_from(body), ProtocolError)


def test_text_that_is_called_a_secret_is_found_however_deep():
    arguments = {
        "root": "/data/birds",
        "token": "token-1",
        "store": {"secret_access_key": "secret-1", "region": "eu-1", "more": [{"password": "secret-2"}]},
        "auth": {"tokens": ["token-2", 5, None, "abc"]},
    }
    assert set(user_code._secrets(arguments)) == {"token-1", "secret-1", "secret-2", "token-2"}


def test_errors_in_words():
    assert error_text(ValueError("one\n two")) == "ValueError: one two"
    assert error_text(KeyError()) == "KeyError"
    assert error_text(workloads.Mute()) == "Mute: (what it says cannot be read)"
    assert len(error_text(ValueError("x" * 10_000))) == 500
