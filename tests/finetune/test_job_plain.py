"""Check the plain path: a job without a server, straight from the store."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import upriver
from tests.finetune.training import BATCH, MICRO, STAGES, grouped, optimizer_of, photos, png, run, same, train
from tests.program.nets import Mixing, Small, freeze, frozen_small
from upriver.engine.engine import Engine
from upriver.engine.read import read_samples
from upriver.errors import BadSample, ConfigError, FrozenChanged, ModelError, NotExact
from upriver.finetune.job import ABSENT
from upriver.finetune.prefetch.sampler import epoch_order


def test_an_epoch_delivers_every_sample_once_in_the_order_of_seed_and_epoch(tmp_path: Path) -> None:
    data = photos(tmp_path)
    with upriver.connect().finetune(
        frozen_small(), data, batch_size=BATCH, micro_batch=MICRO, seed=7, policy="nosplit"
    ) as job:
        for epoch in range(2):
            targets = torch.cat([targets for _, targets in job])
            order = epoch_order(50, seed=7, epoch=epoch, batch_size=BATCH, micro_batch=MICRO, shuffle=True)
            assert Counter(order.ids) == Counter(range(50))
            assert torch.equal(targets, data.targets[list(order.ids)])
        assert len(job) == 5
        assert job.report.samples == {"local": 100}


def test_features_are_those_of_the_engine_for_each_micro_batch(tmp_path: Path) -> None:
    data = photos(tmp_path, 20)
    model = frozen_small()
    with upriver.connect().finetune(
        model,
        data,
        batch_size=20,
        micro_batch=MICRO,
        sampling=upriver.Sampling(shuffle=False),
        policy="nosplit",
    ) as job:
        [(features, _)] = list(job)
        program = job._split.program
        engine = Engine(chain=data.chain, program=program, micro_batch=MICRO)
        wanted = []
        for ids in ((0, 1, 2, 3, 4, 5, 6, 7), (8, 9, 10, 11, 12, 13, 14, 15), (16, 17, 18, 19)):
            batch = engine.begin(
                read_samples(data, ids), ids, object_names=[""] * len(ids), stop=0, seed=0, epoch=0
            )
            wanted.append(engine.advance(batch, job._split.freeze).tensors[0][: len(ids)])
    assert torch.equal(features, torch.cat(wanted))


@pytest.mark.full
def test_a_vanilla_loop_agrees_within_tolerance(tmp_path: Path) -> None:
    """The vanilla loop has the same frozen part in eval, full batches, and PyTorch's own DataLoader."""
    data = photos(tmp_path)
    ours, _, _ = run(upriver.connect(), data, policy="nosplit", epochs=2)
    model = frozen_small()
    optimizer = optimizer_of(model)
    theirs = []
    for epoch in range(2):
        order = epoch_order(50, seed=7, epoch=epoch, batch_size=BATCH, micro_batch=MICRO, shuffle=True)

        class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
            def __len__(self) -> int:
                return 50

            def __getitem__(self, row: int, epoch: int = epoch) -> tuple[torch.Tensor, int]:
                engine = Engine(chain=data.chain, program=None, micro_batch=1)
                batch = engine.begin(
                    read_samples(data, [row]), [row], object_names=[""], stop=0, seed=7, epoch=epoch
                )
                return batch.tensors[0][0], int(data.targets[row])

        for inputs, targets in torch.utils.data.DataLoader(
            Samples(), batch_size=BATCH, sampler=list(order.ids)
        ):
            model.train()
            for name in ("stem", "block1", "pool", "block2"):
                model.get_submodule(name).eval()
            torch.manual_seed(len(theirs))
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            theirs.append(loss.detach())
    torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_two_runs_are_equal_and_another_seed_is_not(tmp_path: Path) -> None:
    data = photos(tmp_path)
    first = run(upriver.connect(), data, policy="nosplit")
    assert same(
        first[:2],
        run(upriver.connect(), data, policy="nosplit", prefetch=upriver.Prefetch(num_workers=5))[:2],
    )
    assert not same(first[:2], run(upriver.connect(), data, policy="nosplit", seed=8)[:2])


def test_resuming_after_any_step_gives_the_rest_of_the_uninterrupted_run(tmp_path: Path) -> None:
    """Two epochs of five steps; a fresh job resumes from the state after each step."""
    data = photos(tmp_path)
    options = {"batch_size": BATCH, "micro_batch": MICRO, "seed": 7, "policy": "nosplit"}
    model = frozen_small()
    optimizer = optimizer_of(model)
    near = upriver.connect()
    saved: list[tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, Any]]] = []

    def save(_done: int) -> None:
        saved.append(
            (job.state_dict(), copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()))
        )

    with near.finetune(model, data, **options) as job:
        save(0)
        losses = train(job, model, optimizer, epochs=2, after_step=save)
    assert len(losses) == 10
    again = frozen_small(seed=99)
    again.load_state_dict(saved[0][1])
    with near.finetune(again, data, **options) as fresh:
        for step in (3, *range(10)):
            fresh.load_state_dict(saved[step][0])
            again.load_state_dict(saved[step][1])  # this loads the frozen ones too, with the values they have
            optimizer = optimizer_of(again)
            optimizer.load_state_dict(copy.deepcopy(saved[step][2]))
            rest = train(fresh, again, optimizer, epochs=1 + (step < 5), first=step)
            assert len(rest) == len(losses) - step
            assert all(map(torch.equal, losses[step:], rest))
            assert same((losses, model), (losses, again))


@pytest.mark.full
def test_a_job_that_went_back_can_be_replayed(tmp_path: Path) -> None:
    data = photos(tmp_path)
    options = {"batch_size": BATCH, "micro_batch": MICRO, "seed": 7}
    near = upriver.connect()
    with near.finetune(frozen_small(), data, **options, policy="nosplit") as job:
        steps = iter(job)
        next(steps)
        state = job.state_dict()
        for _ in range(2):
            next(steps)
        whole = [features for _ in range(2) for features, _ in job]
        job.load_state_dict(state)
        assert len(list(job)) == 4
    assert [(p.epoch, p.index) for p in job.placed] == [(e, i) for e in range(3) for i in range(7)]
    with near.finetune(
        frozen_small(), data, **options, splitting=upriver.Splitting(replay=job.placed)
    ) as again:
        list(again)
        assert all(map(torch.equal, whole, [features for _ in range(2) for features, _ in again]))


def test_a_break_begins_the_next_epoch(tmp_path: Path) -> None:
    data = photos(tmp_path, 24)
    with upriver.connect().finetune(
        frozen_small(), data, batch_size=8, micro_batch=MICRO, policy="nosplit"
    ) as job:
        for _ in job:
            break
        assert (job.state_dict()["epoch"], job.state_dict()["step"]) == (0, 1)
        targets = torch.cat([targets for _, targets in job])
        second = epoch_order(24, seed=0, epoch=1, batch_size=8, micro_batch=MICRO, shuffle=True)
        assert torch.equal(targets, data.targets[list(second.ids)])


def test_a_state_of_another_job_is_refused_by_name(tmp_path: Path) -> None:
    data = photos(tmp_path, 16)
    near = upriver.connect()
    with near.finetune(frozen_small(), data, batch_size=8, micro_batch=MICRO, policy="nosplit") as job:
        state = job.state_dict()
    with near.finetune(
        frozen_small(), data, batch_size=8, micro_batch=MICRO, seed=1, policy="nosplit"
    ) as job:
        with pytest.raises(ConfigError, match="seed"):
            job.load_state_dict(state)
        with pytest.raises(ConfigError, match="step"):
            job.load_state_dict({**state, "seed": 1, "step": 99})
        fields = ", ".join(sorted(state.keys() - ABSENT.keys()))
        with pytest.raises(ConfigError, match=rf"not the state of a fine-tuning job: it has no {fields}$"):
            job.load_state_dict({})
        with pytest.raises(ConfigError, match=r"it has no seed; it has 3, steps$"):
            job.load_state_dict({key: state[key] for key in state if key != "seed"} | {"steps": 1, 3: 4})  # type: ignore[dict-item]


TRUNCATED = png(3)[:200]


def test_a_bad_sample_is_an_error_that_names_object_and_sample(tmp_path: Path) -> None:
    data = photos(tmp_path, 30, bad={17: TRUNCATED})
    with (
        upriver.connect().finetune(
            frozen_small(),
            data,
            batch_size=10,
            micro_batch=4,
            sampling=upriver.Sampling(shuffle=False),
            policy="nosplit",
        ) as job,
        pytest.raises(BadSample) as caught,
    ):
        list(job)
    [row] = [i for i in range(30) if "017" in data.locate([i])[0].object]
    assert caught.value.sample == row
    assert "017.png" in str(caught.value)


def test_skipping_counts_bad_samples_and_changes_no_other_row(tmp_path: Path) -> None:
    good = photos(tmp_path / "a", 30)
    data = photos(tmp_path / "b", 30, bad={17: TRUNCATED, 4: b"."})
    options = {"batch_size": 10, "micro_batch": 4, "policy": "nosplit"}
    with upriver.connect().finetune(
        frozen_small(), good, sampling=upriver.Sampling(shuffle=False), **options
    ) as job:
        wanted = torch.cat([features for features, _ in job])
    with upriver.connect().finetune(
        frozen_small(), data, sampling=upriver.Sampling(shuffle=False, on_bad_sample="skip"), **options
    ) as job:
        rows = list(job)
        skipped = job.report.skipped
    bad = sorted(i for i in range(30) if any(n in data.locate([i])[0].object for n in ("017", "004")))
    kept = [i for i in range(30) if i not in bad]
    assert sorted(skipped) == bad
    assert torch.equal(torch.cat([features for features, _ in rows]), wanted[kept])
    assert torch.equal(torch.cat([targets for _, targets in rows]), data.targets[kept])
    assert sum(len(targets) for _, targets in rows) == 28


def test_a_model_that_mixes_samples_runs_unsplit_and_says_so(tmp_path: Path) -> None:
    store = upriver.Store.open(tmp_path.as_uri())
    for number in range(16):
        import io

        import numpy as np

        out = io.BytesIO()
        np.save(out, np.random.default_rng(number).normal(size=6).astype("float32"))
        store.put(f"x/{number % 2}/{number:02}.npy", out.getvalue())
    data = upriver.index(store, "x", stages=(upriver.LoadTensor("npy"),))
    model = Mixing()
    freeze(model.first)
    freeze(model.second)
    with upriver.connect().finetune(model, data, batch_size=8, micro_batch=4) as job:
        assert "influence each other" in job.why_unsplit
        assert "influence each other" in str(job.plan)
        losses = train(job, model, optimizer_of(model))
    assert len(losses) == 2


def test_evaluating_takes_the_samples_in_order_and_trains_nothing(tmp_path: Path) -> None:
    data = photos(tmp_path, 20)
    held_out = data.with_stages((upriver.Decode(), upriver.CenterCrop(16), upriver.Normalize()))
    model = frozen_small()
    model.train()
    with upriver.connect().finetune(model, data, batch_size=8, micro_batch=MICRO, policy="nosplit") as job:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        seen: list[torch.Tensor] = []

        def metric(outputs: torch.Tensor, targets: torch.Tensor) -> float:
            seen.append(targets)
            return float((outputs.argmax(1) == targets).float().mean())

        first = job.evaluate(held_out, metric)
        assert torch.equal(torch.cat(seen), held_out.targets)
        assert job.evaluate(held_out, metric) == first
        assert model.training
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    model.eval()
    engine = Engine(chain=held_out.chain, program=None, micro_batch=20)
    ids = list(range(20))
    batch = engine.begin(read_samples(held_out, ids), ids, object_names=[""] * 20, stop=0, seed=0, epoch=0)
    with torch.no_grad():
        wanted = (model(batch.tensors[0]).argmax(1) == held_out.targets).float().mean()
    assert first == pytest.approx(float(wanted))


class Set(nn.Module):
    """Read a setting that is absent at first."""

    def __init__(self) -> None:
        super().__init__()
        self.small = frozen_small()
        self.small.dropout.p = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(x * 2 if getattr(self, "doubled", False) else x)


@pytest.mark.full
def test_an_attribute_that_comes_to_the_same_under_a_job_is_no_error_and_another_is_named(
    tmp_path: Path,
) -> None:
    model: Any = Set()
    with upriver.connect().finetune(
        model, photos(tmp_path, 24), batch_size=8, micro_batch=MICRO, policy="nosplit"
    ) as job:
        steps = iter(job)
        features, _ = next(steps)
        answer = job(features)
        model.doubled = False
        assert torch.equal(job(features), answer)
        model.doubled = True
        # Where the second split read more than the first one, as after other models, it is the reference.
        with pytest.raises(FrozenChanged, match=r"'doubled' of the model \(was (absent|False), is True\)"):
            job(features)


def test_frozen_parameters_that_change_under_a_job_are_an_error(tmp_path: Path) -> None:
    data = photos(tmp_path, 24)
    model = frozen_small()
    with upriver.connect().finetune(model, data, batch_size=8, micro_batch=MICRO, policy="nosplit") as job:
        steps = iter(job)
        features, _ = next(steps)
        with torch.no_grad():
            model.block1.conv1.weight.mul_(2.0)
        with pytest.raises(FrozenChanged, match=r"block1\.conv1\.weight"):
            job(features)


@pytest.mark.parametrize("exact", ["bitwise", "numeric"])
@pytest.mark.full
def test_a_numerics_flag_that_changes_under_a_job_is_an_error_where_low_bits_count(
    tmp_path: Path, exact: str
) -> None:
    data, before = photos(tmp_path, 24), torch.get_float32_matmul_precision()
    near = upriver.connect()
    with near.finetune(frozen_small(), data, batch_size=8, micro_batch=MICRO, exact=exact) as job:
        steps = iter(job)
        next(steps)
        try:
            torch.set_float32_matmul_precision("medium")
            if exact == "numeric":
                next(steps)
                return
            with pytest.raises(NotExact, match=r"matmul_precision was .* when the job started"):
                next(steps)
            with pytest.raises(NotExact, match="matmul_precision"):
                next(iter(job))
        finally:
            torch.set_float32_matmul_precision(before)
        assert len(list(job)) == 3


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"micro_batch": 2.5}, "micro_batch"),
        ({"policy": "magic"}, "nosplit, freeze, min, .*, upriver"),
        ({"exact": "nearly"}, "exact must be auto, bitwise, numeric"),
        ({"seed": -1}, "seed"),
        ({"on_bad_sample": "ignore"}, "fail or skip"),
        pytest.param({"cut": 99}, "cut", marks=pytest.mark.full),
        ({"num_workers": 0}, "num_workers"),
        ({"num_workers": 10**6}, r"num_workers must be a whole number in 1\.\.256, got 1000000"),
        ({"connections": 10**6}, "connections"),
        ({"per_request": 1025}, "per_request"),
        ({"micro_batch": 10**9}, r"micro_batch must be a whole number in 1\.\.65536"),
        ({"batch_size": True}, "batch_size"),
        ({"shuffle": "no"}, "shuffle must be True or False, got 'no'"),
        ({"drop_last": 1}, "drop_last must be True or False"),
        ({"on_progress": 3}, "on_progress"),
        ({"policy": ["hapi"]}, "policy"),
        ({"batch_size": 9, "drop_last": True}, "batch_size 9, 8 samples"),
    ],
)
def test_arguments_outside_what_is_allowed_are_named(
    tmp_path: Path, options: dict[str, object], named: str
) -> None:
    data = photos(tmp_path, 8)
    with pytest.raises(ConfigError, match=named):
        upriver.connect().finetune(frozen_small(), data, **grouped(**{"batch_size": 8, **options}))


def test_what_is_no_model_or_no_dataset_is_named(tmp_path: Path) -> None:
    data = photos(tmp_path, 8)
    with pytest.raises(ConfigError, match=r"model must be a Module .*, got 3 of type int"):
        upriver.connect().finetune(3, data, batch_size=8)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"dataset must be a Dataset .*, got \[1, 2\] of type list"):
        upriver.connect().finetune(frozen_small(), [1, 2], batch_size=8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "options", "named"),
    [
        (("x",), {}, "http://HOST:PORT"),
        ((None,), {}, "http://HOST:PORT"),
        ((3,), {}, "http://HOST:PORT"),
        (("http://a:1", "ftp://a"), {}, "ftp://a"),
        (("http://h:99999",), {}, "port"),
        (("http://[",), {}, "http://HOST:PORT"),
        ((), {"token": 3}, "token"),
        ((), {"token": ""}, "token"),
        ((), {"token": "a\nb"}, "token"),
        ((), {"meter": 3}, "meter"),
        ((), {"server_cpus": 3}, "server_cpus"),
        ((), {"server_cpus": {10**6}}, "server_cpus"),
        ((), {"server_threads": 0}, "server_threads"),
        ((), {"server_threads": "a"}, "server_threads"),
        ((), {"server_threads": 257}, "server_threads"),
    ],
)
def test_connecting_checks_what_it_is_given_at_once(
    arguments: tuple[Any, ...], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        upriver.connect(*arguments, **options)
    assert "a\nb" not in str(caught.value)


class Computing:
    """A metric that counts by itself and returns its value at the end."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        pass

    def compute(self) -> Any:
        return self.value


@pytest.mark.full
def test_evaluate_with_a_metric_that_gives_no_number_names_it_and_what_it_gave(tmp_path: Path) -> None:
    data = photos(tmp_path, 16)
    with upriver.connect().finetune(
        frozen_small(), data, batch_size=8, micro_batch=MICRO, policy="nosplit"
    ) as job:
        for value, shown in (
            (None, "NoneType None"),
            ("0.5", "str '0.5'"),
            ({"accuracy": 0.5}, "dict {'accuracy': 0.5}"),
            (1j, "complex 1j"),
            (torch.ones(2, 3), "a tensor of shape (2, 3)"),
        ):

            def accuracy(outputs: torch.Tensor, targets: torch.Tensor, value: Any = value) -> Any:
                return value

            for metric, name in ((accuracy, "accuracy"), (Computing(value), "Computing")):
                with pytest.raises(ConfigError) as caught:
                    job.evaluate(data, metric)
                assert str(caught.value) == f"metric {name} must give one number, got {shown}"
        for number in (1, 0.5, torch.tensor(0.5), torch.ones(1, 1), True, float("nan")):
            given = job.evaluate(data, Computing(number))
            assert given == float(number) or given != given

        def wrong(outputs: torch.Tensor, targets: torch.Tensor) -> float:
            raise ValueError("of the metric's own")

        with pytest.raises(ValueError, match="of the metric's own"):
            job.evaluate(data, wrong)


@pytest.mark.parametrize("rate", ["a", True, float("nan"), -1])
def test_a_meter_takes_a_finite_rate(rate: Any) -> None:
    with pytest.raises(ConfigError, match="rate_bytes_per_s"):
        upriver.LinkMeter(rate)


def test_a_job_names_what_it_cannot_use(tmp_path: Path) -> None:
    data = photos(tmp_path, 16)
    with upriver.connect().finetune(
        frozen_small(), data, batch_size=8, micro_batch=MICRO, policy="nosplit"
    ) as job:
        for state in (3, None, [], "a"):
            with pytest.raises(ConfigError, match="state must be"):
                job.load_state_dict(state)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"its schema is 'upriver\.job/0'"):
            job.load_state_dict({**job.state_dict(), "schema": "upriver.job/0"})
        for features in ("x", 3):
            with pytest.raises(ConfigError, match="features must be a Tensor"):
                job(features)  # type: ignore[arg-type]
        for metric in (None, "accuracy", object()):
            with pytest.raises(ConfigError, match="metric must be"):
                job.evaluate(data, metric)
        with pytest.raises(ConfigError, match="dataset must be"):
            job.evaluate([1], lambda outputs, targets: 0.0)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="batch_size"):
            job.evaluate(data, lambda outputs, targets: 0.0, batch_size=0)


def test_what_was_closed_is_not_used_again(tmp_path: Path) -> None:
    data = photos(tmp_path, 16)
    options = {"batch_size": 8, "micro_batch": MICRO, "policy": "nosplit"}
    with upriver.connect() as near:
        job = near.finetune(frozen_small(), data, **options)
        features, _ = next(iter(job))
    with pytest.raises(ConfigError, match="connection was closed"):
        near.finetune(frozen_small(), data, **options)
    with pytest.raises(ConfigError, match="job was closed"):
        next(iter(job))
    with pytest.raises(ConfigError, match="job was closed"):
        job.evaluate(data, lambda outputs, targets: 0.0)
    assert job.report.samples["local"] >= 8  # the report stays readable, and the yielded values stay usable
    assert job(features).shape[0] == 8


def test_nothing_frozen_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nothing is frozen"):
        upriver.connect().finetune(Small(), photos(tmp_path, 8), batch_size=8)


def test_stages_are_declared(tmp_path: Path) -> None:
    assert len(photos(tmp_path, 8).chain.stages) == len(STAGES)
