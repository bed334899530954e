"""Test audio through a real server: cut after any input stage, the bits equal those computed here."""

import pytest
import torch

from tests.pipeline.making import tone, wav, write
from tests.server.running import run, running
from upriver.engine.engine import Engine
from upriver.engine.read import read_samples
from upriver.pipeline import (
    AddNoise,
    DecodeWav,
    Fft,
    FixLength,
    Resample,
    Spectrogram,
    Standardize,
    Stft,
    index,
)
from upriver.protocol import DatasetRef, RunRequest
from upriver.types import MicroBatch

CHAINS = {
    "noisy": (
        *(DecodeWav(16000), FixLength(3000), AddNoise((0, 20)), Resample(16000, 12000)),
        *(Stft(256, 64), Spectrogram(log=True), Standardize()),
    ),
    "whole": (DecodeWav(16000, mono=False), FixLength(2000), Fft(), Spectrogram(power=1)),
}
IDS = ((0, 1, 2, 3), (4, 5))


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    files = {f"yes/{n}.wav": wav(tone(2500 + 300 * n, 2, seed=n), bits=(16, 24)[n % 2]) for n in range(6)}
    uri = write(tmp_path_factory.mktemp("sounds"), files)
    found = {name: index(uri, stages=stages) for name, stages in CHAINS.items()}
    for dataset in found.values():
        dataset.publish()
    with running(uri) as server:
        yield found, server.wait_ready()


@pytest.mark.parametrize("name", CHAINS)
def test_a_server_gives_what_is_computed_here_wherever_it_stops(sounds, name):
    dataset, server = sounds[0][name], sounds[1]
    engine = Engine(chain=dataset.chain, program=None, micro_batch=4)
    for stop in range(dataset.chain.start, 1):
        request = RunRequest(
            micro_batches=IDS,
            start=dataset.chain.start,
            stop=stop,
            micro_batch=4,
            dataset=DatasetRef(store="default", digest=dataset.digest),
            seed=3,
            epoch=1,
        )
        answers = [message for message in run(server, request) if isinstance(message, MicroBatch)]
        for ids, answer in zip(IDS, answers, strict=True):
            here = engine.begin(
                read_samples(dataset, ids), ids, object_names=["x"] * len(ids), stop=stop, seed=3, epoch=1
            )
            assert answer.ids == here.ids
            assert all(map(torch.equal, answer.tensors, here.tensors))
            rest = engine.resume(answer, object_names=["x"] * len(ids), stop=0, seed=3, epoch=1)
            whole = engine.resume(here, object_names=["x"] * len(ids), stop=0, seed=3, epoch=1)
            assert all(map(torch.equal, rest.tensors, whole.tensors))
