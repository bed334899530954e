"""Make the inputs of the server benchmarks: stored photographs, captured networks and right answers.

The engine computes the right answers in this process, before a server receives a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness.photographs import CLASSES, jpeg
from benchmarks.server.load import Question, digest_of
from benchmarks.server.networks import SIDE, build
from upriver.engine.engine import Engine
from upriver.engine.read import read_samples
from upriver.pipeline import CenterCrop, Dataset, Decode, Normalize, Resize, index
from upriver.program.capture.prefix import capture
from upriver.program.example_inputs import Example, TensorSource
from upriver.program.graph.artifact_store import publish
from upriver.program.graph.executor import Program
from upriver.program.split.resized import resized
from upriver.program.split.split import split
from upriver.protocol import DatasetRef, Larger, RunRequest
from upriver.server.scheduling.footprint import request_bytes
from upriver.server.scheduling.program_footprint import FootprintEstimator
from upriver.types import MicroBatch

Batches = Sequence[Sequence[int]]


class World:
    """A store with photographs, their dataset, and programs.

    Args:
        folder: Folder of the store.
        samples: Photographs, of 500 x 375 pixels and 110 KB.
        side: Width and height after the input stages, in pixels.

    Attributes:
        uri: URI of the store.
    """

    def __init__(self, folder: Path, samples: int, *, side: int = SIDE) -> None:
        self._folder, self._samples, self._side = folder, samples, side
        _photographs(folder, samples)
        stages = [Decode(), Resize(side + side // 8), CenterCrop(side), Normalize()]
        self.uri = folder.as_uri()
        self.dataset: Dataset = index(self.uri, "data", stages=stages)
        self.dataset.publish()
        self._programs: dict[tuple[str, int], Program] = {}
        self._digests: dict[tuple[str, int, tuple[int, ...]], str] = {}

    # --------------------------------------------------------------------------------------- programs

    def program(self, spec: str, micro_batch: int) -> Program:
        """Capture the frozen part of a network, and put it into the store."""
        key = (spec, micro_batch)
        if key not in self._programs:
            model, last = build(spec)
            self._keep(
                key, capture(model.eval(), (self._images(micro_batch),), outputs=[TensorSource(path=last)])
            )
        return self._programs[key]

    def sizes(self, spec: str, micro_batches: Sequence[int]) -> list[Program]:
        """Capture a network at several sizes. The first one is proven as a job's program would be."""
        if any((f"{spec} split", size) not in self._programs for size in micro_batches):
            model, _ = build(spec)
            first, *others = micro_batches
            example = Example.of((self._images(first),))
            parts = split(model, example)
            if parts.program is None:
                raise ValueError(f"{spec} runs unsplit: {parts.why_not}")
            self._keep((f"{spec} split", first), parts.program)
            for size in others:
                self._keep((f"{spec} split", size), resized(model, parts, example.resized(size)))
        return [self._programs[f"{spec} split", size] for size in micro_batches]

    def _keep(self, key: tuple[str, int], program: Program) -> None:
        publish(program, self.dataset.store)
        self._programs[key] = program

    def _images(self, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(count, 3, self._side, self._side, generator=generator)

    # -------------------------------------------------------------------------------------- questions

    def ids(self, first: int, count: int) -> tuple[int, ...]:
        """Return consecutive sample ids, starting again after the last."""
        return tuple((first + number) % self._samples for number in range(count))

    def batches(self, first: int, micro_batch: int, count: int = 1) -> list[tuple[int, ...]]:
        """Return consecutive micro-batches."""
        return [self.ids(first + number * micro_batch, micro_batch) for number in range(count)]

    def question(
        self, program: Program, stop: int, batches: Batches, *, checked: bool = True, **fields: Any
    ) -> Question:
        """Return a run request on stored samples with its right answer.

        Args:
            stop: Cut of the answer.
            batches: Sample ids, as many in each as a micro-batch holds.
            checked: Whether the answer is read at all.
            fields: Further fields of the request.
        """
        request = RunRequest(
            program=program.digest,
            dataset=DatasetRef(store="default", digest=self.dataset.digest),
            start=self.dataset.chain.start,
            stop=stop,
            micro_batch=program.micro_batch,
            micro_batches=tuple(map(tuple, batches)),
            **fields,
        )
        digests = tuple(self._digest(program, stop, tuple(ids)) for ids in batches) if checked else ()
        return Question(request=request, digests=digests)

    def sized(self, programs: Sequence[Program], batches: Batches, values: Path) -> Question:
        """Return a question that lets the server choose among sizes. The first size is the request's.

        The low bits depend on the chosen size, so the answer is compared with `values` within a tolerance.

        Args:
            programs: One network, at ascending sizes.
            values: A file that `write_values` made.
        """
        first, *larger = programs
        question = self.question(
            first,
            first.num_stages,
            batches,
            checked=False,
            larger=tuple(Larger(program=each.digest, micro_batch=each.micro_batch) for each in larger),
        )
        return Question(request=question.request, values=str(values))

    def write_values(self, program: Program, batches: Batches, path: Path) -> Path:
        """Write the rows of a program's last stage for these samples to a ``.npy`` file."""
        rows = [self._run(program, program.num_stages, ids).tensors[0] for ids in batches]
        np.save(path, torch.cat(rows).numpy(), allow_pickle=False)
        return path

    def need_bytes(self, program: Program, question: Question) -> int:
        """Return the server's own estimate of the memory of a request, without its program."""
        weighed = FootprintEstimator(program.graph_bytes, torch.device("cpu")).weigh(0, question.request.stop)
        size = question.request.micro_batch
        return request_bytes(question.request, dataset=self.dataset, weighed={size: weighed})[size]

    def _digest(self, program: Program, stop: int, ids: tuple[int, ...]) -> str:
        key = (program.digest, stop, ids)
        if key not in self._digests:
            self._digests[key] = digest_of(self._run(program, stop, ids).tensors)
        return self._digests[key]

    def _run(self, program: Program, stop: int, ids: Sequence[int]) -> MicroBatch:
        engine = Engine(chain=self.dataset.chain, program=program, micro_batch=program.micro_batch)
        names = [ref.object for ref in self.dataset.locate(ids)]
        blobs = read_samples(self.dataset, ids)
        batch = engine.begin(blobs, ids, object_names=names, stop=stop, seed=0, epoch=0)
        return engine.advance(batch, stop)


def cuts(program: Program, count: int) -> list[int]:
    """Return evenly spaced positions that one tensor crosses, the last one the model's end."""
    single = [at for at in range(1, program.num_stages + 1) if len(program.live(at)) == 1]
    found = [single[round(number * len(single) / count) - 1] for number in range(1, count + 1)]
    return list(dict.fromkeys(found))


def crossing_bytes(program: Program, position: int) -> int:
    """Return the bytes of a sample that cross a cut."""
    return sum(value.spec.nbytes for value in program.live(position)) // program.micro_batch


def file_bytes(program: Program) -> int:
    """Return the bytes of the program's two files."""
    return len(program.graph_bytes) + len(program.weights_bytes)


def _photographs(folder: Path, count: int) -> None:
    for number in range(count):
        place = folder / "data" / f"class{number % CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:05}.jpg").write_bytes(jpeg(np.random.default_rng([number, 1])))
