"""Check stages: the numbers of torchvision's transforms on PIL images, strict JSON, plain errors."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.examples import examples, seeds, some
from tests.pipeline.making import encoded, pixels
from upriver._torchvision import ensure_torchvision
from upriver.errors import ConfigError, DatasetError
from upriver.pipeline import (
    CenterCrop,
    Decode,
    Draw,
    InputChain,
    InputStage,
    LoadTensor,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    SampleError,
    imagenet_eval,
    imagenet_train,
    index,
    stored_tensor,
)
from upriver.pipeline.formats.image import MAX_PIXELS
from upriver.pipeline.stages.registry import stage_from_json
from upriver.types import PIXEL_CEILING

ensure_torchvision()
from torchvision import transforms  # noqa: E402

DRAW = Draw(seed=0, epoch=0, sample=0, stage=0)
SHAPES = [(40, 60), (60, 40), (33, 33), (17, 90), (8, 7), (224, 300)]


def as_tensor(image: Image.Image) -> torch.Tensor:
    return transforms.PILToTensor()(image).permute(1, 2, 0)


@pytest.mark.parametrize("shape", some(2, ((shape,) for shape in SHAPES)))
@pytest.mark.parametrize("size", [32, 33, 7, (20, 50), (90, 90)])
def test_resize_is_torchvisions(shape: tuple[int, int], size: int | tuple[int, int]) -> None:
    array = pixels(*shape)
    got = Resize(size).apply(torch.tensor(array), DRAW)
    assert torch.equal(got, as_tensor(transforms.Resize(size)(Image.fromarray(array))))


@pytest.mark.parametrize("shape", some(2, ((shape,) for shape in SHAPES)))
@pytest.mark.parametrize("size", [32, 33, 7, (20, 50), (51, 20)])
def test_centre_crop_is_torchvisions(shape: tuple[int, int], size: int | tuple[int, int]) -> None:
    array = pixels(*shape)
    got = CenterCrop(size).apply(torch.tensor(array), DRAW)
    assert torch.equal(got, as_tensor(transforms.CenterCrop(size)(Image.fromarray(array))))
    assert got.is_contiguous()


def test_normalise_is_torchvisions() -> None:
    array = pixels(20, 30)
    theirs = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize(Normalize().mean, Normalize().std)]
    )
    got = Normalize().apply(torch.tensor(array), DRAW)
    assert got.is_contiguous()
    assert torch.equal(got, theirs(Image.fromarray(array)))


def test_the_usual_evaluation_is_torchvisions() -> None:
    theirs = transforms.Compose(
        [
            transforms.Resize(40),
            transforms.CenterCrop(32),
            transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    data = encoded(pixels(61, 47))
    value = stored_tensor(data)
    for stage in imagenet_eval(32, 40):
        value = stage.apply(value, DRAW)
    pillow = Image.fromarray(Decode().apply(stored_tensor(data), DRAW).numpy())
    assert torch.equal(value, theirs(pillow))


class Feed:
    """Replace torch's generator with our uniforms where torchvision's random crop draws numbers."""

    def __init__(self, draw: Draw) -> None:
        self.uniforms = iter(draw.uniforms(40))
        self.uniforms_of_this_try = 0

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.Tensor, "uniform_", lambda _, low=0.0, high=1.0: self.uniform(low, high))
        patch.setattr(torch, "randint", lambda low, high, size: self.randint(low, high))
        # torchvision computes these two in float32, which this test does not cover
        patch.setattr(torch, "log", lambda pair: [math.log(each) for each in pair.double().tolist()])
        patch.setattr(torch, "exp", lambda value: torch.tensor(math.exp(value), dtype=torch.float64))

    def uniform(self, low: float, high: float) -> torch.Tensor:
        if self.uniforms_of_this_try == 2:  # the last try did not fit: torchvision drew no position for it
            next(self.uniforms), next(self.uniforms)
            self.uniforms_of_this_try = 0
        self.uniforms_of_this_try += 1
        return torch.tensor(low + (high - low) * next(self.uniforms), dtype=torch.float64)

    def randint(self, low: int, high: int) -> torch.Tensor:
        return torch.tensor([low + int(next(self.uniforms) * (high - low))])


@pytest.mark.parametrize("shape", [(40, 60), (3, 200), (200, 3), (1, 1)])
@pytest.mark.parametrize("sample", seeds(20))
def test_a_random_crop_is_torchvisions_for_the_same_draws(
    shape: tuple[int, int], sample: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    array, draw = pixels(*shape), Draw(seed=1, epoch=0, sample=sample, stage=1)
    with monkeypatch.context() as patch:
        Feed(draw).patch(patch)
        theirs = transforms.RandomResizedCrop(16, ratio=(0.75, 1.5))(Image.fromarray(array))
    got = RandomResizedCrop(16, ratio=(0.75, 1.5)).apply(torch.tensor(array), draw)
    assert torch.equal(got, as_tensor(theirs))


@settings(deadline=None, max_examples=examples(200))
@given(
    height=st.integers(1, 300),
    width=st.integers(1, 300),
    sample=st.integers(0, 10**9),
    low=st.floats(0.01, 1),
    ratio=st.floats(0.01, 100),
)
def test_a_random_crop_lies_inside(height: int, width: int, sample: int, low: float, ratio: float) -> None:
    stage = RandomResizedCrop(8, scale=(low, 1.0), ratio=(ratio, 2 * ratio))
    draw = Draw(seed=0, epoch=0, sample=sample, stage=0)
    top, left, tall, wide = stage._box(height, width, draw)
    assert 0 <= top < top + tall <= height
    assert 0 <= left < left + wide <= width


def test_random_crops_cover_scale_and_ratio() -> None:
    stage, areas, ratios = RandomResizedCrop(8), [], []
    for sample in range(500):
        _, _, tall, wide = stage._box(500, 500, Draw(seed=0, epoch=0, sample=sample, stage=0))
        areas.append(tall * wide / 250_000)
        ratios.append(wide / tall)
    assert 0.07 < min(areas) < 0.12
    assert 0.9 < max(areas) <= 1
    assert 0.74 < min(ratios) < 0.78
    assert 1.28 < max(ratios) < 1.35
    assert abs(sum(math.log(ratio) for ratio in ratios) / 500) < 0.03


def test_flips_are_flips_and_as_many_as_asked_for() -> None:
    value = torch.tensor(pixels(4, 6))
    flipped = 0
    for sample in range(1000):
        got = RandomHorizontalFlip(0.3).apply(value, Draw(seed=0, epoch=0, sample=sample, stage=2))
        flipped += torch.equal(got, value.flip(1))
        assert torch.equal(got, value) or torch.equal(got, value.flip(1))
    assert 250 < flipped < 350
    assert torch.equal(RandomHorizontalFlip(1).apply(value, DRAW), value.flip(1))
    assert torch.equal(RandomHorizontalFlip(0).apply(value, DRAW), value)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"stage": "exec"}, "unknown input stage 'exec'; known: decode, load_tensor"),
        ({"stage": "resize"}, "'resize' lacks the field 'size'; fields: size"),
        ({"stage": "resize", "size": 3, "siez": 4}, "'resize' has no field 'siez'; fields: size"),
        ({"size": 3}, "a name under 'stage'"),
        ({"stage": 3}, "a name under 'stage'"),
        ("resize", "a name under 'stage'"),
        (None, "a name under 'stage'"),
    ],
)
def test_json_of_no_known_stage(data: object, problem: str) -> None:
    with pytest.raises(DatasetError, match=problem):
        stage_from_json(data)


@pytest.mark.parametrize(
    "size", [0, -1, 16385, 1.5, "224", None, True, (3,), (3, 0), (3, 4, 5), (3, 4.0), {"a": 1}, 10**30]
)
@pytest.mark.parametrize("stage", ["resize", "center_crop", "random_resized_crop"])
def test_bad_sizes(stage: str, size: object) -> None:
    data = {"stage": stage, "size": size}
    if stage == "random_resized_crop":
        data |= {"scale": [0.1, 1], "ratio": [0.5, 2]}
    with pytest.raises(ConfigError, match=rf"{stage}\.size must be"):
        stage_from_json(data)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Decode(max_pixels=0), "decode.max_pixels must be a whole number in 1.."),
        (lambda: Decode(max_pixels=PIXEL_CEILING + 1), "decode.max_pixels"),
        (lambda: Decode(orient=1), "decode.orient must be true or false, got 1"),
        (lambda: LoadTensor("pt"), "load_tensor.format must be 'npy' or 'safetensors', got 'pt'"),
        (lambda: RandomResizedCrop(8, scale=(0.0, 1.0)), "random_resized_crop.scale must be 0 < low"),
        (lambda: RandomResizedCrop(8, scale=(0.5, 0.1)), "random_resized_crop.scale"),
        (lambda: RandomResizedCrop(8, scale=(0.5, 1.1)), "random_resized_crop.scale"),
        (lambda: RandomResizedCrop(8, ratio=(math.nan, 1)), "random_resized_crop.ratio must be a finite"),
        (lambda: RandomResizedCrop(8, ratio=1), "random_resized_crop.ratio must be one number or two"),
        (lambda: RandomHorizontalFlip(1.1), "random_horizontal_flip.p must lie in 0..1, got 1.1"),
        (lambda: RandomHorizontalFlip("x"), "random_horizontal_flip.p must be a finite number"),
        (lambda: Normalize((0, 0), (1, 1, 1)), "normalize.mean must be three numbers"),
        (lambda: Normalize((0, 0, 0), (1, 1, 0)), "normalize.std must be > 0"),
        (lambda: Normalize((0, 0, math.inf), (1, 1, 1)), "normalize.mean must be a finite number"),
    ],
)
def test_bad_values(make: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace(".", r"\.")):
        make()


@pytest.mark.parametrize(
    "stage", [Resize(8), CenterCrop(8), RandomResizedCrop(8), RandomHorizontalFlip(), Normalize()]
)
def test_what_is_no_picture_is_a_sample_error(stage: InputStage) -> None:
    for value in (
        torch.zeros(8, 8, 3),
        torch.zeros(8, 8, dtype=torch.uint8),
        torch.zeros(0, 8, 3, dtype=torch.uint8),
    ):
        with pytest.raises(SampleError, match="pixels are uint8 of shape"):
            stage.apply(value, DRAW)


@pytest.mark.parametrize("stage", [Decode(), LoadTensor()])
def test_what_is_no_file_is_a_sample_error(stage: InputStage) -> None:
    with pytest.raises(SampleError, match="stored bytes are uint8"):
        stage.apply(torch.zeros(3, 3), DRAW)


def test_a_sliver_does_not_grow_past_the_cap() -> None:
    with pytest.raises(SampleError, match=f"more than {MAX_PIXELS} pixels"):
        Resize(256).apply(torch.zeros(1, 300_000, 3, dtype=torch.uint8), DRAW)


def test_presets_name_the_usual_stages() -> None:
    assert [stage.name for stage in imagenet_train()] == [
        "decode",
        "random_resized_crop",
        "random_horizontal_flip",
        "normalize",
    ]
    assert [stage.name for stage in imagenet_eval()] == ["decode", "resize", "center_crop", "normalize"]


# ---------------------------------------------------------------------------------- what is no stage


@pytest.mark.parametrize(
    ("transform", "told"),
    [
        (transforms.Resize(8), "got Resize: use upriver.Resize(…)"),
        (transforms.RandomHorizontalFlip, "got type: use upriver.RandomHorizontalFlip(…)"),
        (transforms.ToTensor(), "got ToTensor: use upriver.ToFloat(…)"),
        (transforms.Compose([transforms.Resize(8)]), "got Compose: use upriver.imagenet_train(…)"),
        (transforms.RandomRotation(5), "in a dataset of your own that upriver.DataLoader reads"),
        (lambda image: image, "run code of your own on batches in the loop"),
    ],
)
def test_transform_that_is_no_stage_says_what_works(transform: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        InputChain((Decode(), transform))
    with pytest.raises(ConfigError, match=re.escape(told.partition(": ")[2] or told)):
        index("memory://nothing", stages=transform)
