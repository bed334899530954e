"""Check that weights changed after the capture raise at every cut, and never mix old and new values."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import upriver
from tests.examples import some
from tests.inference.asking import SELDOM, Chain, chain, cut_at, here
from tests.program.nets import Small
from tests.server.running import Running
from upriver.errors import FrozenChanged
from upriver.inference.change_detection import MOST_TENSORS, PIECE_BYTES, ChangeDetector, module_states
from upriver.inference.offload import Offload


@pytest.fixture
def model() -> Chain:
    return chain()


@pytest.fixture
def answer(model: Chain, server: Running) -> Iterator[Offload]:
    with upriver.offload(
        model, example_inputs=torch.randn(2, 64), servers=[server.url], cut=0, **SELDOM
    ) as found:
        yield found


def load_others(model: Chain) -> None:
    model.load_state_dict(chain(seed=1).state_dict())


def step(model: Chain) -> None:
    model(torch.randn(2, 64)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def average(model: Chain) -> None:
    with torch.no_grad():
        model.layers.last.bias.mul_(0.9).add_(chain(seed=1).layers.last.bias, alpha=0.1)


@pytest.mark.parametrize("change", some(1, [load_others, step, average]))
def test_weights_that_are_written_to_are_an_error_at_every_cut(
    change: Callable[[Chain], None], model: Chain, answer: Offload
) -> None:
    x = torch.randn(2, 64)
    before, wanted = copy.deepcopy(model.state_dict()), here(model, x)
    change(model)
    for cut in range(answer.program.num_stages + 1):
        cut_at(answer, cut)
        for _ in range(2):
            with pytest.raises(FrozenChanged, match=r"'layers\.\w+\.\w+' changed after the model had been"):
                answer(x)
    with pytest.raises(FrozenChanged, match="make another one with"):
        answer.warm()
    model.load_state_dict(before)
    for cut in range(answer.program.num_stages + 1):
        cut_at(answer, cut)
        assert torch.equal(answer(x), wanted)


def data(model: Chain) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.9)


def fused(model: Chain) -> None:
    model(torch.randn(2, 64)).sum().backward()
    torch.optim.Adam(model.parameters(), lr=0.1, fused=True).step()


@pytest.mark.parametrize("change", some(1, [data, fused]))
def test_writes_that_move_no_version_are_seen_by_their_values(
    change: Callable[[Chain], None], model: Chain, answer: Offload
) -> None:
    x = torch.randn(2, 64)
    before, wanted = copy.deepcopy(model.state_dict()), here(model, x)
    change(model)
    for cut in (0, 3, 7):
        cut_at(answer, cut)
        with pytest.raises(FrozenChanged):
            answer(x)
    for name, tensor in model.state_dict().items():
        tensor.data.copy_(before[name])
    assert torch.equal(answer(x), wanted)


def test_one_weight_is_looked_at_in_its_turn_and_kept_in_mind(model: Chain, answer: Offload) -> None:
    x = torch.randn(2, 64)
    wanted = here(model, x)
    model.layers.last.weight.data[0, 0] += 1
    turns = len(answer._unchanged._pieces)
    cut_at(answer, 0)
    seen = []
    for _ in range(2 * turns):
        try:
            assert torch.equal(answer(x), wanted)
        except FrozenChanged as error:
            seen.append(str(error))
    assert len(seen) > turns and all("'layers.last.weight'" in each for each in seen)


@pytest.mark.parametrize("number", some(1, range(6)))
def test_one_value_of_a_small_model_is_seen_with_the_next_request(number: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), torch.randn(2, 8)
    with upriver.offload(model, example_inputs=x) as answer:
        answer(x)
        list(model.parameters())[number].data.view(-1)[0] += 1
        for _ in range(2):
            with pytest.raises(FrozenChanged):
                answer(x)


def test_as_many_values_are_compared_at_once_as_there_is_room_for() -> None:
    unchanged = ChangeDetector()
    sizes = {"large": 40_000, "middle": 5_000, **{f"small{number}": 1 for number in range(100)}}
    unchanged.watch({name: torch.zeros(size) for name, size in sizes.items()})
    together = [[piece.numel() for _, piece, _ in pieces] for pieces in unchanged._pieces]
    assert sum(map(sum, together)) == 4 * sum(sizes.values())
    assert all(sum(each) <= PIECE_BYTES and len(each) <= MOST_TENSORS for each in together)
    assert len(together) <= 11


@pytest.mark.full
def test_weights_that_come_to_lie_in_shared_memory_are_no_change(model: Chain, answer: Offload) -> None:
    x = torch.randn(2, 64)
    wanted = here(model, x)
    model.share_memory()
    cut_at(answer, 3)
    for _ in range(2 * len(answer._unchanged._pieces)):
        assert torch.equal(answer(x), wanted)


@pytest.mark.full
def test_a_tensor_in_the_place_of_another_one_is_no_change_if_its_values_are_none(
    model: Chain, answer: Offload
) -> None:
    x = torch.randn(2, 64)
    before, wanted = copy.deepcopy(model.state_dict()), here(model, x)
    model.load_state_dict(chain(seed=1).state_dict(), assign=True)
    for cut in range(answer.program.num_stages + 1):
        cut_at(answer, cut)
        with pytest.raises(FrozenChanged, match=r"'layers\.\w+\.\w+' changed after the model had been"):
            answer(x)
    model.load_state_dict(before, assign=True)
    assert torch.equal(answer(x), wanted)
    model.layers.last.bias.data.add_(1)  # and is watched from here on
    with pytest.raises(FrozenChanged, match=r"layers\.last\.bias"):
        for _ in range(len(answer._unchanged._pieces)):
            answer(x)


@pytest.mark.full
def test_another_type_is_a_change_and_back_without_a_loss_is_none(model: Chain, answer: Offload) -> None:
    x = torch.randn(2, 64)
    wanted = here(model, x)
    model.double().float()
    assert torch.equal(answer(x), wanted)
    model.half()
    with pytest.raises(FrozenChanged, match=r"'layers\.\w+\.\w+' changed after the model had been"):
        answer(x)


def replaced(model: Chain) -> Callable[[], object]:
    before, model.layers.last = model.layers.last, nn.Linear(12, 3)
    return lambda: setattr(model.layers, "last", before)


def added(model: Chain) -> Callable[[], object]:
    model.layers.append(nn.ReLU())
    return lambda: model.layers.pop(7)


def hooked(model: Chain) -> Callable[[], object]:
    return model.layers.tanh.register_forward_hook(lambda _module, _args, result: result + 1).remove


def hooked_before(model: Chain) -> Callable[[], object]:
    return model.register_forward_pre_hook(lambda _module, args: (args[0] + 1,)).remove


def hooked_everywhere(model: Chain) -> Callable[[], object]:
    def hook(_module: nn.Module, _args: object, result: torch.Tensor) -> torch.Tensor:
        return result + 1

    return torch.nn.modules.module.register_module_forward_hook(hook).remove


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param(replaced, "submodule 'last' of module 'layers'", marks=pytest.mark.full),
        pytest.param(added, "submodule '7' of module 'layers'", marks=pytest.mark.full),
        (hooked, r"a hook of module 'layers\.tanh'"),
        pytest.param(hooked_before, "a hook of the model", marks=pytest.mark.full),
        pytest.param(hooked_everywhere, "a hook of all modules", marks=pytest.mark.full),
    ],
)
def test_other_modules_and_hooks_are_an_error_at_every_cut_until_they_are_as_they_were(
    change: Callable[[Chain], Callable[[], object]], named: str, model: Chain, answer: Offload
) -> None:
    x = torch.randn(2, 64)
    wanted = here(model, x)
    put_back = change(model)
    for cut in range(answer.program.num_stages + 1):
        cut_at(answer, cut)
        with pytest.raises(FrozenChanged, match=f"{named} changed after the model"):
            answer(x)
    with pytest.raises(FrozenChanged, match=named):
        answer(torch.randn(3, 64))
    put_back()
    assert torch.equal(answer(x), wanted)
    assert torch.equal(answer(x[:1]), here(model, x[:1]))


@pytest.mark.full
def test_hooks_of_a_capture_are_nobodys(model: Chain, answer: Offload) -> None:
    """Meanwhile requests of the captured forms go on."""
    x, wrong = torch.randn(2, 64), []
    wanted = here(model, x)
    capturing = threading.Event()

    def ask() -> None:
        try:
            while not capturing.is_set():
                assert torch.equal(answer(x), wanted)
        except BaseException as error:
            wrong.append(error)

    cut_at(answer, 7)
    asker = threading.Thread(target=ask)
    asker.start()
    for count in (3, 4):
        answer(torch.randn(count, 64))
    capturing.set()
    asker.join()
    assert wrong == []


@pytest.mark.parametrize("how", some(1, ["data", "assign"]))
@pytest.mark.full
def test_another_form_is_captured_with_the_same_weights_or_not_at_all(
    how: str, model: Chain, answer: Offload
) -> None:
    before = copy.deepcopy(model.state_dict())
    if how == "data":  # which changes no version
        model.layers.second.weight.data.mul_(2)
    else:
        model.load_state_dict(chain(seed=1).state_dict(), assign=True)
    x = torch.randn(3, 64)
    with pytest.raises(FrozenChanged, match="changed after the model had been captured"):
        answer(x)
    assert len(answer._forms.networks) == 1
    model.load_state_dict(before, assign=True)
    if how == "assign":
        assert torch.equal(answer(x), here(model, x))
        assert len(answer._forms.networks) == 2


def test_statistics_that_training_moves_are_weights_and_its_counters_are_not() -> None:
    torch.manual_seed(0)
    model, x = Small(), torch.randn(2, 3, 16, 16)
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    with upriver.offload(model, example_inputs=x) as answer:
        assert norm.num_batches_tracked is not None and norm.running_mean is not None
        norm.num_batches_tracked.add_(1)
        assert torch.equal(answer(x), here(model, x))
        norm.running_mean.add_(1)
        with pytest.raises(FrozenChanged, match="running_mean"):
            answer(x)


class Statistics(nn.Module):
    """Weights of which any piece may be checked long before the statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.inside, self.outside = nn.Linear(64, 4096), nn.BatchNorm1d(4096), nn.Linear(4096, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.outside(torch.relu(self.inside(self.wide(x))))
        return answer


@pytest.fixture
def statistics() -> Statistics:
    torch.manual_seed(0)
    return Statistics()


@pytest.mark.full
def test_a_forward_in_training_is_an_error_with_the_next_request_at_every_cut(
    statistics: Statistics, server: Running
) -> None:
    """The kernel writes directly: only the version of the counter changes, none of the statistics."""
    x = torch.randn(4, 64)
    with upriver.offload(statistics, example_inputs=x, servers=[server.url], cut=0, **SELDOM) as answer:
        before, wanted = copy.deepcopy(statistics.state_dict()), here(statistics, x)
        assert torch.equal(answer(x), wanted)
        for cut in range(answer.program.num_stages + 1):
            cut_at(answer, cut)
            for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                with context():
                    statistics.train()(x)
                statistics.eval()
                for _ in range(2):
                    with pytest.raises(FrozenChanged, match=r"'inside\.running_\w+' changed after"):
                        answer(x)
                statistics.load_state_dict(before)
                assert torch.equal(answer(x), wanted)


def test_a_counter_that_moves_before_its_statistics_do_is_kept_in_mind(statistics: Statistics) -> None:
    x = torch.randn(4, 64)
    with upriver.offload(statistics, example_inputs=x) as answer:
        norm, wanted = statistics.inside, here(statistics, x)
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked.add_(1)
        for _ in range(3):
            assert torch.equal(answer(x), wanted)
        torch.nn.functional.batch_norm(
            torch.randn(4, 4096), norm.running_mean, norm.running_var, training=True
        )
        with pytest.raises(FrozenChanged, match="running_"):
            answer(x)


@pytest.mark.full
def test_what_comes_in_a_statistics_place_is_watched_with_their_counter(statistics: Statistics) -> None:
    x = torch.randn(4, 64)
    with upriver.offload(statistics, example_inputs=x) as answer:
        statistics.inside.running_mean = statistics.inside.running_mean.clone()  # type: ignore[union-attr]
        assert torch.equal(answer(x[:2]), here(statistics, x[:2]))  # captured with the new one
        running_var = statistics.inside.running_var
        assert running_var is not None
        kept = running_var.clone()
        statistics.train()(x)
        running_var.copy_(kept)
        with pytest.raises(FrozenChanged, match="running_mean"):
            answer(x[:2])


def test_statistics_without_a_counter_are_seen_by_their_values(statistics: Statistics) -> None:
    statistics.inside.num_batches_tracked, x = None, torch.randn(4, 64)
    with upriver.offload(statistics, example_inputs=x) as answer:
        wanted = here(statistics, x)
        assert torch.equal(answer(x), wanted)
        statistics.train()(x)
        with pytest.raises(FrozenChanged, match="running_"):
            for _ in range(len(answer._unchanged._pieces)):
                answer(x)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_what_no_program_reads_need_not_have_values() -> None:
    norm, unchanged = nn.BatchNorm1d(3), ChangeDetector()
    for name, value in (
        ("unset", torch.empty(3, device="meta")),
        ("none", torch.empty(0)),
        ("sparse", torch.eye(3).to_sparse()),
        ("number", torch.tensor(1.0, dtype=torch.complex64)),
    ):
        norm.register_buffer(name, value)
    norm.register_parameter("later", nn.UninitializedParameter())
    weights = {name: value for name, value in norm.named_parameters() if name != "later"}
    unchanged.watch(weights, module_states(norm))
    unchanged.check()
    norm.bias.data.add_(1)
    norm.get_buffer("number").add_(1)
    with pytest.raises(FrozenChanged, match="'bias'"):
        unchanged.check()


@pytest.mark.full
def test_a_change_beside_a_request_is_seen(model: Chain, answer: Offload) -> None:
    x, run = torch.randn(2, 64), answer.program.run

    def changing(*args: object) -> object:
        done = run(*args)  # type: ignore[arg-type]
        load_others(model)
        return done

    cut_at(answer, 4)
    answer.program.run = changing  # type: ignore[method-assign,assignment]
    with pytest.raises(FrozenChanged):
        answer(x)


def test_threads_see_it_alike() -> None:
    weights = {f"w{i}": torch.zeros(3) for i in range(50)}
    unchanged, wrong = ChangeDetector(), []
    unchanged.watch(weights)
    weights["w7"].fill_(0.0)

    def check() -> None:
        try:
            for _ in range(100):
                unchanged.check()
        except FrozenChanged as error:
            wrong.append(error)

    askers = [threading.Thread(target=check) for _ in range(8)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert wrong == []
    weights["w7"].fill_(1.0)
    with pytest.raises(FrozenChanged, match="w7"):
        unchanged.check()
    unchanged.watch({"new": torch.zeros(1)})
    with pytest.raises(FrozenChanged, match="w7"):
        unchanged.check()
