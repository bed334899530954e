"""Check that a trial run restores the model and the generators, whatever its forward and backward change."""

from __future__ import annotations

import copy
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.examples import some
from tests.program.nets import freeze
from upriver.finetune.planning.plan_builder import measure_tail
from upriver.program.freeze import keep_in_eval
from upriver.program.module_state.reachable import ReachableObjects
from upriver.program.module_state.restoration import state_kept
from upriver.program.split.split import Split, UnsplitModel, split


class Doing(nn.Linear):
    """A layer that also does something else whenever it runs."""

    def __init__(self, does: Callable[[Doing], Any], holds: Callable[[], dict[str, Any]] = dict) -> None:
        super().__init__(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.does = (does,)
        for name, value in holds().items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.does[0](self)
        return super().forward(x)


class Slotted:
    """An object without a dict of attributes."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def _replace_weight(layer: Doing) -> None:
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


def _write_by_numpy(layer: Doing) -> None:
    layer.weight.detach().numpy()[0, 0] += 1.0


def _count(layer: Doing) -> None:
    layer.calls += 1


def _flip(layer: Doing) -> None:
    layer.training = not layer.training


def _add_gradient(layer: Doing) -> None:
    layer.weight.grad = torch.ones_like(layer.weight)


CHANGES: dict[str, tuple[Any, ...]] = {
    "a weight through .data": (lambda m: m.weight.data.mul_(2),),
    "a weight under no_grad": (lambda m: m.weight.detach().add_(1),),
    "a weight by NumPy": (_write_by_numpy,),
    "another .data": (lambda m: setattr(m.weight, "data", m.weight.data * 2),),
    "another parameter": (_replace_weight,),
    "a buffer": (lambda m: m.mean.add_(1),),
    "another buffer": (lambda m: setattr(m, "mean", m.mean + 1),),
    "a part of a buffer's view": (lambda m: m.mean[:2].data.fill_(7),),
    "a tensor among the attributes": (lambda m: m.queue.add_(1), lambda: {"queue": torch.zeros(3)}),
    "a tensor in a list": (lambda m: m.states[0].add_(1), lambda: {"states": [torch.zeros(3)]}),
    "a number": (_count, lambda: {"calls": 0}),
    "a list": (lambda m: m.calls.append(1), lambda: {"calls": []}),
    "a list of tensors": (lambda m: m.calls.append(torch.ones(3)), lambda: {"calls": [torch.zeros(3)]}),
    "a list in a dict": (lambda m: m.log["a"].append(1), lambda: {"log": OrderedDict(a=[])}),
    "a full deque": (lambda m: m.last.append(random.random()), lambda: {"last": deque([1, 2], maxlen=2)}),
    "a set": (lambda m: m.seen.add(len(m.seen)), lambda: {"seen": set()}),
    "an array": (lambda m: m.sums.__iadd__(1), lambda: {"sums": np.zeros(3)}),
    "an object": (lambda m: setattr(m.stats, "n", m.stats.n + 1), lambda: {"stats": SimpleNamespace(n=0)}),
    "an object with slots": (lambda m: setattr(m.stats, "count", 1), lambda: {"stats": Slotted()}),
    "a hidden module": (lambda m: m.other[0].weight.data.mul_(2), lambda: {"other": (nn.Linear(2, 2),)}),
    "a module that was not there": (lambda m: setattr(m, "late", nn.Linear(2, 2)),),
    "a NumPy generator": (lambda m: m.rng.random(), lambda: {"rng": np.random.default_rng(0)}),
    "an old NumPy generator": (lambda m: m.rng.rand(), lambda: {"rng": np.random.RandomState(0)}),
    "a generator of Python's": (lambda m: m.rng.random(), lambda: {"rng": random.Random(0)}),
    "a generator of torch's": (
        lambda m: torch.rand(2, generator=m.rng),
        lambda: {"rng": torch.Generator().manual_seed(0)},
    ),
    "everybody's generators": (lambda m: (random.random(), np.random.rand(), torch.rand(2)),),
    "a gradient": (_add_gradient,),
    "a mode": (_flip,),
    "an endless count": (lambda m: next(m.ids), lambda: {"ids": itertools.count()}),
    "a flag": (lambda m: m.bias.requires_grad_(False),),
    "a hook on a module": (lambda m: m.register_forward_hook(lambda *_: None),),
    "a hook on a gradient": (lambda m: m.weight.register_hook(lambda gradient: gradient * 2),),
    "a hook behind a gradient": (lambda m: m.weight.register_post_accumulate_grad_hook(lambda p: None),),
}


def seen(value: Any) -> Any:
    """Return a snapshot that compares equal until the value changes."""
    if isinstance(value, nn.Module):
        return [(name, seen(item)) for name, item in vars(value).items() if name != "does"]
    if isinstance(value, torch.Tensor):
        grad = None if value.grad is None else value.grad.tolist()
        hooks = [len(h or ()) for h in (value._backward_hooks, value._post_accumulate_grad_hooks)]
        return id(value), value.data_ptr(), value.tolist(), grad, value.requires_grad, hooks
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return seen(value.get_state()[1]), value.get_state()[2]
    if isinstance(value, dict):
        return id(value), [(key, seen(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | deque):
        return id(value), [seen(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, SimpleNamespace):
        return seen(vars(value))
    if isinstance(value, set | bytearray):
        return copy.copy(value)
    if isinstance(value, itertools.count):
        return repr(value)
    return value.count if isinstance(value, Slotted) else value


def everybodys() -> Any:
    return random.getstate(), seen(np.random.mtrand._rand), torch.get_rng_state().tolist()


@pytest.mark.parametrize("change", CHANGES)
def test_a_forward_that_changes_something_leaves_it_as_it_was(change: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Doing(*CHANGES[change]), nn.Linear(6, 2))
    model[0].weight.grad = torch.ones(6, 6)  # some exist already
    before, generators = seen(model), everybodys()
    with state_kept(model):
        for _ in range(2):
            model(torch.randn(4, 6)).sum().backward()
        assert (seen(model), everybodys()) != (before, generators)
    assert seen(model) == before
    assert everybodys() == generators


def test_weights_that_a_hook_steps_in_backward_are_as_before() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    model.steps = {p: torch.optim.SGD([p], lr=1.0, momentum=0.9) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: model.steps[p].step())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with state_kept(model):
        model(torch.randn(4, 6)).sum().backward()
        assert not torch.equal(model.weight, before["weight"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(not step.state for step in model.steps.values())


def test_a_context_inside_another_puts_back_what_was_found_to_be_written_before() -> None:
    model = Doing(lambda m: m.weight.data.mul_(2))
    before = model.weight.detach().clone()
    with state_kept(model):
        with state_kept(model) as first:
            model(torch.randn(2, 6))
            assert first.written() == {"weight"}
        assert torch.equal(model.weight, before)
        with state_kept(model):
            model(torch.randn(2, 6))  # torch does not notice a write through .data
        assert torch.equal(model.weight, before)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("change", CHANGES)
def test_a_context_inside_another_puts_back_what_was_there_when_it_began(change: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Doing(*CHANGES[change]), nn.Linear(6, 2))
    before, generators = seen(model), everybodys()
    with state_kept(model):
        with state_kept(model) as first:  # nothing has changed yet
            model(torch.randn(4, 6)).sum().backward()
            first.written()  # torch does not notice a write through .data
        assert (seen(model), everybodys()) == (before, generators)
        model(torch.randn(4, 6)).sum().backward()
        between = seen(model), everybodys()
        with state_kept(model):
            model(torch.randn(4, 6)).sum().backward()
            assert (seen(model), everybodys()) != between
        assert (seen(model), everybodys()) == between
    assert (seen(model), everybodys()) == (before, generators)


def test_a_context_inside_another_knows_what_came_to_hang_on_the_model_by_its_name_now() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    with state_kept(model):
        model["a"], model["b"], model.kept = model["b"], model["a"], [torch.zeros(2)]
        with state_kept(model) as inner:
            model["a"].weight.data.add_(1)
            model.kept[0].add_(1)
            assert inner.written() == {"a.weight", "kept"}
        assert model.kept[0].tolist() == [0, 0]


def test_contexts_inside_another_walk_through_the_model_anew_only_for_other_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walked: list[nn.Module] = []

    class Walking(ReachableObjects):
        def __init__(self, model: nn.Module) -> None:
            walked.append(model)
            super().__init__(model)

    monkeypatch.setattr("upriver.program.module_state.restoration.ReachableObjects", Walking)
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    with state_kept(model):
        for _ in range(2):
            with state_kept(model):
                model.eval()[1].p = 0.1
                with state_kept(model):
                    model.train()
                assert (model[0].training, model[1].p) == (False, 0.1)
        assert len(walked) == 1
        model.other = [nn.Linear(2, 2)]
        with state_kept(model):
            pass
        assert len(walked) == 2


# -------------------------------------------------------------------------------- split and measured


class Clamped(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class MergedInEval(nn.Linear):
    """Add to its weight in eval and subtract it in training, as adapters do; rounding errors remain."""

    merged = False

    def train(self, mode: bool = True) -> MergedInEval:
        if mode == self.merged:
            self.weight.data += 0.1 if not mode else -0.1
            self.merged = not mode
        return super().train(mode)


def pairs(layer: nn.Module) -> nn.Module:
    return freeze_first(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), layer, nn.ReLU(), nn.Linear(6, 2)))


def freeze_first(model: nn.Module) -> nn.Module:
    freeze(model[0])
    return model


TAILS: dict[str, Callable[[], nn.Module]] = {
    "clamped": lambda: Clamped(6, 6),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(6, 6)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(6, 6)),
    "batch norm": lambda: nn.BatchNorm1d(6),
    "merged in eval": lambda: MergedInEval(6, 6),
    "a list that grows": lambda: Doing(lambda m: m.calls.append(1), lambda: {"calls": []}),
    "its own generator": lambda: Doing(lambda m: m.rng.random(), lambda: {"rng": np.random.default_rng(0)}),
}


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.full
def test_splitting_and_measuring_leave_the_model_as_it_was(tail: str) -> None:
    torch.manual_seed(0)
    model = pairs(TAILS[tail]()).train()
    before, generators = seen(model), everybodys()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    parts = split(model, x)
    assert parts.program is not None, parts.why_not
    features = parts.program.run((x,), 0, parts.freeze)
    measure_tail(model, parts, features, samples=4)
    assert seen(model) == before
    assert everybodys() == generators


# ----------------------------------------------------------------------------- writes in the forward


def step(model: nn.Module, run: Callable[[], torch.Tensor], parts: Split, steps: int = 3) -> list[Any]:
    """Train for some steps; return the resulting weights and the answers."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    answers = []
    for _ in range(steps):
        model.train()
        keep_in_eval(model, list(parts.in_eval))
        answer = run()
        answer.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        answers.append(answer.tolist())
    return [*answers, *(value.tolist() for value in model.state_dict().values())]


def same_training(make: Callable[[], nn.Module], x: torch.Tensor) -> Split:
    """Train a model and its split, all generators seeded alike, and check that both give the same bits."""
    (whole, _), (ours, parts) = (_trained(make, x, split_up=split_up) for split_up in (False, True))
    assert whole == ours
    return parts


def _trained(make: Callable[[], nn.Module], x: torch.Tensor, *, split_up: bool) -> tuple[list[Any], Split]:
    torch.manual_seed(0)
    model = make().train()
    parts = split(model, x)
    given = (
        x if parts.program is None else parts.tail.values.one_or_all(parts.program.run((x,), 0, parts.freeze))
    )
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    return step(model, (lambda: parts.tail(given)) if split_up else (lambda: model(x)), parts), parts


class Averaged(nn.Module):
    """A key encoder that follows the query encoder while the model trains."""

    def __init__(self, update: Callable[[nn.Parameter, nn.Parameter], Any]) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.update = (update,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                for ours, theirs in zip(self.query.parameters(), self.key.parameters(), strict=True):
                    self.update[0](theirs, ours)
        return self.query(x) + self.key(x)


UPDATES: dict[str, Callable[[nn.Parameter, nn.Parameter], Any]] = {
    "lerp": lambda key, query: key.lerp_(query, 0.1),
    "replaced data": lambda key, query: setattr(key, "data", key.data * 0.9 + query.data * 0.1),
    "copied data": lambda key, query: key.data.copy_(key.data * 0.9 + query.data * 0.1),
    "by NumPy": lambda key, query: key.numpy().__imul__(0.9).__iadd__(0.1 * query.detach().numpy()),
}


@pytest.mark.parametrize("update", UPDATES)
def test_a_frozen_part_that_forward_writes_runs_unsplit_and_trains_as_ever(update: str) -> None:
    parts = same_training(lambda: Averaged(UPDATES[update]), torch.randn(4, 6))
    assert isinstance(parts.tail, UnsplitModel)
    assert "changes parameter 'key.0.weight'" in parts.why_not
    assert parts.in_eval == ()  # an average of trained layers is not a frozen unit


@pytest.mark.full
def test_a_frozen_part_beside_a_written_one_is_split_all_the_same() -> None:
    class Both(Averaged):
        def __init__(self) -> None:
            super().__init__(UPDATES["copied data"])
            self.stem = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
            freeze(self.stem)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.stem(x))

    parts = same_training(Both, torch.randn(4, 6))
    assert parts.prefix_units == ("stem",)
    assert "changes parameter 'key.0.weight'" in parts.note


def test_a_frozen_embedding_with_a_norm_runs_where_the_model_runs() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 6, max_norm=0.5)
            self.rest = nn.Linear(6, 6)
            self.head = nn.Linear(6, 2)
            freeze(self.table)
            freeze(self.rest)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.rest(self.table(x)))

    parts = same_training(Normed, torch.randint(0, 9, (4, 3)))
    assert isinstance(parts.tail, UnsplitModel)
    assert "changes parameter 'table.weight'" in parts.why_not


class Carrying(nn.Linear):
    """Keep a tensor from one call for the next."""

    kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = 0.0 if self.kept is None else self.kept
        self.kept = super().forward(x).detach().mean(0)
        return super().forward(x) + before


@pytest.mark.full
def test_a_frozen_layer_that_carries_a_tensor_over_runs_where_the_model_runs() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 6), Carrying(6, 6), nn.Linear(6, 2))
        freeze(model[0])
        freeze(model[1])
        return model

    parts = same_training(make, torch.randn(4, 6))
    assert parts.boundary == "0"
    assert "module '1' keeps 'kept' from one call for the next" in parts.note


# ------------------------------------------------------------------------------------- random numbers


class Noisy(nn.Module):
    """Frozen, random and trained layers."""

    def __init__(self, draw: Callable[[Noisy], float], *, late: bool = True, always: bool = False) -> None:
        super().__init__()
        self.first, self.second = (freeze_all(nn.Linear(6, 6)) for _ in range(2))
        self.head = nn.Linear(6, 2)
        self.rng, self.np_rng = random.Random(0), np.random.default_rng(0)
        self.draw, self.late, self.always = (draw,), late, always

    def noise(self) -> float:
        return self.draw[0](self) if self.training or self.always else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.late:
            return self.head(self.second(x) * self.noise())
        return self.head(self.second(x * self.noise()))


def freeze_all(module: nn.Module) -> nn.Module:
    freeze(module)
    return module


DRAWS: dict[str, Callable[[Noisy], float]] = {
    "Python's": lambda m: random.random(),
    "NumPy's": lambda m: float(np.random.rand()),
    "its own of Python's": lambda m: m.rng.random(),
    "its own of NumPy's": lambda m: float(m.np_rng.random()),
}


@pytest.mark.parametrize("draw", some(1, DRAWS))
def test_a_model_that_draws_behind_the_freeze_point_is_split_and_draws_the_same(draw: str) -> None:
    parts = same_training(lambda: Noisy(DRAWS[draw]), torch.randn(4, 6))
    assert parts.boundary == "second"


@pytest.mark.parametrize("draw", some(2, DRAWS))
def test_a_model_that_draws_between_frozen_layers_is_not_split_behind_it(draw: str) -> None:
    parts = same_training(lambda: Noisy(DRAWS[draw], late=False), torch.randn(4, 6))
    assert isinstance(parts.tail, UnsplitModel)
    assert "draws" in parts.why_not
    assert "random numbers" in parts.why_not


@pytest.mark.parametrize("draw", some(1, ["Python's", "its own of NumPy's"]))
def test_a_model_that_draws_in_eval_too_is_not_split_behind_it(draw: str) -> None:
    parts = same_training(lambda: Noisy(DRAWS[draw], late=False, always=True), torch.randn(4, 6))
    assert parts.boundary == "first"
    assert "random numbers" in parts.note or "from one call for the next" in parts.note


class Leaving(nn.Module):
    """Set an attribute on itself between two frozen layers, or within the second one."""

    def __init__(self, does: Callable[[nn.Module, torch.Tensor], Any], *, within: bool = False) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 2)
        self.second: nn.Module = Within(does) if within else nn.Linear(6, 6)
        freeze(self.first)
        freeze(self.second)
        self.register_buffer("mean", torch.zeros(6))
        self.box, self.boxes = SimpleNamespace(mean=torch.zeros(6)), {"mean": torch.zeros(6)}
        self.does = (lambda *_: None) if within else does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.does(self, x)
        return self.head(self.second(torch.relu(x)))


class Within(nn.Linear):
    """A layer that sets an attribute within its forward."""

    def __init__(self, does: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.does = does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.does(self, x)
        return super().forward(x)


def _averages(model: Any, x: torch.Tensor) -> None:
    model.mean = 0.9 * model.mean + 0.1 * x.detach().mean(0)


LEFT: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "a buffer that is replaced": _averages,
    "a buffer by its dictionary": lambda m, x: m._buffers.update(mean=x.detach().mean(0)),
    "an attribute": lambda m, x: setattr(m, "kept", x.detach()),
    "an attribute with its graph": lambda m, x: setattr(m, "kept", x),
    "a view": lambda m, x: setattr(m, "kept", x.detach()[:, 2:4].t()),
    "a list": lambda m, x: setattr(m, "kept", [x.detach(), (x.detach() * 2).sum()]),
    "a dictionary": lambda m, x: m.__dict__.setdefault("boxes", {}).update(mean=x.detach().mean(0)),
    "an object": lambda m, x: setattr(m, "box", SimpleNamespace(mean=x.detach().mean(0))),
    "a number": lambda m, x: setattr(m, "kept", float(x.detach().sum())),
}


def left_on(model: nn.Module) -> list[Any]:
    """Return all attributes that are tensors or numbers, by name."""
    found: list[Any] = []
    todo = [(name, value) for module in model.modules() for name, value in vars(module).items()]
    while todo:
        name, value = todo.pop()
        match value:
            case torch.Tensor():
                found.append((name, value.tolist()))
            case float():
                found.append((name, value))
            case list():
                todo += [(name, item) for item in value]
            case dict() if name in ("_buffers", "boxes"):
                todo += value.items()
            case SimpleNamespace():
                todo += vars(value).items()
    return sorted(found, key=repr)


@pytest.mark.parametrize("left", some(2, LEFT))
@pytest.mark.parametrize("within", some(1, [False, True]))
def test_a_split_leaves_on_the_model_what_the_whole_one_does(left: str, within: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    whole = Leaving(LEFT[left], within=within)
    before = left_on(whole)
    ours = copy.deepcopy(whole)
    parts = split(ours, x)
    assert parts.program is not None, parts.why_not
    assert left_on(ours) == before
    for _ in range(2):
        features = parts.program.run((x,), 0, parts.freeze)
        assert torch.equal(parts.tail(parts.tail.values.one_or_all(features)), whole(x))
        assert left_on(ours) == left_on(whole) != before


def test_a_mask_that_a_frozen_layer_keeps_does_not_end_the_prefix() -> None:
    parts = split(Leaving(lambda m, x: setattr(m, "mask", torch.ones(6)), within=True), torch.randn(4, 6))
    assert parts.boundary == "second"


def test_what_a_step_leaves_behind_is_part_of_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upriver.program.split.forward_pass.ForwardPass.depends_on_input", lambda *_: False)
    parts = split(Leaving(_averages), torch.randn(4, 6))
    assert isinstance(parts.tail, UnsplitModel)
    assert "leaves another value in 'mean'" in parts.why_not
