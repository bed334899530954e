"""Loader processes: what they are given first, and whose error it is."""

from __future__ import annotations

import time
from queue import SimpleQueue
from typing import Any

import pytest
from torch.utils.data import default_collate

from upriver.dataloader.local import Maker, Processes
from upriver.dataloader.tasks import Arrivals, Task
from upriver.pipeline.mapstyle import DONE, RAW, START, MapStyle


class Slow:
    """Reading is quick, computing is not; some samples cannot be read, others not be computed."""

    def read(self, index: int) -> int:
        if index % 10 == 7:
            raise LookupError(f"no {index}")
        return index

    def transform(self, raw: int) -> int:
        time.sleep(0.01)
        if raw % 10 == 3:
            raise ValueError(f"bad {raw}")
        return -raw

    def __getitem__(self, index: int) -> int:
        return self.transform(self.read(index))


def task(number: int, stop: int) -> Task:
    return Task(
        number=number,
        epoch=0,
        batch=0,
        indices=(number,),
        samples=(number,),
        whole=False,
        start=START,
        stop=stop,
    )


def run(tasks: list[Task], num_workers: int, given_first: int) -> list[Any]:
    arrivals: Arrivals = SimpleQueue()
    processes = Processes(Maker(MapStyle(Slow()), default_collate), num_workers=num_workers)
    processes.start(arrivals, tasks[:given_first])
    for each in tasks[given_first:]:
        processes.give(each)
    found = [arrivals.get(timeout=60) for _ in tasks]
    processes.stop()
    return found


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("given_first", [0, 5, 60])
def test_every_result_and_every_error_is_that_of_its_task(num_workers: int, given_first: int) -> None:
    tasks = [task(number, RAW if number % 3 else DONE) for number in range(60)]
    found = {arrival.number: arrival for arrival in run(tasks, num_workers, given_first)}
    assert len(found) == 60
    for number, arrival in found.items():
        reads = number % 3 != 0
        if number % 10 == 7:
            assert f"no {number}" in str(arrival.error) and arrival.final
        elif number % 10 == 3 and not reads:
            assert f"bad {number}" in str(arrival.error) and arrival.final
        else:
            assert arrival.value == [number if reads else -number]


def test_reading_for_others_comes_before_what_is_done_here() -> None:
    tasks = [task(number, DONE) for number in range(1, 40, 10)] * 1 + [
        task(number, RAW) for number in range(40, 44)
    ]
    order = [arrival.number for arrival in run(tasks, 1, len(tasks))]
    assert set(order[:4]) == {40, 41, 42, 43}
