"""Test the micro-batch that a model is captured with: real samples where only these tell their shape."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.pipeline.making import encoded, pixels, write
from upriver.errors import BadSample, ConfigError
from upriver.finetune.calibration.example_batch import example_batch
from upriver.pipeline import CenterCrop, Dataset, Decode, LoadTensor, Normalize, Resize, index


def npy(values: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, values)
    return out.getvalue()


def tensors(root: Path, *values: np.ndarray | None) -> Dataset:
    """Return a dataset of stored tensors; None stands for a damaged one."""
    files = {
        f"all/{number}.npy": b"not a tensor" if value is None else npy(value)
        for number, value in enumerate(values)
    }
    return index(write(root, files), stages=[LoadTensor()])


def example(dataset: Dataset, micro_batch: int, on_bad_sample: str = "fail") -> torch.Tensor:
    rows = range(len(dataset))
    return example_batch(dataset, rows, micro_batch=micro_batch, seed=0, on_bad_sample=on_bad_sample)


WORDS = [np.arange(3, dtype=np.int64) + 10 * number for number in range(4)]


@pytest.mark.parametrize("micro_batch", [1, 3, 4, 6, 9])
def test_integers_are_real_samples_repeated_up_to_a_micro_batch(tmp_path: Path, micro_batch: int) -> None:
    found = example(tensors(tmp_path, *WORDS), micro_batch)
    num = min(micro_batch, len(WORDS))
    wanted = [torch.from_numpy(WORDS[row % num]) for row in range(micro_batch)]
    assert torch.equal(found, torch.stack(wanted))


def test_floating_point_samples_give_their_shape_alone(tmp_path: Path) -> None:
    found = example(tensors(tmp_path, np.ones((2, 5), dtype=np.float16)), 3)
    assert (found.shape, found.dtype) == ((3, 2, 5), torch.float16)
    assert not torch.equal(found, torch.ones_like(found))


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_damaged_samples_fail_or_are_passed_over(tmp_path: Path, micro_batch: int) -> None:
    dataset = tensors(tmp_path, None, None, *WORDS)
    with pytest.raises(BadSample, match=r"all/0\.npy"):
        example(dataset, micro_batch)
    found = example(dataset, micro_batch, "skip")
    assert torch.equal(found, torch.stack([torch.from_numpy(each) for each in WORDS[:micro_batch]]))


def test_without_any_sample_that_can_be_read_it_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none of the first 3 samples could be read"):
        example(tensors(tmp_path, None, None, None), 2, "skip")


def test_a_store_of_unreadable_samples_is_not_read_whole(tmp_path: Path) -> None:
    dataset = tensors(tmp_path, *([None] * 20))
    with pytest.raises(ConfigError, match="none of the first 16 samples could be read"):
        example(dataset, 2, "skip")


def test_another_error_than_that_of_unreadable_samples_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sample ids lie in"):
        example_batch(tensors(tmp_path, *WORDS), [9], micro_batch=1, seed=0, on_bad_sample="fail")


def test_stages_that_determine_the_shape_need_no_store(tmp_path: Path) -> None:
    uri = write(tmp_path, {"all/0.png": encoded(pixels(20, 24), "PNG")})
    dataset = index(uri, stages=[Decode(), Resize(18), CenterCrop(16), Normalize()])
    (tmp_path / "all" / "0.png").unlink()
    assert (example(dataset, 5).shape, example(dataset, 5).dtype) == ((5, 3, 16, 16), torch.float32)
