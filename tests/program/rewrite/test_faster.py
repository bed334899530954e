"""Check faster prefixes: near the captured program, the same at every cut and on any reader."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, event, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._inductor import config as inductor
from torch.nn import functional

from tests.examples import examples, often
from tests.program.nets import Small, frozen_small
from tests.program.random_networks import Description, descriptions
from upriver.errors import CaptureError, ConfigError, ModelError, ProgramError
from upriver.program.capture.prefix import capture
from upriver.program.example_inputs import Example, TensorSource
from upriver.program.graph.executor import Program
from upriver.program.graph.kernel_validator import check_kernel
from upriver.program.graph.liveness import GRANULARITIES, Granularity
from upriver.program.rewrite.compiled import compile_stages
from upriver.program.rewrite.faster import PREFIXES, PrefixKind, rewritten
from upriver.rpc.tolerance import tolerance_of

EXAMPLES = int(os.environ.get("UPRIVER_EXAMPLES", "0"))

networks = settings(
    max_examples=EXAMPLES or examples(24),
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


def captured(description: Description, granularity: Granularity) -> tuple[Program, Sequence[torch.Tensor]]:
    """Return the program of a whole random network, and inputs for it."""
    example = description.example(seed=1)
    try:
        return capture(description.build().eval(), example, granularity=granularity), example.tensors
    except (CaptureError, ModelError, ConfigError):
        assume(False)
        raise


def run(program: Program, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return program.run(tensors, 0, program.num_stages)


def apart(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest value of its tensor."""
    return max(
        float((a.double() - b.double()).abs().max()) / max(float(a.double().abs().max()), 1e-30)
        for a, b in zip(ours, theirs, strict=True)
    )


def check_cuts(program: Program, tensors: Sequence[torch.Tensor]) -> None:
    """Check that every cut gives the whole run's bits, from the program's files, too."""
    graph, weights = program.graph_bytes, bytes(program.weights_bytes)
    there = Program.from_bytes(graph, weights, digest=program.digest)
    whole = run(program, tensors)
    for cut in range(program.num_stages + 1):
        sent = there.run(tensors, 0, cut)
        assert all(map(torch.equal, program.run(sent, cut, program.num_stages), whole))


@pytest.mark.full
@networks
@given(descriptions(), st.sampled_from(PREFIXES), st.sampled_from(GRANULARITIES))
def test_a_random_network_keeps_its_cuts_and_lies_near_the_captured_one(
    description: Description, kind: PrefixKind, granularity: Granularity
) -> None:
    program, tensors = captured(description, granularity)
    try:
        faster = rewritten(program, kind)
    except ConfigError as error:
        assert kind == "int8" and "no float32 linear layer" in str(error)
        event("no linear layer")
        return
    written = run(program, tensors)
    assume(all(bool(tensor.isfinite().all()) for tensor in written))
    got = run(faster, tensors)
    assert [stage.name for stage in faster.stages] == [stage.name for stage in program.stages]
    assert [tensor.shape for tensor in got] == [tensor.shape for tensor in written]
    strides = [value.spec.stride for value in program.live(program.num_stages)]
    assert [value.spec.stride for value in faster.live(faster.num_stages)] == strides
    # A value near zero, from larger ones that cancel, may be off by all that it is.
    scale = max([1.0, *(float(t.double().abs().max()) for t in written)])
    for ours, theirs in zip(got, written, strict=True):
        bound = (1e-4 if kind == "compiled" and description.dtype == "float32" else 0.25) * scale
        assert float((ours.double() - theirs.double()).abs().max()) <= bound
    check_cuts(faster, tensors)


def test_every_batch_norm_behind_a_convolution_is_folded_and_its_stage_stays() -> None:
    model = frozen_small().eval()
    x = torch.randn(4, 3, 16, 16)
    program = capture(model, x, outputs=[TensorSource(path="block3")])
    faster = rewritten(program, "compiled")
    assert sum("batch_norm" in node.op for node in program.graph.nodes) == 7
    assert not [node.op for node in faster.graph.nodes if "batch_norm" in node.op]
    assert faster.num_stages == program.num_stages
    assert apart(run(program, [x]), run(faster, [x])) < 1e-5
    check_cuts(faster, [x])


class BesideNorm(nn.Module):
    """Read a convolution's result also without its BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        nn.init.normal_(self.norm.running_mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return torch.cat([y, self.norm(y)], 1)


def test_a_batch_norm_whose_input_is_read_elsewhere_stays() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    program = capture(BesideNorm().eval(), x)
    faster = rewritten(program, "compiled")
    assert sum("batch_norm" in node.op for node in faster.graph.nodes) == 1
    assert apart(run(program, [x]), run(faster, [x])) < 1e-6


@pytest.mark.full
def test_batch_norm_under_autocast_is_folded_before_the_cast() -> None:
    model, x = frozen_small().eval(), torch.randn(4, 3, 16, 16)
    outputs = [TensorSource(path="block2")]
    exact = capture(model, x, outputs=outputs)
    program = capture(model, x, outputs=outputs, autocast=torch.bfloat16)
    faster = rewritten(program, "compiled")
    assert not [node.op for node in faster.graph.nodes if "batch_norm" in node.op]
    assert apart(run(exact, [x]), run(faster, [x])) < 2e-2


@pytest.mark.full
def test_features_of_layers_cross_every_cut_in_bfloat16() -> None:
    model, x = frozen_small().eval(), torch.randn(4, 3, 16, 16)
    program = capture(model, x, outputs=[TensorSource(path="block2")])
    faster = rewritten(program, "bf16")
    for cut in range(1, faster.num_stages + 1):
        assert [value.spec.dtype for value in faster.live(cut)] == ["bfloat16"]
        assert faster.stages[cut - 1].out_bytes == program.stages[cut - 1].out_bytes / 2
    assert faster.weight_nbytes < 0.75 * program.weight_nbytes
    assert 0 < apart(run(program, [x]), run(faster, [x])) < tolerance_of(faster).rtol == 5e-2


class Masked(nn.Module):
    """Attend under a mask of the least float32, as text models make it, with one row all masked."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        mask = (1.0 - seen[:, None, :].float()) * torch.finfo(torch.float32).min
        y = self.first(x)
        return self.last(functional.scaled_dot_product_attention(y, y, y, attn_mask=mask))


@pytest.mark.full
def test_a_mask_of_the_least_float32_stays_finite_in_bfloat16() -> None:
    torch.manual_seed(0)
    seen = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]])
    example = Example.of((torch.randn(2, 4, 8), seen))
    program = capture(Masked().eval(), example)
    faster = rewritten(program, "bf16")
    assert apart(run(program, example.tensors), run(faster, example.tensors)) < 5e-2
    check_cuts(faster, example.tensors)


@settings(max_examples=examples(30), deadline=None, derandomize=True, database=None)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 12), st.booleans(), st.integers(0, 99))
def test_a_linear_layer_in_int8_gives_the_products_of_rounded_rows(
    rows: int, inputs: int, outputs: int, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    layer, x = nn.Linear(inputs, outputs, bias=bias).eval(), torch.randn(rows, inputs) * 3
    x[0] = 0.0
    program = capture(layer, x)
    got = run(rewritten(program, "int8"), [x])[0].double()
    weight, given_x = layer.weight.detach().double(), x.double()
    per_output = weight.abs().amax(1, keepdim=True) / 127
    per_row = (given_x.abs().amax(1, keepdim=True) / 127).clamp_min(1e-30)
    # Rounding moves each factor by half a step at most.
    bound = 0.5 * per_row * (weight.abs().sum(1) + 0.5 * inputs * per_output[:, 0])
    bound = bound + 0.5 * per_output[:, 0] * given_x.abs().sum(1, keepdim=True)
    assert bool(((got - run(program, [x])[0].double()).abs() <= bound * 1.001 + 1e-6).all())
    alone = functional.linear(
        (given_x / per_row).round() * per_row, (weight / per_output).round() * per_output
    )
    alone = alone if layer.bias is None else alone + layer.bias.detach().double()
    close = torch.isclose(got, alone, rtol=1e-5, atol=1e-5 * float(alone.abs().max()) + 1e-6)
    assert close.double().mean() > 0.9  # float32 and float64 round a few ratios to other sides of a half


@pytest.mark.parametrize("kind", often(PREFIXES, "int8"))
def test_rows_do_not_depend_on_other_rows(kind: PrefixKind) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, batch_first=True).eval()
    x = torch.randn(4, 5, 16)
    faster = rewritten(capture(layer, x), kind)
    changed = x.clone()
    changed[2:] = 50 * torch.randn(2, 5, 16)
    assert torch.equal(run(faster, [x])[0][:2], run(faster, [changed])[0][:2])


def test_a_product_of_no_integers_is_refused() -> None:
    empty = torch.empty(3, 0, dtype=torch.int8)
    with pytest.raises(ProgramError, match=r"_int_mm.default: a matrix of shape \(3, 0\)"):
        check_kernel("_int_mm.default", {"self": empty, "mat2": empty.t()})


@pytest.mark.full
def test_int8_without_a_linear_layer_says_that_nothing_would_change() -> None:
    program = capture(frozen_small().eval(), torch.randn(4, 3, 16, 16), outputs=[TensorSource(path="block1")])
    with pytest.raises(ConfigError, match=r"prefix='int8' would change nothing.*no float32 linear layer"):
        rewritten(program, "int8")


@pytest.mark.full
def test_a_rewritten_program_is_the_same_each_time() -> None:
    x = torch.randn(4, 3, 16, 16)
    for kind in PREFIXES[:2]:
        made = [
            rewritten(capture(frozen_small().eval(), x, outputs=[TensorSource(path="block2")]), kind)
            for _ in range(2)
        ]
        assert made[0].digest == made[1].digest


@pytest.mark.full
def test_the_model_stays_as_it_is() -> None:
    model, x = frozen_small().eval(), torch.randn(4, 3, 16, 16)
    before = io.BytesIO()
    torch.save(model.state_dict(), before)
    program = capture(model, x, outputs=[TensorSource(path="block2")])
    for kind in PREFIXES[:2]:
        rewritten(program, kind)
    after = io.BytesIO()
    torch.save(model.state_dict(), after)
    assert before.getvalue() == after.getvalue()


@pytest.mark.full
def test_compiled_stages_give_nearly_the_same_at_every_cut_and_are_timed() -> None:
    model, x = frozen_small().eval(), torch.randn(4, 3, 16, 16)
    program = capture(model, x, outputs=[TensorSource(path="block2")])
    faster = rewritten(program, "compiled")
    assert compile_stages(faster, [x]) == ""
    written, timed = run(program, [x]), dict[int, float]()
    got = faster.run([x], 0, faster.num_stages, on_stage=timed.__setitem__)
    assert apart(written, got) < 1e-5
    assert list(timed) == list(range(1, faster.num_stages + 1))
    assert all(math.isfinite(seconds) for seconds in timed.values())
    for cut in range(faster.num_stages + 1):
        sent = faster.run([x], 0, cut)
        assert [t.stride() for t in sent] == [tuple(value.spec.stride) for value in faster.live(cut)]
        assert all(map(torch.equal, faster.run(sent, cut, faster.num_stages), got))


@pytest.mark.full
def test_a_stage_that_does_not_compile_leaves_the_program_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Small().eval(), torch.randn(2, 3, 16, 16)
    faster = rewritten(capture(model, x, outputs=[TensorSource(path="block1")]), "compiled")
    before = run(faster, [x])
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with inductor.patch({"cpp.cxx": (None, "/nowhere/g++")}):
        assert "No working C++ compiler found" in compile_stages(faster, [x])
    assert all(map(torch.equal, run(faster, [x]), before))
