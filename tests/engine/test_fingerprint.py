import json
import os
import subprocess
import sys

import pytest
import torch

from upriver.engine.fingerprint import fingerprint, float32_precisions


def in_another_process(**environment):
    code = "import json; from upriver.engine.fingerprint import fingerprint; print(json.dumps(fingerprint()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        check=True,
        text=True,
    )
    return json.loads(done.stdout)


@pytest.mark.full
def test_equal_in_another_process_and_named_in_text():
    here = fingerprint()
    assert here == in_another_process()
    assert here["torch"] == torch.__version__
    assert all(type(value) is str for value in here.values())


@pytest.mark.full
@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({"ONEDNN_MAX_CPU_ISA": "AVX2"}, marks=pytest.mark.full),
        {"ATEN_CPU_CAPABILITY": "default"},
        pytest.param({"NPY_DISABLE_CPU_FEATURES": "FMA3"}, marks=pytest.mark.full),
    ],
)
def test_a_choice_of_kernels_shows(environment):
    assert fingerprint() != in_another_process(**environment)


def test_a_flag_shows():
    before = fingerprint()
    try:
        torch.set_float32_matmul_precision("high")
        assert fingerprint() != before
    finally:
        torch.set_float32_matmul_precision("highest")


def test_precisions_are_those_of_the_fingerprints_own_device():
    here = fingerprint()
    assert float32_precisions(here) == {"ieee"}
    assert float32_precisions({**here, "cuda": "13.0"}) == {"ieee", "tf32"}, "an accelerator's default"
    coarse = {"matmul_precision": "cuda ieee, cpu bf16", "conv_precision": "cuda tf32, cpu ieee"}
    assert float32_precisions(coarse) == {"bf16", "ieee"}
    assert float32_precisions({**coarse, "cuda": "13.0"}) == {"tf32", "ieee"}
    assert float32_precisions({}) == frozenset()
