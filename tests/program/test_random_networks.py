"""Check random networks: every cut gives the whole model's bits, or the refusal has a valid reason.

``UPRIVER_EXAMPLES=500`` tries 500 new networks each time. Without it a few networks run, the same each time.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, event, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.examples import examples, some
from tests.program.random_networks import MICRO_BATCH, Block, Description, Do, Freeze, Net, descriptions
from tests.program.random_oracle import Expected, expect
from upriver.errors import ModelError
from upriver.program.eval_mode import no_fast_path
from upriver.program.example_inputs import Example, tensors_in
from upriver.program.freeze import keep_in_eval
from upriver.program.graph import weights_file
from upriver.program.graph.artifact_store import load, publish
from upriver.program.graph.executor import Program
from upriver.program.graph.liveness import Granularity
from upriver.program.graph.parser import decode
from upriver.program.split.split import Split, outline, split
from upriver.protocol import Caps, encode, read_frame
from upriver.store import Store
from upriver.types import MicroBatch

EXAMPLES = int(os.environ.get("UPRIVER_EXAMPLES", "0"))
CAPS = Caps(payload_bytes=1 << 20, header_bytes=1 << 16, tensors=64, dims=8, samples=MICRO_BATCH)

networks = settings(
    max_examples=EXAMPLES or examples(24),
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    print_blob=False,
    # Shrinking takes minutes, so it runs only when more examples are requested.
    phases=[Phase.generate, Phase.shrink] if EXAMPLES else [Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)

INVALID = "cannot be trained"
NOTHING_TO_CUT = r"no frozen module (finishes before|was called)|reads nothing that the frozen modules give"
BOUND = r"runs the random operator|changes buffer"
MIXES = r"samples influence each other|hold its samples in one dimension|which no program may hold"


# ----------------------------------------------------------------------------------------- running


@dataclass(frozen=True)
class Outcome:
    """The answers and gradients of a training step."""

    answers: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]

    def equals(self, other: Outcome) -> bool:
        """Return whether both outcomes are equal to the bit."""
        return (
            len(self.answers) == len(other.answers)
            and all(torch.equal(a, b) for a, b in zip(self.answers, other.answers, strict=True))
            and all(_same(gradient, other.gradients[name]) for name, gradient in self.gradients.items())
        )

    @property
    def finite(self) -> bool:
        """True if the outcome holds no NaN and no infinity."""
        gradients = [gradient for gradient in self.gradients.values() if gradient is not None]
        return all(bool(t.isfinite().all()) for t in [*self.answers, *gradients])


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def run(
    model: nn.Module, forward: Callable[[], object], in_eval: Sequence[str], *, training: bool
) -> Outcome:
    """Run one step, and restore buffers and random state afterwards."""
    model.train(training)
    keep_in_eval(model, list(in_eval))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.random.fork_rng(devices=[]), no_fast_path():
        torch.manual_seed(11)
        answers = tensors_in(forward())
        terms = [answer.float().square().mean() for answer in answers if answer.requires_grad]
        found = torch.autograd.grad(torch.stack(terms).sum(), list(trained.values()), allow_unused=True)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return Outcome([answer.detach() for answer in answers], dict(zip(trained, found, strict=True)))


def whole(net: Net, example: Example, in_eval: Sequence[str], *, training: bool) -> Outcome:
    """Run the unsplit model on copies, since it may write into its inputs."""
    given = _copied(example)
    return run(net, lambda: net(*given.args, **given.kwargs), in_eval, training=training)


def _copied(example: Example) -> Example:
    """Return copies with the same strides and the same distance from a 64-byte boundary."""
    return example.with_tensors(_hop(example.tensors, 0))


def _hop(tensors: Sequence[torch.Tensor], position: int) -> tuple[torch.Tensor, ...]:
    """Return these tensors as another tier receives them."""
    batch = MicroBatch(ids=tuple(range(MICRO_BATCH)), position=position, tensors=tuple(tensors))
    got = read_frame(io.BytesIO(b"".join(bytes(part) for part in encode(batch))), CAPS)
    assert isinstance(got, MicroBatch)
    return got.tensors


def _is_valid(net: Net, description: Description) -> bool:
    """Return whether the network can train: in-place code may overwrite a value that a gradient needs."""
    try:
        outcomes = [
            whole(net, description.example(seed), [], training=training)
            for seed, training in ((1, True), (2, False))
        ]
    except RuntimeError:
        return False
    used = [outcome.gradients for outcome in outcomes]
    return all(outcome.finite for outcome in outcomes) and any(g is not None for g in used[0].values())


# -------------------------------------------------------------------------------------- properties


@dataclass(frozen=True)
class State:
    """The state that a split must leave unchanged."""

    tensors: dict[str, torch.Tensor]
    identities: list[tuple[str, int]]
    flags: list[object]

    @classmethod
    def of(cls, net: Net) -> State:
        """Return the state of a network and of the random generator."""
        named = [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]
        hooks = [
            (path, {name: len(value) for name, value in vars(module).items() if name.endswith("_hooks")})
            for path, module in net.named_modules()
        ]
        flags: list[object] = [
            hooks,
            [(path, module.training, sorted(vars(module))) for path, module in net.named_modules()],
            [(name, p.requires_grad, p.grad is None) for name, p in net.named_parameters()],
            torch.get_rng_state().tolist(),
            (torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled(), torch.get_default_dtype()),
        ]
        return cls({n: t.detach().clone() for n, t in named}, [(n, id(t)) for n, t in named], flags)

    def equals(self, other: State) -> bool:
        """Return whether nothing changed."""
        same = all(torch.equal(tensor, other.tensors[name]) for name, tensor in self.tensors.items())
        return same and (self.identities, self.flags) == (other.identities, other.flags)


def check_refusal(net: Net, parts: Split, expected: Expected) -> str:
    """Check that the description shows the reason for running unsplit, and that the network runs."""
    assert parts.why_not
    assert "\n" not in parts.why_not
    if expected.doubtful:
        outcome = f"refused in doubt: {expected.doubtful}"
    elif expected.cut:
        assert expected.mixes, f"refused: {parts.why_not}"
        assert re.search(MIXES, parts.why_not), parts.why_not
        outcome = "refused: mixes"
    else:
        assert re.search(f"{NOTHING_TO_CUT}|{BOUND}", parts.why_not), parts.why_not
        outcome = "refused: nothing to cut"
    example = net.description.example(41)
    reference = whole(net, example, parts.in_eval, training=True)
    features = parts.tail.values.one_or_all(_copied(example).tensors)
    assert run(net, lambda: parts.tail(features), parts.in_eval, training=True).equals(reference)
    return outcome


def check_cuts(net: Net, parts: Split, example: Example, *, training: bool) -> None:
    """Check that every cut gives answers and gradients of the whole model, to the bit."""
    reference = whole(net, example, parts.in_eval, training=training)
    assert reference.finite
    for values in _by_each_cut(parts, example):
        kept = [value.clone() for value in values]
        features = parts.tail.values.one_or_all(values)
        ours = run(net, lambda: parts.tail(features), parts.in_eval, training=training)  # noqa: B023
        assert ours.equals(reference), _difference(ours, reference)
        assert all(torch.equal(a, b) for a, b in zip(kept, values, strict=True)), "features were changed"


def check_as_written(net: Net, parts: Split, outlined: Split, *, training: bool) -> None:
    """Check that a frozen part that runs as it is written gives the whole model's bits, and a program's."""
    eager, example = outlined.eager, net.description.example(34)
    assert eager is not None
    assert outlined.program is None
    net.train()
    reference = whole(net, example, outlined.in_eval, training=training)
    net.train()
    values = eager.run(_copied(example).tensors, 0, outlined.freeze)
    ours = run(
        net,
        lambda: outlined.tail(outlined.tail.values.one_or_all(values)),
        outlined.in_eval,
        training=training,
    )
    assert ours.equals(reference), _difference(ours, reference)
    if parts.program is None or parts.parts != outlined.parts:
        return
    captured = parts.program.run(_copied(example).tensors, 0, parts.freeze)
    for a, b in zip(eager.run(_copied(example).tensors, 0, 1), captured, strict=True):
        assert torch.equal(a, b)
        assert (a.dtype, a.stride()) == (b.dtype, b.stride())
    named = dict(net.named_parameters(remove_duplicate=False)) | dict(
        net.named_buffers(remove_duplicate=False)
    )
    held = {weight.key for weight in parts.program.graph.weights if weight.key in named}
    assert {id(named[name]) for name in held} <= {id(named[name]) for name in outlined.reads}


def check_unaligned(parts: Split, example: Example) -> None:
    """Check that every cut gives the same features, wherever the inputs start in memory.

    The model's own bits may differ: an operator that the program makes of in-place code gives new, aligned
    memory.
    """
    assert parts.program is not None
    reference = parts.program.run(_copied(example).tensors, 0, parts.freeze)
    for values in _by_each_cut(parts, example):
        for a, b in zip(values, reference, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()


def _by_each_cut(parts: Split, example: Example) -> Iterator[tuple[torch.Tensor, ...]]:
    """Return the values at the freeze point, sent over a wire there and at one cut before."""
    program = parts.program
    assert program is not None
    for cut in range(program.num_stages + 1):
        crossing = _hop(program.run(_copied(example).tensors, 0, cut), cut)
        yield _hop(program.run(crossing, cut, program.num_stages), program.num_stages)


def _difference(ours: Outcome, theirs: Outcome) -> str:
    answers = [torch.equal(a, b) for a, b in zip(ours.answers, theirs.answers, strict=True)]
    gradients = {name: _same(g, theirs.gradients[name]) for name, g in ours.gradients.items()}
    return f"answers {answers}, gradients {gradients}"


def check_rows(net: Net, parts: Split) -> None:
    """Check that rows chosen from several micro-batches match the whole model on the same samples."""
    program, values = parts.program, parts.tail.values
    assert program is not None
    description = net.description
    examples = [description.example(51), description.example(52)]
    if description.inputs == "unbatched":  # one for all
        examples[1] = examples[1].with_tensors([examples[1].tensors[0], examples[0].tensors[1]])
    made = [program.run(_copied(example).tensors, 0, program.num_stages) for example in examples]
    together = values.concatenate(made)
    assert values.samples_of(together) == 2 * MICRO_BATCH
    first = values.select(together, range(MICRO_BATCH))
    assert all(torch.equal(a, b) for a, b in zip(first, made[0], strict=True))
    rows = [5, 0, 7, 2, 1]
    net.eval()
    joined = examples[0].with_tensors(
        [
            torch.cat([a, b])[rows] if a.shape[0] == MICRO_BATCH else a
            for a, b in zip(examples[0].tensors, examples[1].tensors, strict=True)
        ]
    )
    with torch.no_grad(), no_fast_path():
        ours = tensors_in(parts.tail(values.one_or_all(values.select(together, rows))))
        theirs = tensors_in(net(*joined.args, **joined.kwargs))
    # Another number of samples may select another kernel: close, not equal, and far from another row's
    # answer.
    tolerance = {"float64": 1e-7, "float32": 1e-2, "bfloat16": 0.5}[description.dtype]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def check_files(net: Net, program: Program) -> None:
    """Check that a store keeps digests and bits, and that rewriting a file gives the same bytes."""
    with TemporaryDirectory() as folder:
        store = Store.open(Path(folder).as_uri())
        publish(program, store)
        loaded = load(store, program.digest)
    assert (loaded.digest, loaded.weights_digest) == (program.digest, program.weights_digest)
    assert decode(program.graph_bytes).encode() == program.graph_bytes
    tensors = weights_file.decode(torch.frombuffer(bytearray(program.weights_bytes), dtype=torch.uint8))
    assert weights_file.encode(tensors) == bytes(program.weights_bytes)
    given = net.description.example(61).tensors
    for cut in range(program.num_stages + 1):
        mine = program.run(given, 0, cut)
        theirs = loaded.run(given, 0, cut)
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()


def check_reads(net: Net, program: Program, expected: Expected) -> None:
    """Check that the program holds the frozen parameters of its description, so it cuts as late as it can.

    The program may hold none if only parameter-free modules can run in the prefix.
    """
    named = dict(net.named_parameters(remove_duplicate=False))
    held = {id(named[weight.key]) for weight in program.graph.weights if weight.key in named}
    assert held == {id(named[name]) for name in expected.reads}


def padded(example: Example, samples: int) -> Example:
    """Return the last micro-batch of an epoch: rows past ``samples`` are zero."""
    changed = []
    for tensor in example.tensors:
        copy = torch.empty_like(tensor).copy_(tensor)
        if tensor.shape[0] == MICRO_BATCH:
            copy[samples:] = 0
        changed.append(copy)
    return example.with_tensors(changed)


def unaligned(example: Example) -> Example:
    """Return the same numbers in memory that starts one element past a 64-byte boundary."""
    moved = []
    for tensor in example.tensors:
        memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
        moved.append(memory.as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor))
    return example.with_tensors(moved)


# Networks that earlier versions refused without a valid reason.
PREFIX = Freeze("prefix", (1,))
FOUND = {
    "writes into an input that the tail does not read": Description(
        (Do("relu_"), Block("plain", ("affine",))), PREFIX
    ),
    "writes into an input that the tail reads": Description(
        (Do("relu_"), Block("plain", ("affine",)), Do("skip", 0)), PREFIX
    ),
    "writes into what has crossed in training only": Description(
        (Block("plain", ("affine",)), Block("plain", ("dropout_", "affine"))), PREFIX
    ),
    "writes into one of two results": Description(
        (Block("pair", ("affine",)), Do("add_"), Block("plain", ("affine",)), Do("skip", 1)), PREFIX
    ),
    "a frozen module writes into its input, which is read again": Description(
        (Block("residual", ("hardswish_", "affine")), Do("skip", 0), Block("plain", ("affine",))), PREFIX
    ),
    "a module beside the prefix counts in a buffer": Description(
        (Block("plain", ("count",)), Do("restart"), Block("plain", ("affine",)), Block("plain", ("affine",))),
        Freeze("prefix", (2,)),
    ),
    "a frozen module takes a Dropout's view of something larger": Description(
        (
            Block("plain", ("affine",)),
            Do("concat", 0),
            Do("drop"),
            Block("plain", ("affine",)),
            Block("plain", ("affine",)),
        ),
        Freeze("prefix", (2,)),
        family="tokens",
        seed=1,
    ),
    "only modules without parameters give what is read": Description(
        (Block("plain", ("tanh",)), Block("plain", ("affine",)), Do("restart"), Do("skip", 1)),
        Freeze("prefix", (2,)),
    ),
}


@pytest.mark.parametrize("description", some(1, FOUND.values()), ids=FOUND.keys())
def test_a_network_that_was_found(description: Description) -> None:
    assert check(description) == "cut"


@pytest.mark.timeout(900 + 20 * EXAMPLES)
@networks
@given(descriptions(), st.sampled_from(["module", "module", "op"]))
def test_a_random_network_is_cut_to_the_bit_or_refused_for_a_right_reason(
    description: Description, granularity: Granularity
) -> None:
    outcome = check(description, granularity)
    assume(outcome != INVALID)
    event(outcome)


def check(description: Description, granularity: Granularity = "module") -> str:
    """Check every property of one network; return the outcome."""
    net = description.build()
    flags = [parameter.requires_grad for parameter in net.parameters()]
    example = description.example(0)
    if all(flags) or not any(flags):
        try:
            split(net, example)
        except ModelError as error:
            assert re.search(r"^(nothing|everything) is frozen", str(error))
            return "refused: nothing or everything frozen"
        raise AssertionError("a network with nothing to cut was split")
    if not _is_valid(net, description):
        return INVALID
    net.train()
    before = State.of(net)
    outlined = outline(net, example)
    assert before.equals(State.of(net))
    parts = split(net, example, granularity=granularity)
    assert before.equals(State.of(net))
    expected = expect(net)
    if outlined is not None:
        check_as_written(net, parts, outlined, training=not expected.twice)
    if parts.program is None:
        return check_refusal(net, parts, expected)
    one, two, three = (description.example(seed) for seed in (31, 32, 33))
    # A Dropout called on both sides of the cut is off on one side only: no mode of a whole model does this.
    training = not expected.twice
    check_cuts(net, parts, one, training=training)
    check_cuts(net, parts, padded(two, 3), training=False)
    check_unaligned(parts, unaligned(three))
    check_files(net, parts.program)
    if not expected.doubtful:
        assert not expected.mixes or not _moves_with_its_neighbours(net, parts), "samples are mixed"
        check_reads(net, parts.program, expected)
    if expected.rows_apart:
        check_rows(net, parts)
    return "cut"


def _moves_with_its_neighbours(net: Net, parts: Split) -> bool:
    """Return whether a sample's features change with other samples.

    Mixing that changes no bit cannot be found.
    """
    program = parts.program
    assert program is not None
    for seed in range(20):
        one, other = net.description.example(100 + seed), net.description.example(200 + seed)
        mixed = one.with_tensors(
            [
                torch.cat([a[:1], b[1:]]) if a.shape[0] == MICRO_BATCH else a
                for a, b in zip(one.tensors, other.tensors, strict=True)
            ]
        )
        rows = [
            parts.tail.values.select(program.run(given.tensors, 0, program.num_stages), [0])
            for given in (one, mixed)
        ]
        if not all(torch.equal(a, b) for a, b in zip(*rows, strict=True)):
            return True
    return False
