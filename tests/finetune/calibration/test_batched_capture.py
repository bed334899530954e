"""Check servers that may run several micro-batches at once: offered sizes, canaries, results."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import upriver
from tests.finetune.training import MICRO, grouped, optimizer_of, photos, run, same, train
from tests.program.nets import frozen_small
from tests.server.running import Running, running
from upriver.engine.engine import Engine
from upriver.engine.fingerprint import fingerprint
from upriver.engine.read import read_samples
from upriver.errors import (
    CaptureError,
    ConfigError,
    DoesNotFit,
    Overloaded,
    ServerUnavailable,
    UpriverError,
    WorkerCrashed,
)
from upriver.finetune.calibration import batched_capture
from upriver.finetune.calibration.local_canary import LocalCanary
from upriver.finetune.calibration.server_gate import JobRequirements, ServerGate
from upriver.finetune.options import JobOptions
from upriver.pipeline import Dataset
from upriver.program.graph.executor import Program
from upriver.program.split.resized import resized
from upriver.program.split.split import Split, split
from upriver.protocol import DEFAULT_CAPS, Info, Larger, RunRequest
from upriver.rpc.tolerance import FLOAT32, Agreement
from upriver.types import MicroBatch, Timings

SIZES = (2 * MICRO, 4 * MICRO)


def inputs(size: int) -> torch.Tensor:
    return torch.randn(size, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def parts() -> Split:
    return split(frozen_small(), inputs(MICRO))


@pytest.fixture(scope="module")
def programs(parts: Split) -> tuple[Program, ...]:
    return tuple(resized(frozen_small(), parts, inputs(size)) for size in SIZES)


def question_of(parts: Split, data: Dataset) -> JobRequirements:
    assert parts.program is not None
    return JobRequirements(dataset=data, program=parts.program, seed=7, on_bad_sample="fail")


# ------------------------------------------------------------------------------------------ offered sizes


@given(
    lengths=st.lists(st.integers(1, MICRO), min_size=1, max_size=12),
    sizes=st.lists(st.integers(2, 12), max_size=4, unique=True),
    stop=st.integers(-2, 3),
)
def test_a_request_offers_what_it_has_whole_micro_batches_for(
    parts: Split, offered_data: Dataset, lengths: list[int], sizes: list[int], stop: int
) -> None:
    offers = [Larger(program=f"{times:064x}", micro_batch=times * MICRO) for times in sorted(sizes)]
    batches = [tuple(range(length)) for length in lengths]
    request = question_of(parts, offered_data).request(batches, stop=stop, epoch=0, larger=offers)
    whole = sum(length == MICRO for length in lengths)
    wanted = [times * MICRO for times in sorted(sizes) if times <= whole and stop > 0]
    assert [each.micro_batch for each in request.larger] == wanted
    assert request.micro_batch == MICRO
    request.check(DEFAULT_CAPS)


@pytest.fixture(scope="module")
def offered_data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return photos(tmp_path_factory.mktemp("offered"), 50)


def options(**given: Any) -> JobOptions:
    fields = {"rows": range(5000), "batch_size": 64, "micro_batch": 8, "exact": "numeric", **given}
    return JobOptions.checked(**grouped(**fields))


def test_sizes_double_up_to_what_is_allowed() -> None:
    assert options().larger_sizes == ()
    assert options(adapt_batch=16).larger_sizes == (16,)
    assert options(adapt_batch=63).larger_sizes == (16, 32)
    assert options(adapt_batch=64).larger_sizes == (16, 32, 64)
    assert options(adapt_batch=4096, batch_size=4096, micro_batch=1).larger_sizes == tuple(
        2**power for power in range(1, 9)
    ), "no more than a request can name"
    assert options(adapt_batch=20, micro_batch="auto").larger_sizes == (), "16 was not the job's own yet"
    assert replace(options(adapt_batch=20, micro_batch="auto"), micro_batch=8).larger_sizes == (16,)


@pytest.mark.parametrize("bad", [-1, 1, 15, 65, 16.0, True, None, "auto"])
def test_what_is_no_size_is_named(bad: object) -> None:
    with pytest.raises(ConfigError, match=r"adapt_batch must be 0, or a whole number of .*, got") as caught:
        options(adapt_batch=bad)
    assert ("16..64" in str(caught.value)) == (bad in (1, 15, 65) and bad is not True)


def test_only_where_low_bits_may_differ_and_nothing_is_replayed(data: Dataset) -> None:
    fields: dict[str, Any] = {
        "batch_size": 32,
        "micro_batch": MICRO,
        "prefetch": upriver.Prefetch(adapt_batch=32),
    }
    near = upriver.connect()
    with pytest.raises(ConfigError, match=r"adapt_batch needs exact='numeric'.*got exact='auto'"):
        near.finetune(frozen_small(), data, **fields)
    placed = [{"epoch": 0, "index": 0, "source": "local", "cut": 0}]
    with pytest.raises(ConfigError, match="adapt_batch must be 0 to replay"):
        near.finetune(
            frozen_small(), data, **fields, exact="numeric", splitting=upriver.Splitting(replay=placed)
        )


# -------------------------------------------------------------------------------------------- captures


@pytest.mark.full
def test_sizes_that_no_server_takes_or_that_cannot_be_captured_are_left_out(
    parts: Split, data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def captured_at(model: Any, split: Any, example: torch.Tensor, *, autocast: Any) -> Any:
        if len(example) == 16:
            raise CaptureError("only eight at a time")
        return resized(model, split, example, autocast=autocast)

    monkeypatch.setattr(batched_capture, "resized", captured_at)
    told: list[str] = []
    found = batched_capture.captured(
        frozen_small(),
        data,
        parts,
        options(adapt_batch=64),
        caps=type(DEFAULT_CAPS)(samples=40),
        tell=told.append,
    )
    assert [program.micro_batch for program in found.programs] == [32]
    assert found.left_out == (
        (16, "only eight at a time"),
        (64, "a request has at most 40 samples there"),
    )
    assert told == [f"capturing the frozen part for {size} samples at once" for size in (16, 32)]
    assert batched_capture.notes(found.programs, found.left_out) == [
        "servers may run 32 samples at once, which changes low bits",
        "not 16 samples at once: only eight at a time",
        "not 64 samples at once: a request has at most 40 samples there",
    ]
    assert batched_capture.notes((), ()) == []


# ----------------------------------------------------------------------------------------------- tolerance


class Here:
    """A server that computes in this process; some sizes fail or give other results."""

    def __init__(self, data: Dataset, own: Program, *, url: str = "http://here:1") -> None:
        self.url, self.data = url, data
        self.programs = {own.digest: own}
        self.put: list[str] = []
        self.asked: list[int] = []
        self.wrong: dict[int, Any] = {}

    def info(self) -> Info:
        return Info(
            version=upriver.__version__,
            fingerprint=fingerprint("cpu"),
            stores=("default",),
            micro_batch=MICRO,
            caps=DEFAULT_CAPS,
            device="cpu",
            workers=1,
            threads=torch.get_num_threads(),
        )

    def has_program(self, digest: str) -> bool:
        return digest in self.programs

    def put_program(self, program: Program) -> None:
        self.put.append(program.digest)
        self.programs[program.digest] = program

    def run(self, request: RunRequest, batches: Sequence[MicroBatch] = ()) -> Answer:
        self.asked.append(request.micro_batch)
        assert request.larger == (), "a canary leaves no choice"
        wrong = self.wrong.get(request.micro_batch)
        if isinstance(wrong, Exception):
            raise wrong
        assert request.program is not None
        program = self.programs[request.program]
        engine = Engine(chain=self.data.chain, program=program, micro_batch=request.micro_batch)
        [ids] = request.micro_batches
        batch = engine.begin(
            read_samples(self.data, ids),
            ids,
            object_names=[ref.object for ref in self.data.locate(ids)],
            stop=0,
            seed=request.seed,
            epoch=request.epoch,
        )
        batch = engine.advance(batch, request.stop)
        return Answer(batch if wrong is None else wrong(batch))


class Answer:
    def __init__(self, batch: MicroBatch) -> None:
        self.batches = iter([(batch, Timings(phases={"forward": 1.0}))])

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def __iter__(self) -> Answer:
        return self

    def __next__(self) -> tuple[MicroBatch, Timings]:
        return next(self.batches)

    def close(self) -> None:
        pass


def gate_of(parts: Split, data: Dataset, programs: Sequence[Program], *, canary: int = MICRO) -> ServerGate:
    local = LocalCanary(
        engine=Engine(chain=data.chain, program=parts.program, micro_batch=MICRO),
        dataset=data,
        ids=tuple(range(canary)),
        freeze=parts.freeze,
        seed=7,
        on_bad_sample="fail",
    )
    gate = ServerGate(
        question_of(parts, data),
        local,
        reference=lambda: local.run()[0],
        agreement=Agreement("numeric", FLOAT32),
        values=parts.tail.values,
    )
    gate.larger = tuple(programs)
    return gate


def changed(batch: MicroBatch, rows: slice, by: float) -> MicroBatch:
    [tensor] = batch.tensors
    other = tensor.clone()
    other[rows] += by
    return replace(batch, tensors=(other,))


@pytest.mark.parametrize("canary", [MICRO, 3])
def test_what_passes_at_each_size_is_offered(
    parts: Split, programs: tuple[Program, ...], data: Dataset, canary: int
) -> None:
    """A canary smaller than a micro-batch, in a dataset of no more samples, is repeated as well."""
    assert parts.program is not None
    gate, server = gate_of(parts, data, programs, canary=canary), Here(data, parts.program)
    gate.prove_larger(server)  # type: ignore[arg-type]
    assert gate.offers == tuple(
        Larger(program=program.digest, micro_batch=size)
        for program, size in zip(programs, SIZES, strict=True)
    )
    assert server.asked == list(SIZES) and server.put == [program.digest for program in programs]
    assert gate.left_out == []


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda batch: changed(batch, slice(-1, None), 1.0), "features that are .* of the largest apart"),
        (lambda batch: changed(batch, slice(0, 1), torch.nan), "features that are .* apart"),
        (lambda batch: replace(batch, tensors=(batch.tensors[0][:MICRO],)), "another form than for 32"),
        (lambda batch: replace(batch, tensors=()), "another form than for 32"),
        (DoesNotFit("needs 9 GB"), "needs 9 GB"),
        (WorkerCrashed("out of memory"), "out of memory"),
    ],
)
def test_a_size_that_does_not_come_out_is_left_out_alone(
    parts: Split, programs: tuple[Program, ...], data: Dataset, wrong: Any, why: str
) -> None:
    assert parts.program is not None
    gate, server = gate_of(parts, data, programs), Here(data, parts.program)
    server.wrong[SIZES[1]] = wrong
    gate.prove_larger(server)  # type: ignore[arg-type]
    assert [offer.micro_batch for offer in gate.offers] == [SIZES[0]]
    [(size, reason)] = gate.left_out
    assert size == SIZES[1]
    assert re.search(why, reason), reason


@pytest.mark.parametrize("error", [ServerUnavailable("reset"), Overloaded("full")])
def test_what_is_about_the_server_says_nothing_of_a_size(
    parts: Split, programs: tuple[Program, ...], data: Dataset, error: UpriverError
) -> None:
    assert parts.program is not None
    gate, server = gate_of(parts, data, programs), Here(data, parts.program)
    server.wrong[SIZES[0]] = error
    with pytest.raises(type(error)):
        gate.prove_larger(server)  # type: ignore[arg-type]
    assert len(gate.offers) == 2


def test_a_server_that_joins_proves_every_size_and_one_that_has_just_done_so_does_not(
    parts: Split, programs: tuple[Program, ...], data: Dataset
) -> None:
    assert parts.program is not None
    gate = gate_of(parts, data, programs)
    first, second = (Here(data, parts.program, url=f"http://here:{n}") for n in (1, 2))
    gate.prove_larger(first)  # type: ignore[arg-type]
    gate.vouch(first.url)
    asked = list(first.asked)
    gate.admit(first)  # type: ignore[arg-type]
    assert first.asked == asked
    gate.admit(first)  # type: ignore[arg-type]
    assert first.asked == [*asked, MICRO, *SIZES], "it may be another process"
    second.wrong[SIZES[0]] = DoesNotFit("a small machine")
    gate.admit(second)  # type: ignore[arg-type]
    assert [offer.micro_batch for offer in gate.offers] == [SIZES[1]], "for nobody any more"


# -------------------------------------------------------------------------------------- real servers


@pytest.fixture(scope="module")
def adaptive(data: Dataset) -> Iterator[Running]:
    with running(data.store.uri, workers=1, admission="adaptive", min_batch=1) as server:
        yield server.wait_ready()


NUMERIC: dict[str, Any] = {
    "batch_size": 32,
    "micro_batch": MICRO,
    "exact": "numeric",
    "policy": "freeze",
    "prefetch": upriver.Prefetch(connections=1),
}


def adapting(size: int, **others: Any) -> dict[str, Any]:
    """Return arguments of a job whose servers may run so many samples at once."""
    return {**NUMERIC, "prefetch": upriver.Prefetch(connections=1, adapt_batch=size), **others}


@pytest.mark.slow
@pytest.mark.full
def test_a_server_runs_several_micro_batches_at_once_and_they_come_as_ever(
    data: Dataset, adaptive: Running
) -> None:
    model = frozen_small()
    with upriver.connect(adaptive.url) as near:
        with near.finetune(model, data, seed=7, **adapting(32)) as job:
            assert "servers may run 16 or 32 samples at once, which changes low bits" in job.plan.why
            assert job.window.micro_batches >= 8
            rows, passes = (adaptive.metric(f"upriver_forward_rows_{what}") for what in ("sum", "count"))
            losses = train(job, model, optimizer_of(model))
            rows = adaptive.metric("upriver_forward_rows_sum") - rows
            passes = adaptive.metric("upriver_forward_rows_count") - passes
            placed, report, state = job.placed, job.report, job.state_dict()
        alone, reference, _ = run(near, data, epochs=1, seed=7, **NUMERIC)
    assert rows == 200 and passes < 200 / MICRO / 2, "most went two or four together"
    assert [each.index for each in placed] == list(range(200 // MICRO))
    assert report.samples == {adaptive.url: 200} and report.retried == 0
    assert "adapt_batch" not in state
    torch.testing.assert_close(torch.stack(losses), torch.stack(alone), rtol=1e-3, atol=1e-4)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-3, atol=1e-4)


@pytest.mark.full
@pytest.mark.slow
def test_a_server_that_adapts_nothing_is_offered_it_in_vain(data: Dataset, near: upriver.Near) -> None:
    bitwise = {"batch_size": 16, "policy": "nosplit", "epochs": 1}
    wanted, reference, _ = run(near, data, **bitwise)
    losses, model, job = run(near, data, **adapting(16, batch_size=16), epochs=1)
    assert "servers may run 16 samples at once" in job.plan.why
    assert same((losses, model), (wanted, reference)), "this one's low bits are ours, at the job's own size"


@pytest.mark.slow
@pytest.mark.full
def test_a_size_that_a_server_does_not_give_near_enough_is_told_of(
    data: Dataset, adaptive: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ServerGate._at_size

    def at_size(gate: ServerGate, server: Any, batch: MicroBatch, size: int) -> tuple[torch.Tensor, ...]:
        found = real(gate, server, batch, size)
        return tuple(value + 1 for value in found) if size == 32 else found

    monkeypatch.setattr(ServerGate, "_at_size", at_size)
    with (
        upriver.connect(adaptive.url) as near,
        near.finetune(frozen_small(), data, **adapting(32)) as job,
    ):
        assert "servers may run 16 samples at once" in job.plan.why
        assert f"not 32 samples at once: {adaptive.url} gives features that are" in job.plan.why
        assert sum(len(targets) for _, targets in job) == 200


@pytest.mark.full
def test_without_servers_nothing_is_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        batched_capture, "resized", lambda *args, **kwargs: pytest.fail("captured for nobody")
    )
    data = photos(tmp_path, 32)
    for policy in ("nosplit", "freeze"):
        with (
            upriver.connect("http://127.0.0.1:9") as near,
            near.finetune(frozen_small(), data, **adapting(32, policy=policy)) as job,
        ):
            assert sum(len(targets) for _, targets in job) == 32
