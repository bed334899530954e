"""Check models that a tracer cannot follow: they run with a shorter prefix or unsplit, and say why."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, rnn

import upriver
from tests.examples import some
from upriver.errors import ModelError
from upriver.program.example_inputs import tensors_in
from upriver.program.split.cut_survey import survey
from upriver.program.split.split import Split, split
from upriver.program.tensor_layouts import dense_parts, same_bits, storages_of

WIDTH = 16


class Net(nn.Module):
    """Two frozen modules, ``a`` and ``b``, then a trained head."""

    def __init__(
        self,
        *,
        inner: Callable[[torch.Tensor], Any] = lambda y: y,
        outer: Callable[[Any], Any] = lambda y: y,
        b: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.b = Giving(inner) if b is None else b
        for parameter in self.b.parameters():
            parameter.requires_grad_(False)
        self.outer = outer
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.outer(self.b(self.a(x))))


class Giving(nn.Module):
    """A linear layer whose answer has a form of its own."""

    def __init__(self, form: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        return self.form(self.linear(x))


class SparseMixing(nn.Module):
    """Mix features by a sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("mixing", torch.eye(WIDTH).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.mixing, (x @ self.weight).t()).t()


class ComplexFilter(nn.Module):
    """Filter in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=WIDTH)


@dataclass
class Checked:
    """A dataclass that checks its field."""

    values: torch.Tensor

    def __post_init__(self) -> None:
        if self.values.dim() != 2:
            raise ValueError("two dimensions are needed")


class CheckedDict(collections.OrderedDict[str, torch.Tensor]):
    """A dict that checks its values."""

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        if key != "values" or not isinstance(value, torch.Tensor):
            raise KeyError(key)
        super().__setitem__(key, value)


class _Pair(NamedTuple):
    values: torch.Tensor
    count: int


class CheckedPair(_Pair):
    """A named tuple that checks its fields."""

    def __new__(cls, values: torch.Tensor, count: int) -> CheckedPair:
        if not values.is_floating_point():
            raise TypeError("real numbers are needed")
        return super().__new__(cls, values, count)


class Own(torch.Tensor):
    """A tensor subclass that adds nothing."""


def in_a_checked_dict(values: torch.Tensor) -> CheckedDict:
    made = CheckedDict()
    made["values"] = values
    return made


def packed(values: torch.Tensor) -> rnn.PackedSequence:
    steps = values.view(-1, 4, WIDTH // 4)
    return rnn.pack_padded_sequence(steps, torch.full((len(steps),), 4), batch_first=True)


def unpacked(values: rnn.PackedSequence) -> torch.Tensor:
    return rnn.pad_packed_sequence(values, batch_first=True)[0].flatten(1)


def through_numpy(values: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values.detach().numpy() * 2)


CASES: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "csr in the tail": (
        lambda: Net(outer=lambda y: y.relu().to_sparse_csr() @ torch.eye(WIDTH)),
        "b",
        "sparse_csr",
    ),
    "csc in the tail": (lambda: Net(outer=lambda y: y.to_sparse_csc().to_dense()), "b", "sparse_csc"),
    "mkldnn in the tail": (lambda: Net(outer=lambda y: y.detach().to_mkldnn().to_dense()), "b", "mkldnn"),
    "strided nested": (
        lambda: Net(outer=lambda y: torch.nested.nested_tensor(list(y)).to_padded_tensor(0.0)),
        "b",
        "a nested tensor",
    ),
    "quantized between": (
        lambda: Net(
            inner=lambda y: torch.quantize_per_tensor(y, 0.1, 0, torch.qint8), outer=lambda y: y.dequantize()
        ),
        "b.linear",
        "a quantized tensor",
    ),
    "sparse buffer in the prefix": (lambda: Net(b=SparseMixing()), "a", "sparse_coo"),
    "complex weight": (lambda: Net(b=ComplexFilter()), "a", "complex64"),
    "sparse between": (
        lambda: Net(inner=lambda y: y.to_sparse(), outer=lambda y: y.to_dense()),
        "b.linear",
        "sparse_coo",
    ),
    "tensor class in the tail": (lambda: Net(outer=lambda y: y.as_subclass(Own) * 2), "b", ""),
    "tensor class between": (lambda: Net(inner=lambda y: y.as_subclass(Own)), "a", "subclass"),
    "checked dataclass": (
        lambda: Net(inner=Checked, outer=lambda y: y.values),
        "b.linear",
        "'b' gives what cannot cross a cut: Checked",
    ),
    "checked dict": (lambda: Net(inner=in_a_checked_dict, outer=lambda y: y["values"]), "b.linear", ""),
    "checked named tuple": (
        lambda: Net(inner=lambda y: CheckedPair(y, 3), outer=lambda y: y.values),
        "b",
        "",
    ),
    "generator": (
        lambda: Net(inner=lambda y: (y * n for n in (1, 2)), outer=sum),
        "b.linear",
        "cannot cross a cut: generator",
    ),
    "packed sequence between": (lambda: Net(inner=packed, outer=unpacked), "b.linear", "PackedSequence"),
    "numpy in the tail": (lambda: Net(outer=through_numpy), "", "NumPy"),
    "weight norm by hooks": (
        lambda: Net(b=nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))),
        "a",
        "'b' has hooks",
    ),
    "pruned": (
        lambda: Net(b=prune.l1_unstructured(nn.Linear(WIDTH, WIDTH), "weight", 0.3)),
        "a",
        "'b' has hooks",
    ),
    "weight norm by parametrization": (
        lambda: Net(b=parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
        "b",
        "",
    ),
    "orthogonal": (lambda: Net(b=parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))), "a", "matrix_exp"),
    "fixed number of samples": (
        lambda: Net(outer=lambda y: y.reshape(4, WIDTH)),
        "",
        "does not run on 2 samples",
    ),
    "script": (lambda: Net(b=torch.jit.script(nn.Linear(WIDTH, WIDTH))), "", "TorchScript"),
}


def answers(model: nn.Module, parts: Split, x: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the answers of a split model and of the whole model."""
    crossing = parts.program.run([x], 0, parts.freeze) if parts.program is not None else (x,)
    with torch.no_grad():
        given = parts.tail(parts.tail.values.one_or_all(crossing))
        return tensors_in(given), tensors_in(model(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make, boundary, reason", some(3, CASES.values()), ids=CASES)
def test_split_of_a_model_that_cannot_be_followed_cuts_before_that_and_says_why(
    make: Callable[[], nn.Module], boundary: str, reason: str
) -> None:
    model, x = make().eval(), torch.randn(4, WIDTH)
    parts = split(model, x)
    assert parts.boundary == boundary
    assert reason in (parts.note or parts.why_not)
    given, wanted = answers(model, parts, x)
    assert all(torch.equal(a, b) for a, b in zip(given, wanted, strict=True))


class Tokens(nn.Module):
    """Word embeddings, one table frozen, one with sparse gradients, and an LSTM over a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Embedding(90, 8, padding_idx=0).requires_grad_(False)
        self.trained = nn.Embedding(90, 8, sparse=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = (x > 0).sum(1).clamp(min=1).cpu()
        values = self.frozen(x) + self.trained(x)
        steps = rnn.pack_padded_sequence(values, lengths, batch_first=True, enforce_sorted=False)
        return rnn.pad_packed_sequence(self.lstm(steps)[0], batch_first=True)[0].sum(1)


def test_split_with_sparse_gradients_behind_a_packed_sequence_trains_as_the_whole_model_does() -> None:
    model, x = Tokens(), torch.randint(1, 90, (4, 9))
    x[0, 5:] = 0
    parts = split(model, x)
    assert parts.program is not None
    gradients = []
    for run, given in ((model, (x,)), (parts.tail, parts.program.run([x], 0, parts.freeze))):
        model.zero_grad()
        run(given if len(given) > 1 else given[0]).sum().backward()
        gradients.append(model.trained.weight.grad)
    assert gradients[0].is_sparse and same_bits(*gradients)


@pytest.mark.filterwarnings("ignore")
def test_split_of_a_model_with_a_sparse_buffer_that_nothing_reads_holds_all_of_the_prefix() -> None:
    model = Net()
    model.b.register_buffer("unread", torch.eye(3).to_sparse_csr())
    assert split(model, torch.randn(4, WIDTH)).boundary == "b"


def test_split_of_a_model_whose_answer_is_nested_is_proven_by_its_parts() -> None:
    class Ragged(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nested.nested_tensor_from_jagged(super().forward(x), torch.tensor([0, 1, len(x)]))

    model, x = Ragged().eval(), torch.randn(4, WIDTH)
    parts = split(model, x)
    assert parts.boundary == "b"
    (given,), (wanted,) = answers(model, parts, x)
    assert all(map(torch.equal, dense_parts(given), dense_parts(wanted)))


def test_split_of_a_model_whose_hook_takes_features_leaves_that_module_here() -> None:
    class Taking(Net):
        def __init__(self) -> None:
            super().__init__()
            self.taken: dict[str, torch.Tensor] = {}
            self.b.register_forward_pre_hook(self.take, with_kwargs=True)

        def take(self, _module: nn.Module, args: tuple[torch.Tensor], _kwargs: dict[str, Any]) -> None:
            self.taken["a"] = args[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.taken["a"].sum()

    model, x = Taking().eval(), torch.randn(4, WIDTH)
    parts = split(model, x)
    assert parts.boundary == "a"
    assert "'b' has hooks" in parts.note
    (given,), (wanted,) = answers(model, parts, x)
    assert torch.equal(given, wanted)


def test_split_of_a_model_that_reads_trained_weights_as_data_keeps_what_reads_them_in_the_tail() -> None:
    class Gating(nn.Module):
        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            return x * gate

    class Gated(Net):
        def __init__(self) -> None:
            super().__init__()
            self.gating = Gating()
            self.gate = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.b(self.gating(self.a(x), self.gate.data))) * self.gate.sum()

    assert split(Gated(), torch.randn(4, WIDTH)).boundary == "a"


def test_split_of_a_model_that_does_not_run_raises_what_it_raised() -> None:
    def broken(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("of my own")

    with pytest.raises(ModelError, match=r"cannot be called with .* RuntimeError: of my own"):
        split(Net(outer=broken), torch.randn(4, WIDTH))


@pytest.mark.parametrize(
    "lazy", [nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d(affine=False)], ids=["linear", "buffers"]
)
@pytest.mark.parametrize(
    "call",
    [
        lambda model, x: split(model, x),
        lambda model, x: survey(model, x),
        lambda model, x: upriver.offload(model, example_inputs=x),
        lambda model, x: upriver.coldstart.publish_model(
            model, upriver.Store.open("memory://lazy"), "w.safetensors", (x,)
        ),
    ],
    ids=["split", "survey", "offload", "publish"],
)
def test_a_model_with_lazy_parameters_is_refused_with_what_helps(
    call: Callable[[nn.Module, torch.Tensor], object], lazy: nn.Module
) -> None:
    with pytest.raises(upriver.UpriverError, match="call the model once"):
        call(Net(outer=lazy), torch.randn(4, WIDTH))


@pytest.mark.filterwarnings("ignore")
def test_offload_of_a_model_with_a_sparse_weight_is_refused_by_name_and_its_cuts_end_before_it() -> None:
    model, x = Net(b=SparseMixing()), torch.randn(4, WIDTH)
    with pytest.raises(upriver.errors.CaptureError, match=r"'b\.mixing' is a tensor of layout sparse_coo"):
        upriver.offload(model, example_inputs=x)
    assert survey(model, x).captured_by == "torch.export, up to 'a'"


def test_offload_of_a_model_that_does_not_run_says_so_and_does_not_blame_the_capture() -> None:
    def broken(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("of my own")

    with pytest.raises(upriver.errors.CaptureError, match="the model does not run: RuntimeError: of my own"):
        upriver.offload(Net(outer=broken), example_inputs=torch.randn(4, WIDTH))


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "coo": lambda: torch.eye(4).to_sparse(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "mkldnn": lambda: torch.eye(4).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "meta": lambda: torch.empty(3, device="meta"),
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "without elements": lambda: torch.empty(0, 3),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", some(2, KINDS.values()), ids=KINDS)
def test_split_of_a_model_that_only_holds_an_unusual_tensor_is_right(
    kind: Callable[[], torch.Tensor],
) -> None:
    model, x = Net().eval(), torch.randn(4, WIDTH)
    model.b.register_buffer("unread", kind())
    model.kept = [kind()]
    parts = split(model, x)
    (given,), (wanted,) = answers(model, parts, x)
    assert torch.equal(given, wanted)


def test_split_of_a_model_that_maps_a_frozen_module_over_samples_runs_unsplit() -> None:
    class Mapped(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.vmap(self.b)(torch.vmap(self.a)(x)))

    parts = split(Mapped().eval(), torch.randn(4, WIDTH))
    assert parts.program is None
    assert "cannot cross a cut: a tensor of torch.func" in parts.why_not


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make, nbytes",
    [
        (lambda: torch.eye(4), 64),
        (lambda: torch.eye(4).to_sparse(), 2 * 4 * 8 + 4 * 4),
        (lambda: torch.sparse_csr_tensor([0, 1, 2], [0, 1], [1.0, 1.0], size=(2, 2)), 3 * 8 + 2 * 8 + 2 * 4),
        (lambda: torch.sparse_bsc_tensor([0, 1], [0], torch.ones(1, 2, 2), size=(2, 2)), 2 * 8 + 8 + 16),
        (lambda: torch.eye(4).to_mkldnn(), 0),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            5 * 4 + 3 * 8,
        ),
    ],
    ids=["strided", "coo", "csr", "bsc", "mkldnn", "jagged"],
)
def test_storages_of_a_tensor_hold_its_elements_and_where_they_stand(
    make: Callable[[], torch.Tensor], nbytes: int
) -> None:
    tensor = make()
    assert sum(storage.nbytes() for storage in storages_of(tensor)) == nbytes


@pytest.mark.filterwarnings("ignore")
def test_offload_of_a_model_that_holds_a_nested_tensor_is_refused_in_words() -> None:
    model = Net()
    model.b.register_buffer("unread", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    with pytest.raises(upriver.errors.CaptureError, match=r"could not capture the model: .*Nested"):
        upriver.offload(model, example_inputs=torch.randn(4, WIDTH))


NAN, INF, MAX = float("nan"), float("inf"), torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([NAN, 1.0], [NAN, 1.0], True),
        ([NAN, 1.0], [1.0, NAN], False),
        ([NAN, INF], [NAN, MAX], False),
        ([NAN, -INF], [NAN, -MAX], False),
        ([NAN, 7.0], [7.0, NAN], False),
        ([complex(NAN, 1.0)], [complex(NAN, 1.0)], True),
        ([complex(1.0, 0.0)], [complex(NAN, 1.0)], False),
    ],
)
def test_a_nan_is_equal_to_nothing_but_a_nan(one: list[Any], other: list[Any], same: bool) -> None:
    assert same_bits(torch.tensor(one), torch.tensor(other)) is same
