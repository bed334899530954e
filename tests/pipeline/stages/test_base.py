"""Check that every stage survives a round trip as plain data, and that each field refuses invalid values."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

import pytest

import upriver
from tests.pipeline.every_stage import EXAMPLES
from upriver import pipeline
from upriver.errors import ConfigError
from upriver.pipeline import InputStage
from upriver.pipeline.stages.registry import STAGES, stage_from_json

WRONG: list[Any] = [
    *(None, "x", True, 1.5, -1, 1j, math.nan, math.inf, 10**30, 10**400),
    *([], [1, 2, 3, 4], [1, "x"], [1, math.nan], [True, True], {"a": 1}),
]
RIGHT: dict[str, list[Any]] = {
    "decode.orient": [True],
    "decode_wav.mono": [True],
    "spectrogram.log": [True],
    "spectrogram.power": [1.5],
    "stft.win": [None],
    "add_noise.snr_db": [-1, 1.5],
    "color_jitter.brightness": [1.5],
    "color_jitter.contrast": [1.5],
    "color_jitter.saturation": [1.5],
}
"""The valid ones among the values above."""


@pytest.mark.parametrize("stage", EXAMPLES, ids=repr)
def test_json_there_and_back(stage: InputStage) -> None:
    text = json.dumps(stage.to_json())
    back = stage_from_json(json.loads(text))
    assert back == stage
    assert hash(back) == hash(stage)
    assert json.dumps(back.to_json()) == text


def test_every_stage_is_in_the_examples() -> None:
    assert {type(stage) for stage in EXAMPLES} == set(STAGES.values())


def test_every_stage_can_be_imported_from_the_top() -> None:
    for stage in STAGES.values():
        assert getattr(upriver, stage.__name__) is getattr(pipeline, stage.__name__) is stage


@pytest.mark.parametrize(
    ("stage", "field"),
    [(stage, field.name) for stage in dict.fromkeys(map(type, EXAMPLES)) for field in fields(stage)],
    ids=lambda each: getattr(each, "name", each),
)
def test_a_wrong_value_names_stage_and_field(stage: type[InputStage], field: str) -> None:
    good = next(example for example in EXAMPLES if type(example) is stage).to_json()
    where = f"{stage.name}.{field}"
    right = [(type(each), each) for each in RIGHT.get(where, [])]
    for value in WRONG:
        if (type(value), value) in right:
            stage_from_json({**good, field: value})
            continue
        with pytest.raises(ConfigError) as caught:
            stage_from_json({**good, field: value})
        assert where in str(caught.value)
