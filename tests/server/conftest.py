"""Share one dataset, one program and one server among most tests."""

from dataclasses import dataclass

import pytest
import torch

from tests.pipeline.making import encoded, pixels, write
from tests.program.nets import Small
from tests.recording import recorded_once
from tests.server.running import running
from upriver.engine.engine import Engine
from upriver.engine.read import read_samples
from upriver.pipeline import CenterCrop, Dataset, Decode, Normalize, RandomHorizontalFlip, Resize, index
from upriver.program.capture.prefix import capture
from upriver.program.example_inputs import TensorSource
from upriver.program.graph.executor import Program
from upriver.protocol import DatasetRef, RunRequest
from upriver.store import Store

__all__ = ["recorded_once"]  # a fixture of these tests, too

MICRO_BATCH = 4
CAPS = {"body_bytes": 2 << 20, "program_bytes": 1 << 20, "samples": 64}


def images(count):
    return {
        f"{'cat' if number % 2 else 'dog'}/{number:03d}.png": encoded(pixels(20, 24, seed=number), "PNG")
        for number in range(count)
    }


@dataclass(frozen=True)
class World:
    """Store with a dataset, and a program that is not in the store."""

    store: Store
    dataset: Dataset
    program: Program

    def request(self, *micro_batches, stop=0, **fields):
        return RunRequest(
            **{
                "micro_batches": micro_batches,
                "start": self.dataset.chain.start,
                "stop": stop,
                "micro_batch": MICRO_BATCH,
                "dataset": DatasetRef(store="default", digest=self.dataset.digest),
                "program": self.program.digest if stop > 0 else None,
                "seed": 3,
                "epoch": 1,
                **fields,
            }
        )

    def here(self, ids, stop, **fields):
        """Compute the same request in this process."""
        engine = Engine(
            chain=self.dataset.chain, program=self.program if stop > 0 else None, micro_batch=MICRO_BATCH
        )
        batch = engine.begin(
            read_samples(self.dataset, ids),
            ids,
            object_names=[ref.object for ref in self.dataset.locate(ids)],
            stop=stop,
            seed=3,
            epoch=1,
            **fields,
        )
        return engine.advance(batch, stop) if stop > 0 else batch


def make_world(root, count=10, *, padding=b""):
    uri = write(root, {name: data + padding for name, data in images(count).items()})
    dataset = index(
        uri, stages=[Decode(), Resize(18), CenterCrop(16), RandomHorizontalFlip(0.5), Normalize()]
    )
    dataset.publish()
    return World(store=dataset.store, dataset=dataset, program=make_program(0))


def make_program(seed, micro_batch=MICRO_BATCH):
    torch.manual_seed(seed)
    return capture(
        Small().eval(), (torch.zeros(micro_batch, 3, 16, 16),), outputs=[TensorSource(path="block3")]
    )


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="session")
def server(world):
    with running(world.store.uri, caps=CAPS, workers=2) as found:
        yield found.wait_ready()
