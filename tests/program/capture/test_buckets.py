"""One model captured in several shapes: one graph per shape, and one shared weights file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.program.nets import Small
from upriver.errors import CaptureError, ConfigError
from upriver.program.capture import prefix
from upriver.program.capture.lowering import Recording
from upriver.program.capture.prefix import capture_buckets
from upriver.program.example_inputs import TensorSource
from upriver.program.graph.artifact_store import load, publish
from upriver.program.graph.executor import Program
from upriver.store import Store


class Text(nn.Module):
    """Hold constants that depend on the length, and one constant that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6)
        self.positions = nn.Embedding(32, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        weights = torch.tensor([float(place) for place in range(length)])
        x = self.table(tokens) + self.positions(torch.arange(length))
        return self.head((x * weights[:, None]).sum(1)) * torch.tensor([2.0, 3.0])


def tokens(samples: int, length: int) -> torch.Tensor:
    return torch.randint(0, 20, (samples, length), generator=torch.Generator().manual_seed(length))


def same_file(programs: tuple[Program, ...]) -> None:
    assert len({program.weights_digest for program in programs}) == 1
    assert len({bytes(program.weights_bytes) for program in programs}) == 1
    assert len({program.digest for program in programs}) == len(programs)


def test_micro_batches_share_the_weights_and_give_the_models_bits() -> None:
    torch.manual_seed(0)
    model = Small().eval()
    images = torch.randn(16, 3, 16, 16)
    one, many = capture_buckets(model, [images[:1], images])
    same_file((one, many))
    assert [one.micro_batch, many.micro_batch] == [1, 16]
    assert [stage.name for stage in one.stages] == [stage.name for stage in many.stages]
    for program, given in ((one, images[:1]), (many, images)):
        read = Program.from_bytes(program.graph_bytes, many.weights_bytes, digest=program.digest)
        with torch.no_grad():
            assert torch.equal(read.run((given,), 0, read.num_stages)[0], model(given))


@pytest.mark.full
def test_lengths_share_the_weights_and_bring_constants_of_their_own() -> None:
    torch.manual_seed(0)
    model = Text().eval()
    examples = [tokens(2, 8), tokens(2, 12), tokens(1, 12)]
    programs = capture_buckets(model, examples)
    same_file(programs)
    constants = [
        {weight.key for weight in program.graph.weights if weight.key.startswith("constant.")}
        for program in programs
    ]
    assert constants[0] != constants[1] == constants[2]
    assert constants[0] & constants[1]  # the constant that does not depend on the length is stored once
    for program, given in zip(programs, examples, strict=True):
        read = Program.from_bytes(program.graph_bytes, programs[0].weights_bytes)
        with torch.no_grad():
            assert torch.equal(read.run((given,), 0, read.num_stages)[0], model(given))


def test_buckets_lie_in_a_store_beside_one_weights_file(tmp_path: Path) -> None:
    programs = capture_buckets(Text(), [tokens(2, 4), tokens(2, 5)], outputs=[TensorSource(path="table")])
    store = Store.open(tmp_path.as_uri())
    for program in programs:
        publish(program, store)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    assert len(list(tmp_path.rglob("graph.json"))) == 2
    for program in programs:
        assert load(store, program.digest).stages[-1].name == "table"


def test_what_is_no_set_of_buckets_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        capture_buckets(Text(), [])
    with pytest.raises(ConfigError, match=r"two shape buckets take int64 \(2, 4\)"):
        capture_buckets(Text(), [tokens(2, 4), tokens(2, 4)])


class Growing(nn.Module):
    """Rebuild its table for each length, as some rotary embeddings do."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > len(self.table):
            self.table = torch.arange(float(x.shape[1]))
        return x * self.table[: x.shape[1]]


@pytest.mark.full
def test_a_table_made_anew_for_a_length_is_a_constant_of_its_bucket() -> None:
    x = torch.randn(2, 5)
    short, long = capture_buckets(Growing(), [x[:, :3], x])
    assert torch.equal(short.run((x[:, :3],), 0, short.num_stages)[0], x[:, :3])
    assert torch.equal(long.run((x,), 0, long.num_stages)[0], x * torch.arange(5.0))


def test_a_model_with_other_weights_for_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(6, 6)
    record = prefix.record

    def record_and_change(*args: Any, **kwargs: Any) -> Recording:
        found = record(*args, **kwargs)
        model.weight = nn.Parameter(model.weight * 2)
        return found

    monkeypatch.setattr(prefix, "record", record_and_change)
    with pytest.raises(CaptureError, match="'weight' is not the same for all shapes"):
        capture_buckets(model, [torch.ones(2, 6), torch.ones(3, 6)])
