"""Split a model in two: a proven program for the frozen part, and the user's own tail.

These splits are tried in order. Each is tried only after the proof of the previous one fails:

1. every cut of the requested granularity;
2. cuts at the ends of modules only, if the request was finer;
3. the freeze point alone;
4. the same with a prefix that ends before the first branch on data, or before the first code compiled by
   torch.compile, if any;
5. unsplit.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from upriver.errors import CaptureError, ModelError, UpriverError
from upriver.program.capture.prefix import capture
from upriver.program.example_inputs import Example, Inputs, TensorSource
from upriver.program.freeze import check_trainable, frozen_units, without_written
from upriver.program.graph.autocast import autocasting
from upriver.program.graph.executor import Program
from upriver.program.graph.liveness import GRANULARITIES, Granularity
from upriver.program.module_state.attributes import AttributeSnapshot, attributes_of
from upriver.program.module_state.restoration import state_kept
from upriver.program.rewrite.faster import FasterPrefix
from upriver.program.split.crossing_values import CrossingValues
from upriver.program.split.eager_prefix import EagerPrefix, runs_alone
from upriver.program.split.forward_pass import ForwardPass, random_branch
from upriver.program.split.freeze_point import CrossingTensor, EvalPlan, FreezePoint, find, in_eval_for
from upriver.program.split.module_trace import Shape, Trace, trace, watch_training, written_in_training
from upriver.program.split.proof_cache import (
    is_proven,
    outline_proof_digest,
    proof_digest,
    remember,
    value_fact,
)
from upriver.program.split.tail import Tail
from upriver.program.split.verification import Proof, Refuted, check_tail
from upriver.program.tensor_layouts import refusing
from upriver.text import error_text

log = logging.getLogger("upriver")


class UnsplitModel(nn.Module):
    """Model that runs unsplit: the tail is the whole model, and its features are the model's inputs."""

    def __init__(self, model: nn.Module, example: Example, *, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.values = CrossingValues(_as_ships(example))
        self.module = model
        self._example = example
        self._autocast = autocast

    def forward(self, features: torch.Tensor | tuple[torch.Tensor, ...]) -> object:
        """Return the model's result."""
        values = (features,) if isinstance(features, torch.Tensor) else features
        call = self._example.with_tensors(values)
        with autocasting(values[0].device, self._autocast):
            return self.module(*call.args, **call.kwargs)


def _as_ships(example: Example) -> list[CrossingTensor]:
    ships = []
    for leaf, tensor in enumerate(example.tensors):
        batched = example.holds_samples(tensor)
        base = tuple(tensor.shape) if not batched else (0, *tensor.shape[1:])
        slope = tuple(int(batched and dim == 0) for dim in range(tensor.dim()))
        ships.append(
            CrossingTensor(
                source=TensorSource(path=None, leaf=leaf),
                shape=Shape(dtype=tensor.dtype, base=base, slope=slope),
            )
        )
    return ships


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One kind of cut that was tried.

    Attributes:
        why_not: Reason for giving it up. Empty for the cut that was used.
        remembered: True if an earlier job made its proof.
        refuted: True if the parts give other values than the whole model.
    """

    step: str
    why_not: str = ""
    remembered: bool = False
    refuted: bool = False

    def __str__(self) -> str:
        return f"{self.step}: {self.why_not or ('proven before' if self.remembered else 'proven')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Names of the two parts of a split, the same wherever it was made.

    Attributes:
        crossing: Source and shape of each crossing tensor, and whether the tail writes into it.
    """

    in_eval: tuple[str, ...]
    prefix_units: tuple[str, ...]
    skipped: tuple[str, ...]
    boundary: str
    crossing: tuple[tuple[TensorSource, Shape, bool], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Result of splitting a model.

    Attributes:
        program: The frozen prefix as a program, as servers run it. None before it is captured, and if the
            model runs unsplit.
        faster: Tells how the program differs from the captured one. None if it does not.
        eager: The frozen prefix as it is written, of an outline. None once a program takes its place.
        earlier: Outlines that end at freeze points of other jobs, before this one, the last of them first.
        reads: Parameters and buffers that the frozen prefix reads, by name.
        values: Form and values of each of `reads`, as text, of an outline.
        features: Features of two fixed samples, as text, of an outline that is to be named.
        tail: Runs the rest, from the tensors that cross the freeze point (or from the inputs).
        in_eval: Modules that stay in eval regardless of ``model.train()``.
        prefix_units: Frozen modules that run in the program.
        skipped: All modules that the tail does not call, including `prefix_units`.
        attributes: Attributes that the model's forward reads up to the freeze point. None if unsplit.
        note: Reason why the freeze point is not later, unless a trainable parameter ended the prefix.
    """

    program: Program | None
    tail: Tail | UnsplitModel
    in_eval: tuple[str, ...]
    prefix_units: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    attributes: AttributeSnapshot | None = None
    boundary: str = ""
    why_not: str = ""
    note: str = ""
    attempts: tuple[Attempt, ...] = ()
    capture_s: float = 0.0
    eager: EagerPrefix | None = None
    earlier: tuple[Split, ...] = ()
    reads: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    faster: FasterPrefix | None = None

    @property
    def prefix(self) -> Program | EagerPrefix | None:
        """The frozen prefix in the form that this process runs. None if the model runs unsplit."""
        return self.program or self.eager

    @property
    def captured(self) -> Program | None:
        """The frozen prefix as a program that computes as the model is written."""
        return self.faster.captured if self.faster is not None else self.program

    @property
    def freeze(self) -> int:
        """The freeze point: the largest cut that training allows."""
        return 0 if self.prefix is None else self.prefix.num_stages

    @property
    def parts(self) -> Parts:
        """Names of the two parts, for comparison with those of another split of the same model."""
        ships = self.tail.values.ships
        return Parts(
            in_eval=self.in_eval,
            prefix_units=self.prefix_units,
            skipped=self.skipped,
            boundary=self.boundary,
            crossing=tuple((ship.source, ship.shape, ship.overwritten) for ship in ships),
        )

    def still_so(self, now: Split, *, hooked: bool) -> AttributeSnapshot | None:
        """Return the attributes that the model reads now if `now` is an equivalent split, else None.

        Args:
            hooked: True if hooks were added or removed. Then other crossing tensors may require a gradient,
                and the tail adopts that.
        """
        mine, theirs = self.captured, now.captured
        if (mine is None) != (theirs is None) or self.prefix is None or now.prefix is None:
            return None
        if mine is not None and theirs is not None and mine.digest != theirs.digest:
            return None
        if self.parts != now.parts or not (isinstance(self.tail, Tail) and isinstance(now.tail, Tail)):
            return None
        asks = now.tail.with_gradient
        if not self.tail.same_as(now.tail) or not (hooked or asks == self.tail.with_gradient):
            return None
        self.tail.with_gradient = asks
        return now.attributes


def split(
    model: nn.Module,
    example: Inputs,
    *,
    autocast: torch.dtype | None = None,
    granularity: Granularity = "module",
    on_progress: Callable[[str], None] | None = None,
) -> Split:
    """Find the freeze point of a model, capture the prefix before it, and prove every cut.

    Args:
        example: One micro-batch of input, samples in dimension 0, on the model's device.

    Raises:
        ModelError: If nothing or everything is frozen, a parameter is not initialized yet, or the model does
            not run.
        ConfigError: If the example holds no samples.
    """
    job = _Splitting(model, Example.of(example), autocast, on_progress or (lambda text: None))
    return job.run(granularity)


def outline(
    model: nn.Module,
    example: Inputs,
    *,
    autocast: torch.dtype | None = None,
    named: bool = False,
    trained_by_others: Sequence[Collection[str]] = (),
) -> Split | None:
    """Find the freeze point of a model, and the two parts around it, without capturing a program.

    The parts are those that :func:`split` tries first. The tail is compared with the whole model on two
    samples, in training and in eval, unless an earlier job has done so. Nothing else is proven.

    Args:
        named: Whether the frozen part is to be named by its features, too.
        trained_by_others: For each other job, the names of the parameters that it trains. If more of them are
            trained than here, the outline of that job is added as `Split.earlier`. Nothing there is proven.

    Returns:
        The split, whose frozen part runs as it is written. None if the parts cannot be known yet: the model
        cannot be watched, has no freeze point, counts its calls, draws random numbers in eval, branches on
        data in the frozen part, or trains a module before the freeze point is reached.

    Raises:
        ModelError: As :func:`split`.
        ConfigError: As :func:`split`.
    """
    job = _Splitting(model, Example.of(example), autocast, lambda text: None)
    return job.outline(trained_by_others, named=named)


class _Splitting:
    """One search through the possible splits."""

    def __init__(
        self, model: nn.Module, example: Example, autocast: torch.dtype | None, tell: Callable[[str], None]
    ) -> None:
        self.model, self.example, self.autocast, self.tell = model, example, autocast, tell
        self.attempts: list[Attempt] = []
        self.left: dict[str, str] = {}  # modules that no program can hold, and why
        self._values: dict[str, str] = {}  # parameters and buffers that were read, as text
        self._named = False

    def run(self, granularity: Granularity) -> Split:
        check_trainable(self.model)
        try:
            # Copy the values once for all steps.
            with refusing(_NOT_WATCHED), state_kept(self.model):
                return self._run(granularity)
        except CaptureError as error:
            self.attempts.insert(0, Attempt(step="trace", why_not=str(error)))
            return self._unsplit(frozen_units(self.model))

    def outline(self, trained_by_others: Sequence[Collection[str]], *, named: bool) -> Split | None:
        self._named = named
        check_trainable(self.model)
        with contextlib.suppress(CaptureError), refusing(_NOT_WATCHED), state_kept(self.model):
            units = frozen_units(self.model)
            calls = trace(self.model, self.example, autocast=self.autocast)
            training = self._in_training(calls, units)
            units = self._not_written(units, calls, training)
            point = next(self._points(calls, training), None)
            if calls.counting or calls.flow.draws:
                return None  # an eager run would count and draw, too
            if point != self._point(calls, training, before_branches=True):
                return None
            trained = [
                p for p, m in self.model.named_modules() if any(w.requires_grad for w in m.parameters())
            ]
            if point is not None and runs_alone(calls, point, trained):
                own = self._outlined(calls, point, in_eval_for(self.model, calls, point, units))
                return replace(own, earlier=self._earlier(own, calls, training, trained_by_others))
        return None

    def _earlier(
        self,
        own: Split,
        calls: Trace,
        training: ForwardPass | None,
        trained_by_others: Sequence[Collection[str]],
    ) -> tuple[Split, ...]:
        found: dict[tuple[str, ...], Split] = {}
        for trained in trained_by_others:
            with contextlib.suppress(UpriverError), refusing(_NOT_WATCHED):
                other = self._outline_of_other(calls, training, trained)
                if other is not None and set(other.reads) < set(own.reads):
                    found[other.skipped] = other
        return tuple(sorted(found.values(), key=lambda other: -len(other.reads)))

    def _outline_of_other(
        self, calls: Trace, training: ForwardPass | None, trained: Collection[str]
    ) -> Split | None:
        """Return the outline of a job that trains more parameters; None if it trains no more, or has none."""
        model = self.model
        own = dict(model.named_parameters())
        more = {
            name
            for name in own.keys() & set(trained)
            if own[name].is_floating_point() and not own[name].requires_grad
        }
        if not more:
            return None
        origins = {
            number: replace(origin, trained=origin.trained or origin.name in more)
            for number, origin in calls.flow.origins.items()
        }
        seen = replace(calls, flow=replace(calls.flow, origins=origins))
        try:
            for name in more:
                own[name].requires_grad_(True)
            units = self._not_written(frozen_units(model), calls, training)
            point = next(self._points(seen, training), None)
            if point is None:
                return None
            in_eval = in_eval_for(model, seen, point, units)
            tail = Tail(model, point, seen, in_eval=in_eval.modules, autocast=self.autocast)
            eager = EagerPrefix(model, self.example, point.ships, in_eval, autocast=self.autocast)
            return self._parts(seen, point, tail, eager, in_eval)
        finally:
            for name in more:
                own[name].requires_grad_(False)

    def _outlined(self, calls: Trace, point: FreezePoint, in_eval: EvalPlan) -> Split:
        tail = Tail(self.model, point, calls, in_eval=in_eval.modules, autocast=self.autocast)
        eager = EagerPrefix(self.model, self.example, point.ships, in_eval, autocast=self.autocast)
        found = self._parts(calls, point, tail, eager, in_eval)
        proof = outline_proof_digest(self.model, self.example, point, found.values, autocast=self.autocast)
        known = is_proven(proof, point=point)
        if known is not None:
            tail.with_gradient = known
        else:
            check_tail(self.model, tail, in_eval, eager, self.example, autocast=self.autocast)
            remember(proof, None, tail.with_gradient)
        attempt = Attempt(step=f"as it is written up to {point.name}", remembered=known is not None)
        return replace(found, attempts=(*self.attempts, attempt))

    def _parts(
        self, calls: Trace, point: FreezePoint, tail: Tail, eager: EagerPrefix, in_eval: EvalPlan
    ) -> Split:
        """Return the two parts around a freeze point, as the model is written."""
        reads = _read_before(calls, point)
        tensors: dict[str, torch.Tensor] = {
            **dict(self.model.named_parameters(remove_duplicate=False)),
            **dict(self.model.named_buffers(remove_duplicate=False)),
        }
        self._values |= {name: value_fact(name, tensors[name]) for name in reads if name not in self._values}
        found = self._split(calls, point, tail, None, in_eval, 0.0)
        return replace(
            found,
            eager=eager,
            reads=reads,
            values=tuple(self._values[name] for name in reads),
            features=tuple(self._features(eager)) if self._named else (),
        )

    def _features(self, eager: EagerPrefix) -> Iterator[str]:
        """Yield what the frozen part gives for two samples that every job makes alike.

        A forward may read what no module holds. If it refuses them, yield what no other job yields.
        """
        given = [_fixed(each) if self.example.holds_samples(each) else each for each in self.example.tensors]
        try:
            for number, tensor in enumerate(eager.run(given, 0, eager.num_stages)):
                yield value_fact(str(number), tensor)
        except Exception as error:  # the user's forward
            log.info(
                "features of earlier jobs are found once the frozen part is captured: %s", error_text(error)
            )
            yield secrets.token_hex()

    def _run(self, granularity: Granularity) -> Split:
        units = frozen_units(self.model)
        step = "trace"
        try:
            self.tell("tracing the model")
            with refusing(_NOT_WATCHED):
                calls = trace(self.model, self.example, autocast=self.autocast)
                training = self._in_training(calls, units)
            units = self._not_written(units, calls, training)
            step = "freeze point"
            for point in self._points(calls, training):
                done = self._tried(calls, point, units, granularity)
                if done is not None:
                    return done
        except CaptureError as error:
            self.attempts.append(Attempt(step=step, why_not=str(error)))
        if step == "trace":
            changed = written_in_training(self.model, self.example, autocast=self.autocast)
            units = without_written(self.model, units, changed, changed)
        return self._unsplit(units)

    def _in_training(self, calls: Trace, units: list[str]) -> ForwardPass | None:
        try:
            return ForwardPass(*watch_training(self.model, calls.example, units, autocast=self.autocast))
        except ModelError:  # it may need labels in training; the proof decides
            return None

    def _not_written(self, units: list[str], calls: Trace, training: ForwardPass | None) -> list[str]:
        """Return the units that the model's own forward does not train, as far as it was watched."""
        if training is None:
            return units
        return without_written(self.model, units, training.flow.changed, calls.flow.changed)

    def _points(self, calls: Trace, training: ForwardPass | None) -> Iterator[FreezePoint]:
        """Yield freeze points: the largest prefix, then one that ends before control flow on data.

        Each is tried again without the modules that no program can hold.
        """
        tried: set[tuple[int, ...]] = set()
        for before_branches in (False, True):
            while True:
                point = self._point(calls, training, before_branches=before_branches)
                if point.why_not:
                    self.attempts.append(Attempt(step="freeze point", why_not=point.why_not))
                if point.why_not or point.skipped in tried:
                    break
                tried.add(point.skipped)
                yield point

    def _point(self, calls: Trace, training: ForwardPass | None, *, before_branches: bool) -> FreezePoint:
        """Return the largest prefix without modules whose calls depend on chance."""
        left: dict[str, str] = {}
        while True:
            point = find(self.model, calls, training, before_branches=before_branches, left=left | self.left)
            chance = random_branch(training, self._paths(calls, point)) if training else None
            if chance is None or chance[0] in left:
                return point
            left[chance[0]] = chance[1]

    def _tried(
        self, calls: Trace, point: FreezePoint, units: list[str], granularity: Granularity
    ) -> Split | None:
        try:
            with refusing(_NOT_WATCHED):
                return self._cut(calls, point, units, granularity)
        except CaptureError as error:
            self.attempts.append(Attempt(step=f"up to {point.name}", why_not=str(error)))
        return None

    def _cut(
        self, calls: Trace, point: FreezePoint, units: list[str], granularity: Granularity
    ) -> Split | None:
        in_eval = in_eval_for(self.model, calls, point, units)
        step = f"up to {point.name}"
        try:
            tail = Tail(self.model, point, calls, in_eval=in_eval.modules, autocast=self.autocast)
            outputs = [ship.source for ship in point.ships]
            for level in GRANULARITIES[GRANULARITIES.index(granularity) :]:
                self.tell(f"capturing it {step}")
                began = time.perf_counter()
                program = capture(
                    self.model, self.example, outputs=outputs, autocast=self.autocast, granularity=level
                )
                capture_s = time.perf_counter() - began
                proof = proof_digest(self.model, program, point, autocast=self.autocast)
                known = is_proven(proof, program, point)
                if known is not None:
                    tail.with_gradient = known
                elif not self._proven(program, tail, in_eval, f"{step}, {_LEVELS[level]}"):
                    continue
                remember(proof, program, tail.with_gradient)
                remembered = known is not None
                self.attempts.append(Attempt(step=f"{step}, {_LEVELS[level]}", remembered=remembered))
                return self._split(calls, point, tail, program, in_eval, capture_s)
        except CaptureError as error:  # a finer or coarser program would not help
            refuted = isinstance(error, Refuted)
            self.attempts.append(Attempt(step=step, why_not=str(error), refuted=refuted))
            if error.module is not None and error.module not in self.left:
                self.left[error.module] = str(error)  # the next point leaves it to the tail
        return None

    def _proven(self, program: Program, tail: Tail, in_eval: EvalPlan, step: str) -> bool:
        """Return whether every cut holds. If not, a coarser program may be tried.

        Raises:
            CaptureError: If the freeze point does not hold. Then no other program would help.
        """
        proof = Proof(program, self.example)
        try:
            self.tell("proving every cut")
            proof.cuts()
        except CaptureError as error:
            self.attempts.append(Attempt(step=step, why_not=str(error)))
            return False
        self.tell("proving that prefix and tail give what the whole model gives")
        proof.split(self.model, tail, in_eval, autocast=self.autocast)
        return True

    def _split(
        self,
        calls: Trace,
        point: FreezePoint,
        tail: Tail,
        program: Program | None,
        plan: EvalPlan,
        capture_s: float,
    ) -> Split:
        paths = self._paths(calls, point)
        return Split(
            program=program,
            tail=tail,
            in_eval=plan.modules,
            prefix_units=tuple(path for path in paths if [*self.model.get_submodule(path).parameters()]),
            skipped=tuple(paths),
            attributes=self._attributes(calls, point, paths),
            boundary=point.name,
            note=point.note,
            attempts=tuple(self.attempts),
            capture_s=capture_s,
            reads=tuple(weight.key for weight in program.graph.weights) if program is not None else (),
        )

    def _attributes(self, calls: Trace, point: FreezePoint, paths: list[str]) -> AttributeSnapshot:
        """Return the attributes read by skipped calls, and by calls around them until the last one ends."""
        run = ForwardPass(calls.calls, calls.flow)
        owner = run.enclosing(point.skipped)
        ends: dict[int, int] = {}
        for index in point.skipped:
            exit = run.calls[index].exit
            while index >= 0:
                index = run.calls[index].parent
                ends[index] = max(exit, ends.get(index, -1))
        inside = [module for path in paths for module in self.model.get_submodule(path).modules()]
        around = [self.model.get_submodule(call.path) for call in calls.calls if call.index in ends]
        return attributes_of(
            calls.reads,
            self.model,
            among=[*inside, *around],
            within=lambda call, event: owner.get(call, -1) >= 0 or event <= ends.get(call, -1),
        )

    @staticmethod
    def _paths(calls: Trace, point: FreezePoint) -> list[str]:
        paths = {call.index: call.path for call in calls.calls}
        return list(dict.fromkeys(paths[index] for index in point.skipped))

    def _unsplit(self, units: list[str]) -> Split:
        return Split(
            program=None,
            tail=UnsplitModel(self.model, self.example, autocast=self.autocast),
            in_eval=tuple(units),
            why_not=self.attempts[0].why_not,
            attempts=tuple(self.attempts),
        )


def _fixed(tensor: torch.Tensor) -> torch.Tensor:
    """Return two fixed samples of a tensor's form: of both signs, and as of pixels. Integers are 0 and 1."""
    shape = tensor.shape[1:]
    if tensor.is_floating_point():
        seed = torch.Generator().manual_seed(0)
        made = torch.stack(
            [
                torch.randn(shape, generator=seed, dtype=torch.float32, device="cpu"),
                torch.rand(shape, generator=seed, dtype=torch.float32, device="cpu"),
            ]
        )
    else:
        made = torch.arange(2 * shape.numel(), device="cpu").reshape(2, *shape) % 2  # a table has two rows
    return made.to(tensor.device, tensor.dtype)


def _read_before(calls: Trace, point: FreezePoint) -> tuple[str, ...]:
    """Return the parameters and buffers that the crossing tensors depend on."""
    run, origins = ForwardPass(calls.calls, calls.flow), calls.flow.origins
    makers = [run.maker(ship.value) for ship in point.ships]
    needed = run.closure([maker for maker in makers if maker >= 0])
    read = {value.tensor for index in needed for value in run.operations[index].reads} & origins.keys()
    held = (origins[tensor] for tensor in read)
    return tuple(sorted(origin.name for origin in held if origin.kind in ("parameter", "buffer")))


_NOT_WATCHED = "the model cannot be watched while it runs"

_LEVELS: dict[Granularity, str] = {
    "op": "between operators",
    "module": "at the ends of modules",
    "end": "at the freeze point alone",
}
