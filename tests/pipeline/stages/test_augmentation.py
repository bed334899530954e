"""Check random image changes: torchvision's pixels on PIL images, for the same draws."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.examples import examples, seeds, some
from tests.pipeline.making import pixels
from upriver._torchvision import ensure_torchvision
from upriver.errors import ConfigError, TooLarge
from upriver.pipeline import ColorJitter, Draw, RandAugment, RandomCrop, SampleError, ToFloat
from upriver.pipeline.formats import image
from upriver.pipeline.stages.augmentation import MAX_FACTOR, OPERATIONS

ensure_torchvision()
from torchvision import transforms  # noqa: E402
from torchvision.transforms import InterpolationMode, autoaugment, functional  # noqa: E402

SHAPES = [(40, 60), (33, 33), (17, 90), (1, 1), (2, 31), (100, 75)]
THEIR_NAMES = {
    "identity": "Identity",
    "shear_x": "ShearX",
    "shear_y": "ShearY",
    "translate_x": "TranslateX",
    "translate_y": "TranslateY",
    "rotate": "Rotate",
    "brightness": "Brightness",
    "saturation": "Color",
    "contrast": "Contrast",
    "sharpness": "Sharpness",
    "posterize": "Posterize",
    "solarize": "Solarize",
    "auto_contrast": "AutoContrast",
    "equalize": "Equalize",
}


def draw_of(sample: int, epoch: int = 0) -> Draw:
    return Draw(seed=3, epoch=epoch, sample=sample, stage=1)


def as_tensor(picture: Image.Image) -> torch.Tensor:
    return transforms.PILToTensor()(picture).permute(1, 2, 0)


class Feed:
    """Replace torch's generator with our uniforms where torchvision draws whole numbers."""

    def __init__(self, patch: pytest.MonkeyPatch, uniforms: tuple[float, ...]) -> None:
        self.uniforms = iter(uniforms)
        patch.setattr(torch, "randint", self.randint)

    def randint(self, low: int, high: Any, size: Any = None) -> torch.Tensor:
        if not isinstance(high, int):
            low, high = 0, low
        return torch.tensor([low + int(next(self.uniforms) * (high - low))])


# ---------------------------------------------------------------------------------------- RandAugment


@pytest.mark.parametrize("shape", some(3, ((shape,) for shape in SHAPES)))
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(
    ("magnitude", "bins"),
    [
        (9, 31),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in [(1, 2), (0, 31), (1, 31), (15, 31), (30, 31), (3, 4)]
        ),
    ],
)
def test_every_operation_is_torchvisions(
    name: str, magnitude: int, bins: int, shape: tuple[int, int]
) -> None:
    stage = RandAugment(1, magnitude, bins)
    array = pixels(*shape, seed=sum(shape))
    space = transforms.RandAugment(1, magnitude, bins)._augmentation_space(bins, shape)
    amounts, signed = space[THEIR_NAMES[name]]
    for sign in (1, -1) if signed else (1,):
        amount = float(amounts[magnitude]) * sign if amounts.ndim else 0.0
        theirs = autoaugment._apply_op(
            Image.fromarray(array), THEIR_NAMES[name], amount, InterpolationMode.NEAREST, None
        )
        changes = [(name, stage.amount(name, sign, *shape))] if name != "identity" else []
        assert torch.equal(image.change(torch.tensor(array), changes), as_tensor(theirs))


def test_the_operations_are_torchvisions_and_in_its_order() -> None:
    space = transforms.RandAugment()._augmentation_space(31, (10, 10))
    assert [THEIR_NAMES[name] for name in OPERATIONS] == list(space)


@pytest.mark.parametrize("sample", seeds(60))
def test_rand_augment_is_torchvisions_for_the_same_draws(
    sample: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    array, draw = pixels(30, 45, seed=sample), draw_of(sample)
    count, uniforms = 1 + sample % 4, iter(draw.uniforms(8))
    drawn = []
    for _ in range(count):  # torchvision draws no sign for an operation without one
        for_name, for_sign = next(uniforms), next(uniforms)
        signed = OPERATIONS[int(for_name * len(OPERATIONS))] not in (
            *("identity", "posterize", "solarize", "auto_contrast", "equalize"),
        )
        drawn += [for_name, for_sign] if signed else [for_name]
    with monkeypatch.context() as patch:
        Feed(patch, tuple(drawn))
        theirs = transforms.RandAugment(count, 9)(Image.fromarray(array))
    got = RandAugment(count, 9).apply(torch.tensor(array), draw)
    assert torch.equal(got, as_tensor(theirs))
    assert got.is_contiguous()


def test_every_operation_and_both_signs_are_drawn() -> None:
    value, seen = torch.tensor(pixels(8, 8)), set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image, "change", lambda value, changes: seen.update(changes) or value)
        for sample in range(1500):
            RandAugment(1, 30).apply(value, draw_of(sample))
    assert {name for name, _ in seen} == set(OPERATIONS) - {"identity"}
    assert {amount for name, amount in seen if name == "rotate"} == {-30.0, 30.0}


# ---------------------------------------------------------------------------------------- ColorJitter


@pytest.mark.parametrize("shape", some(3, ((shape,) for shape in SHAPES)))
@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("brightness", functional.adjust_brightness),
        ("contrast", functional.adjust_contrast),
        ("saturation", functional.adjust_saturation),
        ("hue", functional.adjust_hue),
        ("sharpness", functional.adjust_sharpness),
    ],
)
def test_every_step_is_torchvisions(name: str, theirs: Any, shape: tuple[int, int]) -> None:
    array = pixels(*shape, seed=sum(shape))
    amounts = (-0.5, -0.31, -0.002, 0.0, 0.1, 0.49, 0.5)
    for amount in amounts if name == "hue" else (0.0, 0.1, 0.77, 1.0, 1.3, 2.0, 17.5):
        got = image.change(torch.tensor(array), [(name, amount)])
        assert torch.equal(got, as_tensor(theirs(Image.fromarray(array), amount)))


@pytest.mark.parametrize("sample", seeds(30))
@pytest.mark.parametrize(
    "fields",
    [
        {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
        {"brightness": (0.5, 0.9), "hue": (-0.5, -0.1)},
        {"contrast": 3.0},
        {"saturation": (1.0, 1.0), "hue": 0.5},
        {},
    ],
)
def test_colour_jitter_is_torchvisions_for_the_same_draws(fields: dict[str, Any], sample: int) -> None:
    array, draw = pixels(20, 30, seed=sample), draw_of(sample)
    theirs = transforms.ColorJitter(**fields)
    uniforms = draw.uniforms(8)
    picture = Image.fromarray(array)
    steps = [
        (functional.adjust_brightness, theirs.brightness),
        (functional.adjust_contrast, theirs.contrast),
        (functional.adjust_saturation, theirs.saturation),
        (functional.adjust_hue, theirs.hue),
    ]
    for at in sorted(range(4), key=lambda at: uniforms[at]):
        adjust, limits = steps[at]
        if limits is not None:
            picture = adjust(picture, limits[0] + (limits[1] - limits[0]) * uniforms[4 + at])
    got = ColorJitter(**fields).apply(torch.tensor(array), draw)
    assert torch.equal(got, as_tensor(picture))


def test_colours_change_in_every_order() -> None:
    stage = ColorJitter(0.1, 0.1, 0.1, 0.1)
    orders = {tuple(name for name, _ in stage._changes(draw_of(sample))) for sample in range(600)}
    assert orders == set(itertools.permutations(["brightness", "contrast", "saturation", "hue"]))


def test_factors_lie_where_they_may_and_reach_the_ends() -> None:
    found = [dict(ColorJitter(2.0, (0.3, 0.4), 0.5, 0.2)._changes(draw_of(sample))) for sample in range(500)]
    for name, low, high in (
        ("brightness", 0, 3),
        ("contrast", 0.3, 0.4),
        ("saturation", 0.5, 1.5),
        ("hue", -0.2, 0.2),
    ):
        amounts = [each[name] for each in found]
        assert low <= min(amounts) < low + 0.02 * (high - low)
        assert high - 0.02 * (high - low) < max(amounts) <= high


def test_what_is_left_alone_moves_nothing_else() -> None:
    alone = dict(ColorJitter(brightness=0.4)._changes(draw_of(5)))
    among = dict(ColorJitter(0.4, 0.4, 0.4, 0.4)._changes(draw_of(5)))
    assert alone == {"brightness": among["brightness"]}


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: ColorJitter(brightness=-0.1), "color_jitter.brightness must lie in 0..64, got -0.1"),
        (lambda: ColorJitter(contrast=MAX_FACTOR + 1), "color_jitter.contrast must lie in 0..64"),
        (lambda: ColorJitter(saturation=(0.5, 0.1)), "color_jitter.saturation must be low <= high"),
        (lambda: ColorJitter(hue=0.6), "color_jitter.hue must lie in 0..0.5, got 0.6"),
        (lambda: ColorJitter(hue=-0.1), "color_jitter.hue must lie in 0..0.5"),
        (lambda: ColorJitter(hue=(-0.6, 0)), "color_jitter.hue must lie in -0.5..0.5"),
        (lambda: ColorJitter(hue=(1,)), "color_jitter.hue must be one number or two"),
        (lambda: RandAugment(0), "rand_augment.num_ops must be a whole number in 1..16, got 0"),
        (lambda: RandAugment(magnitude=31), "rand_augment.magnitude must be a whole number in 0..30"),
        (lambda: RandAugment(num_magnitude_bins=1), "rand_augment.num_magnitude_bins must be a whole number"),
        (lambda: RandomCrop(8, -1), "random_crop.padding must be a whole number in 0..16384, got -1"),
        (lambda: ToFloat(-0.1), "to_float.low must lie in 0..1"),
        (lambda: ToFloat(0.5, 0.5), "to_float.low must be < to_float.high, got 0.5 and 0.5"),
    ],
)
def test_bad_values(make: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert problem in str(caught.value)


# ----------------------------------------------------------------------------------------- RandomCrop


@pytest.mark.parametrize("shape", some(1, [((17, 90),), ((40, 60),), ((33, 33),)]))
@pytest.mark.parametrize(("size", "padding"), [(17, 0), ((5, 30), 0), (33, 8), ((17, 33), 40), (1, 3)])
@pytest.mark.parametrize("sample", seeds(12))
def test_a_random_crop_is_torchvisions_for_the_same_draws(
    shape: tuple[int, int], size: Any, padding: int, sample: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    array, draw = pixels(*shape), draw_of(sample)
    with monkeypatch.context() as patch:
        Feed(patch, draw.uniforms(2))
        theirs = transforms.RandomCrop(size, padding or None)(Image.fromarray(array))
    got = RandomCrop(size, padding).apply(torch.tensor(array), draw)
    assert torch.equal(got, as_tensor(theirs))
    assert got.is_contiguous()


@settings(deadline=None, max_examples=examples(200))
@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    size=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    padding=st.integers(0, 30),
    sample=st.integers(0, 10**9),
)
def test_a_random_crop_is_a_part_of_the_padded_image(
    height: int, width: int, size: tuple[int, int], padding: int, sample: int
) -> None:
    value = torch.tensor(pixels(height, width)).clamp(min=1)  # black is padding alone
    stage = RandomCrop(size, padding)
    if size[0] > height + 2 * padding or size[1] > width + 2 * padding:
        with pytest.raises(SampleError, match="does not fit into"):
            stage.apply(value, draw_of(sample))
        return
    got = stage.apply(value, draw_of(sample))
    padded = torch.nn.functional.pad(value, (0, 0, padding, padding, padding, padding))
    places = padded.unfold(0, size[0], 1).unfold(1, size[1], 1).permute(0, 1, 3, 4, 2)
    assert (places == got).flatten(2).all(2).any()


def test_crops_lie_everywhere() -> None:
    value = torch.arange(5 * 7 * 3, dtype=torch.uint8).view(5, 7, 3)
    first = {int(RandomCrop(3).apply(value, draw_of(sample))[0, 0, 0]) for sample in range(300)}
    assert first == {int(value[top, left, 0]) for top in range(3) for left in range(5)}


def test_a_crop_that_does_not_fit_says_so() -> None:
    with pytest.raises(
        SampleError, match="a crop of 9 x 9 pixels does not fit into 4 x 7 with 2 on each side"
    ):
        RandomCrop(9, 2).apply(torch.zeros(4, 7, 3, dtype=torch.uint8), draw_of(0))


def test_no_crop_is_larger_than_this_process_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "_limit", 100)
    with pytest.raises(TooLarge, match="11 x 11"):
        RandomCrop(11, 10).apply(torch.zeros(4, 4, 3, dtype=torch.uint8), draw_of(0))


# ------------------------------------------------------------------------------------------- ToFloat


def test_to_float_is_torchvisions_and_holds_to_its_range() -> None:
    array = pixels(20, 30)
    whole = transforms.ToTensor()(Image.fromarray(array))
    got = ToFloat().apply(torch.tensor(array), draw_of(0))
    assert torch.equal(got, whole)
    assert got.is_contiguous()
    held = ToFloat(0.25, 0.75).apply(torch.tensor(array), draw_of(0))
    assert torch.equal(held, whole.clamp(0.25, 0.75))


@pytest.mark.parametrize("stage", [RandomCrop(1), ColorJitter(0.5), RandAugment(), ToFloat()])
def test_what_is_no_picture_is_a_sample_error(stage: Any) -> None:
    for value in (torch.zeros(8, 8, 3), torch.zeros(8, 8, dtype=torch.uint8)):
        with pytest.raises(SampleError, match="pixels are uint8 of shape"):
            stage.apply(value, draw_of(0))


@pytest.mark.parametrize("stage", [ColorJitter(0.4, 0.4, 0.4, 0.2), RandAugment(4, 30)])
def test_any_size_is_changed(stage: Any) -> None:
    for shape in ((1, 1), (1, 300), (300, 1), (2, 2)):
        for sample in range(40):
            value = torch.tensor(pixels(*shape, seed=sample))
            before = value.clone()
            assert stage.apply(value, draw_of(sample)).shape == value.shape
            assert torch.equal(value, before)
