"""Collect the facts that decide the low bits of an answer on this machine, in this process.

Two tiers with equal fingerprints may still differ (cache sizes choose blockings), so ``exact="bitwise"`` also
needs a canary. A tier with a different fingerprint is not even asked.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from PIL import features

from upriver.engine.environment import ENVIRONMENT


def fingerprint(device: str | torch.device = "cpu") -> dict[str, str]:
    """Return versions, instruction set, accelerator and flags as text; exactness needs equal ones.

    Args:
        device: Device of the model stages.
    """
    return {
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        **_image_libraries(),
        **_math_libraries(),
        **_cpu(),
        **_accelerator(torch.device(device)),
        **flags(),
        **{name.lower(): os.environ.get(name, "") for name in ENVIRONMENT},
    }


def _image_libraries() -> dict[str, str]:
    turbo = features.version_feature("libjpeg_turbo")
    return {
        "pillow": PIL.__version__,
        "libjpeg": f"turbo {turbo}" if turbo else str(features.version_codec("jpg")),
    }


def _math_libraries() -> dict[str, str]:
    build = torch.__config__.show()
    onednn = re.search(r"(?:MKL-DNN|oneDNN) v([\w.]+)", build)
    mkl = re.search(r"Math Kernel Library Version ([\w. -]+?) (?:Product|for)", build)
    return {
        "onednn": onednn.group(1) if onednn and torch.backends.mkldnn.enabled else "",
        "mkl": mkl.group(1) if mkl else "",
    }


def _cpu() -> dict[str, str]:
    return {
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_flags": _cpu_flags_digest(),
    }


def _cpu_flags_digest(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return a digest of all CPU flags: oneDNN uses more instruction sets than PyTorch's capability shows."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    flags = " ".join(sorted(found.partition(":")[2].split()))
    return hashlib.sha256(flags.encode()).hexdigest()[:16] if flags else ""


def _accelerator(device: torch.device) -> dict[str, str]:
    if device.type != "cuda":
        return {"accelerator": "" if device.type == "cpu" else device.type, "cuda": "", "cudnn": ""}
    return {
        "accelerator": torch.cuda.get_device_name(device),
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
    }


def flags() -> dict[str, str]:
    """Return the flags that may change while a process runs; takes some microseconds, for frequent checks."""
    cudnn: Any = torch.backends.cudnn  # mypy does not find its kinds of operators
    onednn: Any = torch.backends.mkldnn
    # The fused fast path of attention is left out: frozen stages always run with it off.
    return {
        # The older names raise where a precision was set by these.
        "matmul_precision": _precisions(torch.backends.cuda.matmul, onednn.matmul),
        "conv_precision": _precisions(cudnn.conv, onednn.conv),
        "rnn_precision": _precisions(cudnn.rnn, onednn.rnn),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "cudnn_benchmark": str(torch.backends.cudnn.benchmark),
        "mkldnn": str(torch.backends.mkldnn.enabled),
    }


def here() -> dict[str, str]:
    """Return the flags and what a process compares only with its own earlier state.

    Tiers with different numbers of threads may have the same bits, as a canary shows.
    """
    default = str(torch.get_default_dtype()).removeprefix("torch.")
    return {**flags(), "num_threads": str(torch.get_num_threads()), "default_dtype": default}


def _precisions(cuda: Any, cpu: Any) -> str:
    """Return the precisions of one kind of operators; an unset one is the standard's."""
    return f"cuda {cuda.fp32_precision}, cpu {cpu.fp32_precision}".replace("none", "ieee")
