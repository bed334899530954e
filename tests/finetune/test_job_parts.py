"""Check a job over parts of an indexed dataset: its rows, order, losses and state are those of the part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Subset, random_split

import upriver
from tests.finetune.training import BATCH, MICRO, STAGES, optimizer_of, photos, run, same
from tests.program.nets import frozen_small
from upriver.engine.engine import Engine
from upriver.errors import ConfigError, DatasetError
from upriver.finetune.prefetch.sampler import epoch_order
from upriver.pipeline import Dataset
from upriver.pipeline.subset import rows_of
from upriver.types import MicroBatch

COUNT = 200


def split_of(data: Any) -> Any:
    return random_split(data, [30, COUNT - 30], generator=torch.Generator().manual_seed(2))[0]


PARTS: dict[str, Callable[[Any], Any]] = {
    "a list": lambda data: Subset(data, [5, 3, 8, 120, 7]),
    "a tensor": lambda data: Subset(data, torch.tensor([4, 1, 199])),  # type: ignore[arg-type]
    "an array": lambda data: Subset(data, np.array([4, 1, 199], dtype=np.uint8)),  # type: ignore[arg-type]
    "a range": lambda data: Subset(data, range(190, 150, -1)),
    "from the end": lambda data: Subset(data, [-1, -200, 3]),
    "again and again": lambda data: Subset(data, [9, 9, 2, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 2]),
    "of a subset": lambda data: Subset(Subset(data, range(20, 90)), [6, 0, -1]),
    "a random split": split_of,
    "two subsets": lambda data: ConcatDataset([Subset(data, [1, 2]), Subset(data, [9])]),
    "all": lambda data: Subset(data, range(COUNT)),
}
ROWS: dict[str, list[int]] = {
    "a list": [5, 3, 8, 120, 7],
    "a tensor": [4, 1, 199],
    "an array": [4, 1, 199],
    "a range": list(range(190, 150, -1)),
    "from the end": [199, 0, 3],
    "again and again": [9, 9, 2, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 2],
    "of a subset": [26, 20, 89],
    "two subsets": [1, 2, 9],
    "all": list(range(COUNT)),
}


def by_hand(data: Dataset, rows: Any, *, epochs: int = 2) -> tuple[list[torch.Tensor], nn.Module]:
    """Return losses of the engine alone on batches of `upriver.DataLoader`, in the job's order of rows."""
    model = frozen_small()
    optimizer, losses = optimizer_of(model), list[torch.Tensor]()
    with upriver.connect().finetune(
        model, data, batch_size=BATCH, micro_batch=MICRO, seed=7, policy="nosplit"
    ) as job:
        engine, freeze = Engine(chain=None, program=job._split.program, micro_batch=MICRO), job._split.freeze
        model.train()
        for epoch in range(epochs):
            order = epoch_order(
                len(rows), seed=7, epoch=epoch, batch_size=BATCH, micro_batch=MICRO, shuffle=True
            )
            ids = [rows[at] for at in order.ids]
            loader = upriver.DataLoader(data, batch_size=MICRO, sampler=ids, seed=7)
            loader.epoch = epoch
            parts = zip(order.micro_batches, loader, strict=True)
            features = torch.cat([features_of(engine, ids, images, freeze) for ids, (images, _) in parts])
            targets = data.targets[ids]
            for step in range(order.num_steps):
                start, stop = order.step(step)
                torch.manual_seed(len(losses))
                loss = nn.functional.cross_entropy(job(features[start:stop]), targets[start:stop])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
    return losses, model


def features_of(engine: Engine, ids: list[int], images: torch.Tensor, freeze: int) -> torch.Tensor:
    """Return features of a micro-batch that `upriver.DataLoader` made, padded to a full one."""
    full = torch.zeros((MICRO, *images.shape[1:]))
    full[: len(ids)] = images
    batch = MicroBatch(ids=tuple(ids), position=0, tensors=(full,))
    return engine.advance(batch, freeze).tensors[0][: len(ids)]


@pytest.mark.parametrize("name", PARTS)
def test_rows_of_a_part_are_what_pytorch_would_ask_for(data: Dataset, name: str) -> None:
    part = PARTS[name](data)
    rows = ROWS.get(name, list(getattr(part, "indices", ())))
    everything: Any = list(range(COUNT))
    asked = PARTS[name](everything)
    assert list(rows_of(part)) == rows == [asked[at] for at in range(len(asked))]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("from the end", marks=pytest.mark.full),
        "again and again",
        pytest.param("a random split", marks=pytest.mark.full),
        pytest.param("two subsets", marks=pytest.mark.full),
    ],
)
def test_job_over_a_part_has_the_losses_of_the_loaders_batches(
    data: Dataset, near: upriver.Near, name: str
) -> None:
    part = PARTS[name](data)
    losses, model, job = run(near, part, cut=3)
    assert same((losses, model), by_hand(data, rows_of(part)))
    [(source, count)] = job.report.samples.items()
    assert source != "local" and count == 2 * len(part)


def test_job_over_a_part_in_order_has_the_targets_and_rows_of_the_loader(data: Dataset) -> None:
    part = PARTS["a random split"](data)
    with upriver.connect().finetune(
        frozen_small(),
        part,
        batch_size=BATCH,
        micro_batch=MICRO,
        sampling=upriver.Sampling(shuffle=False),
        policy="nosplit",
    ) as job:
        targets = torch.cat([targets for _, targets in job])
    assert torch.equal(targets, data.targets[part.indices])
    assert torch.equal(targets, torch.cat([found for _, found in upriver.DataLoader(part, batch_size=7)]))


def test_samples_by_index_are_what_a_plain_job_feeds_the_model(data: Dataset) -> None:
    part = data.subset(range(0, 60, 3))
    with upriver.connect().finetune(
        frozen_small(),
        part,
        batch_size=BATCH,
        micro_batch=MICRO,
        sampling=upriver.Sampling(shuffle=False),
        policy="nosplit",
    ) as job:
        engine, freeze = Engine(chain=None, program=job._split.program, micro_batch=MICRO), job._split.freeze
        fed = list(job)
    made = [part[at] for at in range(len(part))]
    parts = [slice(at, at + MICRO) for at in range(0, len(part), MICRO)]
    features = [
        features_of(engine, part.indices[at], torch.stack([image for image, _ in made[at]]), freeze)
        for at in parts
    ]
    assert torch.equal(torch.cat([values for values, _ in fed]), torch.cat(features))
    assert torch.cat([targets for _, targets in fed]).tolist() == [target for _, target in made]


@pytest.mark.full
def test_ranks_share_the_rows_of_a_part(data: Dataset) -> None:
    part, seen = PARTS["a random split"](data), list[int]()
    for rank in range(2):
        with upriver.connect().finetune(
            frozen_small(),
            part,
            batch_size=4,
            policy="nosplit",
            sampling=upriver.Sampling(rank=rank, num_ranks=2),
        ) as job:
            seen += job._order(0).ids
    assert sorted(seen) == sorted(part.indices)


@pytest.mark.parametrize("options", [{"policy": "nosplit"}, pytest.param({"cut": 3}, marks=pytest.mark.full)])
def test_job_is_judged_on_the_other_split_of_its_dataset(
    data: Dataset, near: upriver.Near, options: dict[str, Any]
) -> None:
    training, held_out = random_split(data, [170, 30], generator=torch.Generator().manual_seed(2))  # type: ignore[arg-type, var-annotated]
    model, seen = frozen_small().eval(), list[tuple[torch.Tensor, torch.Tensor]]()

    def note(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        seen.append((outputs.clone(), targets.clone()))
        return 0.0

    there = near if "cut" in options else upriver.connect()
    with there.finetune(model, training, batch_size=BATCH, micro_batch=MICRO, seed=7, **options) as job:
        job.evaluate(held_out, note)
        [(source, count)] = job.report.samples.items()
        assert count == 30 and (source == "local") == ("cut" not in options)
        loader = upriver.DataLoader(held_out, batch_size=MICRO, seed=7)  # type: ignore[arg-type]
        engine, freeze = Engine(chain=None, program=job._split.program, micro_batch=MICRO), job._split.freeze
        features = torch.cat(
            [features_of(engine, targets.tolist(), images, freeze) for images, targets in loader]
        )
        with torch.no_grad():
            wanted = torch.cat([job(rows) for rows in features.split(BATCH)])
    assert torch.equal(torch.cat([outputs for outputs, _ in seen]), wanted)
    assert torch.equal(torch.cat([targets for _, targets in seen]), data.targets[held_out.indices])


def test_only_classes_of_the_part_that_is_judged_need_a_match(data: Dataset, tmp_path: Any) -> None:
    other = photos(tmp_path, 10)
    (tmp_path / "photos" / "class1").rename(tmp_path / "photos" / "class9")
    other = upriver.index(other.store, "photos", stages=STAGES)
    rows = [row for row, target in enumerate(other.targets.tolist()) if other.classes[target] != "class9"]
    with upriver.connect().finetune(frozen_small(), data, batch_size=BATCH, policy="nosplit") as job:
        with pytest.raises(ConfigError, match="class 'class9' is none of"):
            job.evaluate(other, lambda outputs, targets: 0.0)
        seen = list[torch.Tensor]()
        job.evaluate(Subset(other, rows), lambda outputs, targets: seen.append(targets) or 0.0)  # type: ignore[arg-type, func-returns-value]
    names = [data.classes[target] for target in torch.cat(seen).tolist()]
    assert names == [other.classes[other.targets[row]] for row in rows]


@pytest.mark.full
def test_job_over_a_part_goes_on_and_refuses_the_state_of_another(data: Dataset) -> None:
    options: dict[str, Any] = {"batch_size": 4, "micro_batch": MICRO, "seed": 7, "policy": "nosplit"}

    def job_over(part: Any) -> Any:
        return upriver.connect().finetune(frozen_small(), part, **options)

    part = Subset(data, range(50, 70))  # type: ignore[arg-type, var-annotated]
    with job_over(part) as job:
        whole = [targets for _ in range(2) for _, targets in job]
    with job_over(part) as job:
        begun = [targets for (_, targets), _ in zip(job, range(3), strict=False)]
        state = job.state_dict()
    with job_over(Subset(data, list(range(50, 70)))) as job:  # type: ignore[arg-type]
        job.load_state_dict(state)
        while len(begun) < len(whole):
            begun += [targets for _, targets in job]
    assert all(map(torch.equal, whole, begun))
    with (
        job_over(Subset(data, range(69, 49, -1))) as job,
        pytest.raises(ConfigError, match="its subset is '"),
    ):  # type: ignore[arg-type]
        job.load_state_dict(state)
    with job_over(Subset(data, range(COUNT))) as job:  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"its subset is '\w+', this job's None"):
            job.load_state_dict(state)
        of_all = job.state_dict()
        assert of_all.pop("subset") is None  # as in states with fewer fields
        job.load_state_dict(of_all)


class Moved(Subset[Any]):
    """A dataset with its own samples."""

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[self.indices[index]]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a list": (lambda data: Subset([1, 2, 3], [0]), "dataset must be a Dataset"),  # type: ignore[arg-type]
    "a mask": (lambda data: Subset(data, [True, False]), "got True"),
    "a mask of torch's": (lambda data: Subset(data, torch.ones(3, dtype=torch.bool)), r"got tensor\(True\)"),  # type: ignore[arg-type]
    "a mask of numpy's": (lambda data: Subset(data, np.ones(3, dtype=bool)), "got np.True_"),  # type: ignore[arg-type]
    "fractions": (lambda data: Subset(data, [0.0, 1.5]), "samples have numbers in 0..199, got 0.0"),  # type: ignore[list-item]
    "too far": (lambda data: Subset(data, [0, COUNT]), "samples have numbers in 0..199, got 200"),
    "too far back": (lambda data: Subset(data, [-COUNT - 1]), "samples have numbers in 0..199, got -201"),
    "of a part": (lambda data: Subset(Subset(data, [1]), [1]), "Subset cannot be read"),
    "its own": (lambda data: Moved(data, [1]), "Moved is a Subset with samples of its own"),
    "deep in": (lambda data: Subset(Moved(data, [1]), [0]), "Moved is a Subset with samples of its own"),
    "others": (lambda data: ConcatDataset([Subset(data, [1]), [1]]), "index the samples of all as one"),  # type: ignore[list-item]
}


@pytest.mark.parametrize("name", REFUSED)
def test_part_that_is_none_is_refused_by_name(data: Dataset, name: str) -> None:
    make, said = REFUSED[name]
    near = upriver.connect("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=said):
        near.finetune(frozen_small(), make(data), batch_size=4)


def test_part_without_a_sample_is_refused(data: Dataset) -> None:
    empty = Subset(data, [])  # type: ignore[arg-type, var-annotated]
    with pytest.raises(DatasetError, match="the dataset is empty"):
        upriver.connect().finetune(frozen_small(), empty, batch_size=4)
    with (
        upriver.connect().finetune(frozen_small(), data, batch_size=BATCH, policy="nosplit") as job,
        pytest.raises(DatasetError, match="the dataset is empty"),
    ):
        job.evaluate(empty, lambda outputs, targets: 0.0)
    with pytest.raises(ConfigError, match="drop_last leaves no step in an epoch: batch_size 4, 3 samples"):
        upriver.connect().finetune(
            frozen_small(), Subset(data, [1, 2, 3]), batch_size=4, sampling=upriver.Sampling(drop_last=True)
        )  # type: ignore[arg-type]
