"""Collect the facts that decide the low bits of an answer on this machine, in this process.

Two tiers with equal fingerprints may still differ (cache sizes choose blockings), so ``exact="bitwise"`` also
needs a canary. A tier with a different fingerprint is not even asked.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
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


def float32_precisions(fingerprint: Mapping[str, str]) -> frozenset[str]:
    """Return the precisions in which a fingerprint's device computes float32 operators.

    They are ``ieee``, or ones of fewer bits: ``bf16``, or ``tf32`` as accelerators use in convolutions unless
    told otherwise.
    """
    library = "cuda" if fingerprint.get("cuda") else "cpu"
    texts = (fingerprint.get(f"{kind}_precision", "") for kind in ("matmul", "conv", "rnn"))
    return frozenset(found for text in texts for found in re.findall(rf"{library} (\w+)", text))


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """Settings of a process that decide low bits, for another process to apply.

    Attributes:
        precisions: Precision of each kind of float32 operators, by library and kind.
    """

    threads: int
    default_dtype: torch.dtype
    deterministic: bool
    warn_only: bool
    cudnn_benchmark: bool
    mkldnn: bool
    precisions: tuple[str, ...]

    def apply(self) -> None:
        """Apply the settings to this process."""
        torch.set_num_threads(self.threads)
        torch.set_default_dtype(self.default_dtype)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        _onednn().enabled = self.mkldnn
        for kind, precision in zip(_float32_kinds(), self.precisions, strict=True):
            if kind.fp32_precision != precision:
                kind.fp32_precision = precision


def numerics() -> Numerics:
    """Return the present settings of this process."""
    return Numerics(
        threads=torch.get_num_threads(),
        default_dtype=torch.get_default_dtype(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        mkldnn=_onednn().enabled,
        precisions=tuple(kind.fp32_precision for kind in _float32_kinds()),
    )


def _onednn() -> Any:
    return torch.backends.mkldnn  # mypy does not find its kinds of operators


def _float32_kinds() -> tuple[Any, ...]:
    cudnn: Any = torch.backends.cudnn
    cuda: Any = torch.backends.cuda
    onednn = _onednn()
    return cuda.matmul, onednn.matmul, cudnn.conv, onednn.conv, cudnn.rnn, onednn.rnn


def here() -> dict[str, str]:
    """Return the flags and what a process compares only with its own earlier state.

    Tiers with different numbers of threads may have the same bits, as a canary shows.
    """
    default = str(torch.get_default_dtype()).removeprefix("torch.")
    return {**flags(), "num_threads": str(torch.get_num_threads()), "default_dtype": default}


def _precisions(cuda: Any, cpu: Any) -> str:
    """Return the precisions of one kind of operators; an unset one is the standard's."""
    return f"cuda {cuda.fp32_precision}, cpu {cpu.fp32_precision}".replace("none", "ieee")
