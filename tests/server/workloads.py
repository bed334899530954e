"""Provide datasets as users have them on a worker's machine, good and bad; clients name them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import run
from typing import Any

import numpy as np
import torch

from tests.dataloader.toy_datasets import Broken, Divided, Noisy, Plain

__all__ = ["Divided", "Noisy", "Plain", "run"]

NAME = __name__


def drawing(samples: list[Any]) -> dict[str, Any]:
    """Collate with random draws of its own."""
    return {"rows": [sample["torch"] for sample in samples], "noise": torch.rand(3), "more": np.random.rand()}


def failing(samples: list[Any]) -> Any:
    """Raise instead of collating."""
    raise KeyError("label")


def broken(count: int, bad: list[int]) -> Broken:
    """Make a dataset in which some samples fail; a function, as factories are."""
    return Broken(count, set(bad))


class Names:
    """Namespace with another factory of datasets."""

    @classmethod
    def plain(cls, count: int) -> Plain:
        return Plain(count)


class Unmade:
    """Dataset that fails at its construction, or at each sample."""

    def __init__(self, password: str = "", leave: bool = False, later: bool = False) -> None:
        if leave:
            sys.exit(3)
        self.password = password
        if not later:
            self[0]

    def __getitem__(self, index: int) -> Any:
        raise PermissionError(f"cannot log in with {self.password}")


class Endless:
    """Dataset whose error holds a variable and a long text, raised from a deep stack."""

    def __init__(self, variable: str, chars: int = 0) -> None:
        self.variable, self.chars = variable, chars

    def __getitem__(self, index: int) -> Any:
        self._down(40)

    def _down(self, depth: int) -> None:
        try:
            if depth:
                self._down(depth - 1)
        finally:
            if depth == 0:
                raise ValueError(f"{os.environ[self.variable]}\n" + "x" * self.chars)


class Nothing:
    """Object without samples by index."""


NOT_CALLABLE = 3


def _hidden() -> Plain:
    return Plain(3)


class Mute(Exception):
    """Error whose `str` fails."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Odd:
    """Dataset in which each sample is wrong in its own way."""

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        match index:
            case 0:
                return {"image": Image.new("RGB", (2, 2)), "label": 1}
            case 1:
                raise ValueError("one\ntwo" + "x" * 5000)
            case 2:
                raise Mute
            case 3:
                return "\udcff"
            case 4:
                sys.exit(1)
            case 5:
                raise MemoryError
            case 6:
                return [torch.ones(1) for _ in range(2000)]
            case 7:
                return "x" * (2 << 20)
        return index


class Killer:
    """Dataset that kills its process at some samples, and leaves a child that would live on."""

    def __init__(self, bad: list[int], note: str = "") -> None:
        self.bad, self.note = bad, note

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            if self.note:
                child = subprocess.Popen(["sleep", "3600"])
                Path(self.note).write_text(str(child.pid))
            os._exit(7)
        return index


class Slow:
    """Dataset with slow samples."""

    def __init__(self, seconds: float, only: list[int] | None = None) -> None:
        self.seconds, self.only = seconds, only

    def __getitem__(self, index: int) -> int:
        if self.only is None or index in self.only:
            time.sleep(self.seconds)
        return index


class Large:
    """Dataset with samples of ``nbytes`` bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.nbytes,), index % 256, dtype=torch.uint8)


class Rows:
    """Dataset whose samples are rows of one large tensor, with an unaligned array."""

    def __init__(self, count: int) -> None:
        self.rows = torch.arange(count * 256, dtype=torch.float64).reshape(count, 256)
        self.askew = np.frombuffer(bytes(range(41)), dtype=np.float32, count=10, offset=1)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
        return self.rows[index], self.askew


class Hoard:
    """Dataset that keeps its first raw sample, and returns it for every index."""

    def __init__(self) -> None:
        self.first: Any = None

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.read(index))

    def read(self, index: int) -> Any:
        return {"tensor": torch.full((50_000,), index), "array": np.full(5, index), "bytes": bytes([index])}

    def transform(self, raw: Any) -> Any:
        self.first = raw if self.first is None else self.first
        return self.first, raw["bytes"]


class Surroundings:
    """Dataset that writes a file, starts a child, and reports the worker's environment."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import resource

        (self.folder / "written").write_bytes(b"x" * 4096)
        with subprocess.Popen(["sleep", "3600"]) as child:
            child.send_signal(signal.SIGTERM)
        return {
            "environment": dict(os.environ),
            "working directory": os.getcwd(),
            "network": os.readlink("/proc/self/ns/net"),
            "threads": torch.get_num_threads(),
            "files": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
            "child": child.returncode,
            "gradients": torch.is_grad_enabled(),
            "pid": os.getpid(),
        }
