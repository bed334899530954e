"""Test that a worker foretells its programs' seconds by the models kept for this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.profile.latency.test_predictor import timed
from tests.server.enclosed import worker
from upriver.profile.latency.kept_models import MODELS, name_of
from upriver.profile.latency.predictor import Predictor, place_of
from upriver.profile.latency.regression import OwnModel, PaperModel
from upriver.profile.latency.serialization import keep, predictor_to_json
from upriver.program.capture.prefix import capture
from upriver.server.ipc.shared_memory import SealedFile
from upriver.server.programs.program_files import ProgramFiles
from upriver.server.sandbox.bubblewrap import NOT_SHUT_IN, Enclosure, choose

pytestmark = pytest.mark.slow

ROWS = 3


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path))
    measured = [each for kind in ("matmul", "bias", "activation.relu") for each in timed(kind)]
    return Predictor(
        place=place_of("cpu"),
        fitted_at="2026-01-02T03:04:05+00:00",
        configurations=len(measured),
        papers={"edge": PaperModel.fit(measured, "edge"), "device": PaperModel.fit(measured, "device")},
        ours=OwnModel.fit(measured),
    )


def sealed(data):
    found = SealedFile()
    found.append(data)
    found.seal()
    return found


def predicted_s(enclosure=NOT_SHUT_IN, *, last=None):
    """Return what a new worker foretells of a program, and the program."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)] + ([last] if last is not None else [])
    program = capture(nn.Sequential(*layers), torch.randn(ROWS, 6))
    files = ProgramFiles(
        key="a",
        digest=program.digest,
        graph=sealed(program.graph_bytes),
        weights=sealed(program.weights_bytes),
    )
    with worker(enclosure) as (handle, _):
        handle.load(files)
        assert handle.predicted_s("a", ROWS + 1) == handle.predicted_s("b", ROWS) == {}
        found = handle.predicted_s("a", ROWS)
        handle.forget("a")
        handle.tidy()
        assert handle.predicted_s("a", ROWS) == {}
    return found, program


@pytest.fixture(params=["none", "auto"])
def enclosure(request):
    """Return what shuts a worker in: namespaces alone, and bubblewrap where it works."""
    if request.param == "none":
        return NOT_SHUT_IN
    found = choose("auto", device="cpu")
    if found.kind != "bubblewrap":
        pytest.skip(found.warning)
    return Enclosure(sandbox=found)


@pytest.mark.full
def test_a_worker_foretells_by_the_models_of_its_device(enclosure, models):
    assert predicted_s(enclosure)[0] == {}, "nothing is kept"
    keep(models)
    found, program = predicted_s(enclosure)
    assert list(found.values()) == models.stage_seconds(program.graph)
    assert list(found) == list(range(1, program.num_stages + 1))


@pytest.mark.full
def test_models_of_another_device_and_broken_ones_foretell_nothing(models):
    other = replace(models, place=replace(models.place, threads=64))
    MODELS.write(name_of(models.place), predictor_to_json(other))
    assert predicted_s()[0] == {}
    MODELS.write(name_of(models.place), "{")
    assert predicted_s()[0] == {}


@pytest.mark.full
def test_a_program_with_an_operator_without_a_model_is_not_foretold(models):
    keep(models)
    assert predicted_s(last=nn.Softmax(dim=1))[0] == {}
