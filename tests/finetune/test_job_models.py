"""Check that jobs train common models near the data to the bits of the plain path."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import upriver
from tests.finetune.training import grouped, optimizer_of, photos, same
from tests.program.nets import Block, freeze, frozen_small
from upriver._torchvision import ensure_torchvision
from upriver.engine.engine import Engine
from upriver.engine.read import read_samples
from upriver.errors import ConfigError, FrozenChanged
from upriver.pipeline import Dataset
from upriver.rpc.local_server import EmbeddedServer

SAMPLES, BATCH, MICRO = 30, 12, 8
"""Two full steps and a short one; micro-batches of 8, the last with two rows of padding."""


Trained = tuple[list[torch.Tensor], nn.Module, upriver.FinetuneJob]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return photos(tmp_path_factory.mktemp("store"), SAMPLES)


@pytest.fixture(scope="module")
def url(data: Dataset) -> Iterator[str]:
    stores = {data.store.name: data.store.uri}
    with EmbeddedServer.start(stores, threads=torch.get_num_threads()) as server:
        yield server.url


def logits_of(answer: Any) -> torch.Tensor:
    return answer if isinstance(answer, torch.Tensor) else answer.logits  # type: ignore[no-any-return]


def trained(
    near: upriver.Near,
    make: Callable[[], nn.Module],
    data: Dataset,
    *,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    **options: Any,
) -> Trained:
    """Train one epoch; return the losses, the model and the job."""
    model = make()
    given = {"batch_size": BATCH, "micro_batch": MICRO, "seed": 7, **options}
    with near.finetune(wrap(model), data, **given) as job:
        optimizer = optimizer_of(model)
        model.train()
        losses: list[torch.Tensor] = []
        for features, targets in job:
            torch.manual_seed(len(losses))
            loss = functional.cross_entropy(logits_of(job(features)).float(), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    assert len(losses) == 3
    return losses, model, job


def near_as_plain(
    url: str, make: Callable[[], nn.Module], data: Dataset, **options: Any
) -> tuple[upriver.FinetuneJob, nn.Module]:
    """Train both ways and compare every bit; return the job near the data and its model."""
    plain = trained(upriver.connect(), make, data, policy="nosplit", **options)
    with upriver.connect(url) as near:
        losses, model, job = trained(near, make, data, policy="freeze", **options)
    assert job.report.samples == {url: SAMPLES}, job.plan.why
    assert job.why_unsplit == ""
    assert same((losses, model), plain[:2])
    assert all(loss.isfinite() for loss in losses)
    return job, model


@pytest.fixture(scope="module")
def plain_small(data: Dataset) -> Trained:
    return trained(upriver.connect(), frozen_small, data, policy="nosplit")


class Towers(nn.Module):
    """Ship three values: a map, a sequence with samples in its second dimension, and class numbers."""

    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 6, 4, stride=4)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            steps = self.conv(x).flatten(2).permute(2, 0, 1)
            return {"steps": steps, "loudest": steps.mean(0).argmax(1)}

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU())
        self.sequence = Towers.Sequence()
        self.mix = nn.Linear(4, 6)
        self.named = nn.Embedding(6, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pixels, said = self.map(x), self.sequence(x)
        mixed = self.mix(pixels.mean((2, 3))) + said["steps"].mean(0)
        return self.head(torch.tanh(mixed + self.named(said["loudest"])))


def towers() -> nn.Module:
    torch.manual_seed(0)
    model = Towers()
    freeze(model.map)
    freeze(model.sequence)
    return model


def test_everything_that_crosses_is_regrouped_and_shipped(url: str, data: Dataset) -> None:
    job, _ = near_as_plain(url, towers, data)
    assert job.plan.cut == job._split.freeze
    assert len(job.tail.values) == 3


def test_a_job_yields_and_takes_a_tuple_where_several_tensors_cross(tmp_path: Path) -> None:
    """Every tensor loses the row of a sample that cannot be read."""
    data = photos(tmp_path, 14, bad={3: b"."})
    [bad] = [i for i in range(14) if "003" in data.locate([i])[0].object]
    model = towers()
    options: dict[str, Any] = {"micro_batch": 4, "policy": "nosplit"}
    options["sampling"] = upriver.Sampling(shuffle=False, on_bad_sample="skip")
    with upriver.connect().finetune(model, data, batch_size=14, **options) as job:
        [(features, targets)] = list(job)
        assert isinstance(features, tuple)
        shapes = sorted((tuple(value.shape), value.dtype) for value in features)
        assert shapes == [((13,), torch.int64), ((13, 4, 7, 7), torch.float32), ((16, 13, 6), torch.float32)]
        kept = [i for i in range(14) if i != bad]
        assert torch.equal(targets, data.targets[kept])
        model.eval()
        answers = job(features)
        right = job.evaluate(data, lambda outputs, labels: (outputs.argmax(1) == labels).float().mean())
        assert right == pytest.approx(float((answers.argmax(1) == targets).float().mean()))
        for wrong in (features[:2], features[0], list(features), (*features[:2], "x")):
            with pytest.raises(ConfigError, match="tuple of 3 tensors that iterating over the job yields"):
                job(wrong)
    engine = Engine(chain=data.chain, program=None, micro_batch=13)
    inputs = engine.begin(read_samples(data, kept), kept, object_names=[""] * 13, stop=0, seed=0, epoch=0)
    torch.testing.assert_close(answers, model(inputs.tensors[0]))


class Placing(nn.Module):
    """A frozen parameter of the model itself, read between two frozen modules."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 4, stride=4)
        self.position = nn.Parameter(torch.randn(6, 1, 1), requires_grad=False)
        self.mix = nn.Conv2d(6, 6, 1)
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.patches(x) + self.position).mean((2, 3)))


def test_what_would_be_missed_is_noticed(data: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    """Autocast around the call alone; a changed frozen parameter that belongs to no frozen module."""
    model = Placing()
    freeze(model.patches)
    freeze(model.mix)
    with upriver.connect().finetune(
        model, data, batch_size=BATCH, micro_batch=MICRO, policy="nosplit"
    ) as job:
        features, _ = next(iter(job))
        answer = job(features)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(job(features), answer)
            job(features)
        assert caplog.text.count("torch.autocast around a job has no effect") == 1
        model.position.data[0] += 1.0  # no version changes: noticed when the next epoch begins
        with pytest.raises(FrozenChanged, match="'position', which is frozen, changed"):
            next(iter(job))


@pytest.mark.full
def test_cuts_between_operators_are_taken_too(url: str, data: Dataset, plain_small: Trained) -> None:
    """Inside a residual block two tensors cross."""
    options: dict[str, Any] = {"splitting": upriver.Splitting(granularity="op")}
    with upriver.connect().finetune(
        frozen_small(), data, batch_size=BATCH, micro_batch=MICRO, policy="nosplit", **options
    ) as job:
        program = job._split.program
    assert program is not None
    two = [cut for cut in range(1, program.num_stages) if len(program.live(cut)) == 2]
    with upriver.connect(url) as near:
        losses, model, job = trained(near, frozen_small, data, cut=two[0], **options)
    assert job.report.samples == {url: SAMPLES}, job.plan.why
    assert same((losses, model), plain_small[:2])


class Tricky(nn.Module):
    """A frozen part with BatchNorm and Dropout; then Dropout, a checkpointed block with Dropout, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.ReLU())
        self.block1 = Block(8)
        self.random = nn.Dropout(0.25)
        self.block2 = nn.Sequential(Block(8), nn.Dropout(0.25), nn.Conv2d(8, 8, 1))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.random(self.block1(self.stem(x)))
        x = checkpoint(self.block2, x, use_reentrant=False)
        return self.head(x.mean((2, 3)))


def tricky() -> nn.Module:
    torch.manual_seed(0)
    model = Tricky()
    with torch.no_grad():
        model.train()(torch.randn(8, 3, 16, 16))
    freeze(model.stem)
    freeze(model.block1)
    model.head.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    return model


@pytest.mark.full
def test_batchnorm_dropout_checkpointing_and_hooks_train_as_ever(url: str, data: Dataset) -> None:
    job, model = near_as_plain(url, tricky, data)
    assert job._split.boundary == "block1"
    fresh = tricky().state_dict()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, fresh[name])}
    assert not any(name.startswith(("stem", "block1")) for name in moved)
    assert {"block2.0.bn1.running_mean", "block2.2.weight", "head.bias"} <= moved
    assert not model.stem[1].training
    assert model.random.training


def test_autocast_reaches_both_parts(url: str, data: Dataset, plain_small: Trained) -> None:
    cast = trained(upriver.connect(), frozen_small, data, policy="nosplit", autocast="bfloat16")
    with upriver.connect(url) as near:
        losses, model, job = trained(near, frozen_small, data, policy="freeze", autocast=torch.bfloat16)
    assert job.report.samples == {url: SAMPLES}, job.plan.why
    assert same((losses, model), cast[:2])
    assert not same((losses, model), plain_small[:2])
    torch.testing.assert_close(torch.stack(losses), torch.stack(plain_small[0]), rtol=0.1, atol=0.1)
    assert (job.report.exact, job.report.tolerance) == ("bitwise", None)
    states = [other.state_dict() for other in (job, cast[2], plain_small[2])]
    assert [state["autocast"] for state in states] == ["bfloat16", "bfloat16", None]
    assert states[0]["program"] == states[1]["program"] != states[2]["program"]
    with pytest.raises(ConfigError, match=r"its (program|autocast)"):
        plain_small[2].load_state_dict(states[0])


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.full
def test_peft_adapters_cap_the_cut(url: str, data: Dataset) -> None:
    ensure_torchvision()
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")

    def make() -> nn.Module:
        torch.manual_seed(0)
        config = transformers.ViTConfig(
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=16,
            patch_size=4,
            num_labels=5,
        )
        lora = peft.LoraConfig(
            r=2,
            lora_dropout=0.25,
            init_lora_weights=False,
            target_modules=r".*layers?\.2\..*(query|value|q_proj|v_proj)",
            modules_to_save=["classifier"],
        )
        return peft.get_peft_model(transformers.ViTForImageClassification(config), lora)  # type: ignore[no-any-return]

    job, model = near_as_plain(url, make, data)
    assert ".2." in job._split.boundary or ".1" in job._split.boundary
    fresh = make().state_dict()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, fresh[name])}
    assert moved
    assert all("lora_" in name or "classifier" in name for name in moved)


def tokens(root: Path) -> Dataset:
    """Return rows of 12 token numbers, in two classes."""
    store = upriver.Store.open(root.as_uri())
    for number in range(SAMPLES):
        out = io.BytesIO()
        np.save(out, np.random.default_rng(number).integers(0, 50, 12))
        store.put(f"text/{number % 2}/{number:02}.npy", out.getvalue())
    return upriver.index(store, "text", stages=(upriver.LoadTensor("npy"),))


@pytest.mark.full
def test_a_text_model_takes_numbers_of_words(tmp_path: Path) -> None:
    ensure_torchvision()
    transformers = pytest.importorskip("transformers")
    data = tokens(tmp_path)

    def make() -> nn.Module:
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
        )
        model = transformers.BertForSequenceClassification(config)
        freeze(model.bert.embeddings)
        freeze(model.bert.encoder.layer[0])
        freeze(model.bert.encoder.layer[1])
        model.activation_checkpointing_enable({"use_reentrant": False})
        return model  # type: ignore[no-any-return]

    with EmbeddedServer.start({data.store.name: data.store.uri}, threads=torch.get_num_threads()) as server:
        near_as_plain(server.url, make, data)


# ------------------------------------------------------------------------------------------- compiling

EAGER = {"backend": "aot_eager"}


class Counting:
    """A backend that compiles nothing and counts the requests to compile."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


@pytest.mark.full
def test_the_tail_is_compiled_once_and_once_more_for_a_shorter_batch(
    url: str, data: Dataset, plain_small: Trained
) -> None:
    torch._dynamo.reset()
    backend = Counting()
    with upriver.connect(url) as near:
        losses, model, _ = trained(
            near,
            frozen_small,
            data,
            policy="freeze",
            splitting=upriver.Splitting(compile_tail={"backend": backend}),
        )
        assert backend.graphs == 2
    torch.testing.assert_close(torch.stack(losses), torch.stack(plain_small[0]))
    assert set(model.state_dict()) == set(plain_small[1].state_dict())


@pytest.mark.full
def test_a_compiled_model_is_taken_apart_and_its_tail_compiled(
    url: str, data: Dataset, plain_small: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    backend = Counting()
    with upriver.connect(url) as near, caplog.at_level(logging.INFO, logger="upriver"):
        losses, _, job = trained(
            near,
            frozen_small,
            data,
            policy="freeze",
            wrap=lambda model: torch.compile(model, backend=backend),  # type: ignore[arg-type, return-value]
        )
    assert backend.graphs == 2
    assert "its tail is compiled likewise" in caplog.text
    assert job.report.samples == {url: SAMPLES}
    torch.testing.assert_close(torch.stack(losses), torch.stack(plain_small[0]))


@pytest.mark.full
def test_a_model_compiled_in_place_is_traced_as_written(
    data: Dataset, plain_small: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()

    def make() -> nn.Module:
        model = frozen_small()
        model.compile(backend="aot_eager")
        model.block3.compile(backend="aot_eager")
        return model

    losses, model, job = trained(upriver.connect(), make, data, policy="nosplit")
    assert job.why_unsplit == ""
    assert model._compiled_call_impl is not None
    assert "its tail is compiled only with Splitting(compile_tail=True)" in caplog.text
    torch.testing.assert_close(torch.stack(losses), torch.stack(plain_small[0]))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"autocast": "float8"}, "autocast must be bfloat16 or float16 or None"),
        ({"autocast": torch.float64}, "autocast"),
        ({"autocast": True}, "autocast"),
        ({"granularity": "layer"}, "granularity must be module or op, got 'layer'"),
        ({"granularity": "end"}, "granularity must be module or op"),
        ({"compile_tail": 1}, "compile_tail must be True, False or a mapping"),
        ({"compile_tail": "inductor"}, "compile_tail must be"),
        ({"compile_tail": {"backends": "x"}}, r"compile_tail takes backend, mode, .* got \['backends'\]"),
        pytest.param(
            {"compile_tail": {"backend": "no such thing"}, "policy": "nosplit"},
            "torch.compile does not take",
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"compile_tail": {"mode": "fast"}}, "torch.compile does not take", marks=pytest.mark.full
        ),
        ({"replay": 3}, "replay must be"),
        ({"replay": [{"epoch": 0}]}, r"replay\[0\]"),
        ({"replay": [{"epoch": 0, "index": 0, "source": "http://a", "cut": 99}]}, "used cut 99, this model"),
        ({"replay": [{"epoch": 0, "index": 0, "source": "local", "cut": 0}], "cut": 1}, "cut must be None"),
    ],
)
def test_new_arguments_outside_what_is_allowed_are_named(
    data: Dataset, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        upriver.connect().finetune(frozen_small(), data, **grouped(**{"batch_size": 8, **options}))
