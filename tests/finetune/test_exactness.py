"""Check how exact a job is: bit for bit where a server proves it, else within a tolerance, decided once."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import upriver
from tests.finetune.conftest import Reference
from tests.finetune.training import BATCH, MICRO, optimizer_of, run, same, train
from tests.program.nets import frozen_small
from tests.server.running import free_port, wait_for
from upriver.control.server_choice import Health
from upriver.errors import ConfigError, NotExact
from upriver.pipeline import Dataset
from upriver.rpc.local_server import EmbeddedServer
from upriver.rpc.tolerance import FLOAT32, Agreement

ISA = "onednn_max_cpu_isa 'SSE41' there, '' here"


@pytest.fixture(scope="module")
def alike(data: Dataset) -> Iterator[str]:
    """Return the address of a server with this process's bits."""
    with EmbeddedServer.start({data.store.name: data.store.uri}, threads=1) as server:
        yield server.url


@pytest.fixture(scope="module")
def other(data: Dataset) -> Iterator[str]:
    """Return the address of a server with another instruction set."""
    with started_other(data) as server:
        yield server.url


def started_other(data: Dataset, *, port: int = 0) -> EmbeddedServer:
    """Start a server with another instruction set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")  # for the server only: this process has chosen already
        return EmbeddedServer.start({data.store.name: data.store.uri}, threads=1, port=port)


@contextlib.contextmanager
def begun(data: Dataset, *urls: str, **options: Any) -> Iterator[tuple[upriver.FinetuneJob, Any]]:
    model = frozen_small()
    given = {"batch_size": BATCH, "micro_batch": MICRO, "seed": 7, "policy": "freeze", **options}
    with upriver.connect(*urls) as near, near.finetune(model, data, **given) as job:
        yield job, model


@pytest.mark.full
def test_a_server_with_the_same_bits_serves_bit_for_bit(data: Dataset, plain: Reference, alike: str) -> None:
    losses, model, job = run(upriver.connect(alike), data, policy="freeze")
    assert same((losses, model), plain)
    assert job.exactness == "bit for bit"
    assert "bit for bit" in job.plan.why
    assert job.report.exact == "bitwise"
    assert job.report.tolerance is None
    assert job.state_dict()["exact"] == "bitwise"


def test_a_server_with_other_bits_serves_within_a_tolerance_that_is_stated(
    data: Dataset, plain: Reference, other: str
) -> None:
    losses, _, job = run(upriver.connect(other), data, policy="freeze")
    assert job.exactness == f"within {FLOAT32}, since {other} computes with other low bits: {ISA}"
    assert job.exactness in job.plan.why
    assert (job.report.exact, job.report.tolerance) == ("numeric", FLOAT32)
    assert set(job.report.samples) == {other}
    torch.testing.assert_close(torch.stack(losses), torch.stack(plain[0]), rtol=1e-3, atol=1e-4)
    assert not all(map(torch.equal, losses, plain[0]))


def test_equal_bits_that_no_server_gives_are_an_error_that_names_the_field(data: Dataset, other: str) -> None:
    with pytest.raises(NotExact, match=ISA), begun(data, other, exact="bitwise"):
        pass


@pytest.mark.full
def test_another_number_of_threads_is_another_fingerprint(data: Dataset) -> None:
    with upriver.connect(server_threads=2) as near:
        options: dict[str, Any] = {"batch_size": BATCH, "micro_batch": MICRO, "policy": "freeze"}
        with pytest.raises(NotExact, match="threads 2 there, 1 here"):
            near.finetune(frozen_small(), data, exact="bitwise", **options)
        with near.finetune(frozen_small(), data, **options) as job:
            assert "threads 2 there, 1 here" in job.exactness


@pytest.mark.full
def test_one_server_with_the_same_bits_keeps_the_others_out(
    data: Dataset, plain: Reference, alike: str, other: str
) -> None:
    for exact in ("auto", "bitwise"):
        losses, model, job = run(upriver.connect(other, alike), data, policy="freeze", exact=exact)
        assert same((losses, model), plain)
        assert job.exactness == "bit for bit"
        assert set(job.report.samples) == {alike}
        assert f"not used for now: {other} computes with other low bits" in job.plan.why


@pytest.mark.full
def test_servers_that_do_not_answer_leave_the_plain_way_whatever_is_asked_for(
    data: Dataset, plain: Reference
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    for exact in ("auto", "bitwise", "numeric"):
        with begun(data, url, exact=exact, policy="hapi") as (job, model):
            assert same((train(job, model, optimizer_of(model), epochs=2), model), plain)
            assert set(job.report.samples) == {"local"}
    with begun(data, url) as (job, _):
        assert job.exactness == "bit for bit so far: no server took part"
        assert job.state_dict()["exact"] is None


@pytest.mark.full
def test_a_server_that_answers_later_decides_before_its_first_answer_counts(
    data: Dataset,
) -> None:
    port = free_port()
    with begun(data, f"http://127.0.0.1:{port}") as (job, _):
        with started_other(data, port=port) as server:
            wait_for(lambda: job.servers[0].health is Health.UP)
            for _ in job:
                pass
            assert server.url in job.report.samples
        assert job.exactness.startswith("within")
        assert ISA in job.exactness


@pytest.mark.full
def test_a_resumed_job_keeps_its_mode(data: Dataset, plain: Reference, alike: str, other: str) -> None:
    with begun(data, other) as (job, _):
        next(iter(job))
        numeric = copy.deepcopy(job.state_dict())
    with begun(data, alike) as (job, _):
        assert job.exactness == "bit for bit"
        job.load_state_dict(numeric)
        assert job.exactness == f"within {FLOAT32}"
        assert job.state_dict()["exact"] == "numeric"
    with begun(data, alike) as (job, _):
        exactly = job.state_dict()
    with begun(data, other) as (job, model):
        job.load_state_dict(exactly)
        assert job.exactness == "bit for bit"
        assert "the job to resume was bit for bit" in job.plan.why
        assert same((train(job, model, optimizer_of(model), epochs=2), model), plain)
        assert set(job.report.samples) == {"local"}
    with (
        begun(data, alike, exact="bitwise") as (job, _),
        pytest.raises(ConfigError, match="its exact is 'numeric', this job's 'bitwise'"),
    ):
        job.load_state_dict(numeric)
    with begun(data, alike) as (job, _):
        older = {
            name: value for name, value in exactly.items() if name not in ("exact", "freeze_point", "frozen")
        }
        job.load_state_dict(older)


@given(
    exact=st.sampled_from(["auto", "bitwise", "numeric"]),
    events=st.lists(st.sampled_from(["prove", "try", "withdraw", "bitwise", "numeric"]), max_size=8),
)
def test_a_mode_is_decided_once_and_never_becomes_weaker(exact: Any, events: list[str]) -> None:
    """Only ``auto`` changes, once; only a state of an earlier job may loosen it later."""
    agreement, tried = Agreement(exact, FLOAT32), False
    for event in events:
        before = agreement.mode
        match event:
            case "prove":
                agreement.prove()
                assert agreement.mode == (before or ("numeric" if tried else "bitwise"))
            case "try":
                tried |= before is None
                assert agreement.try_tolerance("other bits") == (before != "bitwise")
                assert agreement.mode == before, "no server has passed"
            case "withdraw":
                tried = False
                agreement.withdraw()
                assert agreement.mode == before
            case mode:
                kept = agreement.resume(mode)  # type: ignore[arg-type]
                assert kept == (agreement.mode == mode)
                assert kept or agreement.mode == before
                assert kept or before == "numeric" or exact != "auto"
        assert exact == "auto" or agreement.mode == exact
        within = agreement.mode == "numeric" or (agreement.mode is None and tried)
        assert (agreement.allowed is not None) == within
