"""Check that tensors saved under transformers' own names arrive in place, or the error names their reader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.examples import some
from upriver import coldstart
from upriver._torchvision import ensure_torchvision
from upriver.coldstart.plain_load import load_plainly, load_weights
from upriver.errors import ModelError
from upriver.store import Store

ensure_torchvision()
transformers = pytest.importorskip("transformers", minversion="5.0")

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 90,
    "pad_token_id": None,
}
EXPERTS: dict[str, Any] = TEXT | {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
SWIN: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 4],
    "window_size": 4,
}

CONVERTED: dict[str, dict[str, Any]] = {
    "MixtralModel": TEXT | {"num_local_experts": 4},
    "MixtralForCausalLM": TEXT | {"num_local_experts": 4, "tie_word_embeddings": True},
    "PhimoeForCausalLM": TEXT | {"num_local_experts": 4},
    "Qwen2MoeForCausalLM": EXPERTS | {"shared_expert_intermediate_size": 16},
    "Qwen3MoeForCausalLM": EXPERTS,
    "OlmoeForCausalLM": EXPERTS,
    "SwinForImageClassification": SWIN,
    "SwinBackbone": SWIN,
}
PLAIN: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": TEXT,
    "BertForSequenceClassification": TEXT,
}


def builder(name: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    kind = getattr(transformers, name)
    return lambda: kind(kind.config_class(**options))  # type: ignore[no-any-return]


def saved(name: str, options: dict[str, Any], folder: Path, **how: Any) -> tuple[nn.Module, Any]:
    """Return a model as ``save_pretrained`` writes it, and a constructor of another one."""
    build = builder(name, options)
    torch.manual_seed(3)
    model: Any = build()
    model.save_pretrained(folder, **how)
    return model, build


def assert_same(model: nn.Module, reference: nn.Module) -> None:
    found, expected = model.state_dict(), reference.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", some(4, [*CONVERTED, *PLAIN]))
def test_what_save_pretrained_writes_arrives_in_its_places(name: str, tmp_path: Path) -> None:
    reference, build = saved(name, (CONVERTED | PLAIN)[name], tmp_path)
    assert (load_file(tmp_path / "model.safetensors").keys() <= reference.state_dict().keys()) == (
        name in PLAIN
    )
    model, handle = coldstart.begin(build, tmp_path.as_uri())
    assert handle.wait(60)
    assert_same(model, reference)
    assert_same(load_plainly(build, tmp_path.as_uri()), reference)
    other = build()
    load_weights(other, tmp_path)
    assert_same(other, reference)


def test_shards_of_converted_names_arrive_in_their_places(tmp_path: Path) -> None:
    reference, build = saved("Qwen3MoeForCausalLM", EXPERTS, tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    model, handle = coldstart.begin(build, tmp_path.as_uri())
    assert handle.wait(60)
    assert_same(model, reference)


def test_a_first_answer_waits_for_every_part_of_a_weight_that_is_stored_in_parts(tmp_path: Path) -> None:
    reference, build = saved("MixtralForCausalLM", TEXT | {"num_local_experts": 4}, tmp_path)
    limits = coldstart.StreamLimits(bandwidth_bytes_per_s=400_000)
    model = coldstart.load(build, tmp_path.as_uri(), limits=limits).eval()
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, reference.eval()(ids).logits)


@pytest.mark.parametrize("kept", ["state dict", "published"])
def test_names_of_the_state_dict_arrive_as_ever(kept: str, tmp_path: Path) -> None:
    build = builder("MixtralForCausalLM", TEXT | {"num_local_experts": 4})
    torch.manual_seed(3)
    reference = build()
    if kept == "published":
        coldstart.publish_model(
            reference, Store.open(tmp_path.as_uri()), "model.safetensors", (torch.arange(12).reshape(2, 6),)
        )
    else:
        save_file(reference.state_dict(), tmp_path / "model.safetensors")
    model, handle = coldstart.begin(build, tmp_path.as_uri())
    assert handle.wait(60)
    assert_same(model, reference)


def _without(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if not name.endswith("experts.2.w3.weight")}


def _grown(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    return state | {name: torch.ones(3, 3)}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_without, r"layers\.0\.block_sparse_moe\.experts\.2\.w3\.weight, .* are missing"),
        (_grown, r"experts\.1\.w2\.weight \(\[3, 3\] there, \[32, 64\] here\) is of another shape"),
        (lambda state: state | {"more": torch.ones(1)}, "more is unexpected"),
        (
            lambda state: {f"base.{name}": value for name, value in state.items()},
            "are missing; base.* unexpected",
        ),
        (lambda state: {name.removeprefix("model."): v for name, v in state.items()}, "are unexpected"),
    ],
)
def test_a_file_of_other_names_is_refused_and_the_way_that_reads_it_is_named(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], problem: str, tmp_path: Path
) -> None:
    _, build = saved("MixtralForCausalLM", TEXT | {"num_local_experts": 4}, tmp_path)
    save_file(change(load_file(tmp_path / "model.safetensors")), tmp_path / "changed.safetensors")
    for load in (
        lambda: coldstart.load(build, (tmp_path / "changed").as_uri()),
        lambda: load_weights(build(), tmp_path / "changed.safetensors"),
    ):
        with pytest.raises(ModelError, match=f"{problem}.*from_pretrained .*publish_model or upriver push"):
            load()


def test_weights_that_transformers_joins_are_refused_and_the_way_that_reads_them_is_named(
    tmp_path: Path,
) -> None:
    """One stored tensor would fill several tensors of the model."""
    options = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": 28,
        "use_swiglu_ffn": True,
    }
    _, build = saved("Dinov2Model", options, tmp_path)
    problem = r"Dinov2Model: \S*mlp\.weights_in\.bias, \S* are stored in another form .*from_pretrained"
    with pytest.raises(ModelError, match=problem):
        coldstart.load(build, tmp_path.as_uri())
    state = load_file(tmp_path / "model.safetensors")
    rest = {name: value for name, value in state.items() if "weights_in" not in name}
    save_file(rest, tmp_path / "rest.safetensors")
    with pytest.raises(ModelError, match=r"Dinov2Model: \S*mlp\.weights_in\.bias, \S* are missing; transf"):
        coldstart.load(build, (tmp_path / "rest").as_uri())


def test_a_model_of_anybody_is_refused_without_a_word_of_transformers(tmp_path: Path) -> None:
    save_file({"b": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"weight, bias are missing; b is unexpected$"):
        coldstart.load(lambda: nn.Linear(2, 2), tmp_path.as_uri())


def test_conversions_that_cannot_be_told_from_none_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and shapes fit both ways, and only the values differ."""
    reference, build = saved("LlamaForCausalLM", TEXT, tmp_path)

    def permuted(_model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value.flip(0) if "q_proj" in name else value for name, value in state.items()}

    def transposed(_model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: value.t() if value.dim() == 2 and len(set(value.shape)) == 1 else value
            for name, value in state.items()
        }

    for conversion in (transposed, permuted):
        monkeypatch.setattr(transformers.core_model_loading, "revert_weight_conversion", conversion)
        with pytest.raises(ModelError, match=r"q_proj\.weight.* are perhaps transposed, .*from_pretrained"):
            coldstart.load(build, tmp_path.as_uri())
    coldstart.publish_model(
        reference, Store.open(tmp_path.as_uri()), "known.safetensors", (torch.ones(1, 3).long(),)
    )
    model, handle = coldstart.begin(build, (tmp_path / "known").as_uri())
    assert handle.wait(60)
    assert_same(model, reference)
