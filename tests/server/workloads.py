"""Datasets as users have them on a worker's machine, good and bad: clients name what is here."""

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
    """A way to collate that draws by chance itself."""
    return {"rows": [sample["torch"] for sample in samples], "noise": torch.rand(3), "more": np.random.rand()}


def failing(samples: list[Any]) -> Any:
    """One that does not work."""
    raise KeyError("label")


def broken(count: int, bad: list[int]) -> Broken:
    """A dataset of which some samples cannot be made; a function, as factories are."""
    return Broken(count, set(bad))


class Names:
    """What holds another way to make a dataset."""

    @classmethod
    def plain(cls, count: int) -> Plain:
        return Plain(count)


class Unmade:
    """It cannot be made, or none of its samples."""

    def __init__(self, password: str = "", leave: bool = False, later: bool = False) -> None:
        if leave:
            sys.exit(3)
        self.password = password
        if not later:
            self[0]

    def __getitem__(self, index: int) -> Any:
        raise PermissionError(f"cannot log in with {self.password}")


class Endless:
    """Says all that it knows, from deep within."""

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
    """It has no samples by index."""


NOT_CALLABLE = 3


def _hidden() -> Plain:
    return Plain(3)


class Mute(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Odd:
    """Each sample is wrong in a way of its own."""

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
    """Kills its process at some samples, with a child of it that would live on."""

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
    """Takes its time."""

    def __init__(self, seconds: float, only: list[int] | None = None) -> None:
        self.seconds, self.only = seconds, only

    def __getitem__(self, index: int) -> int:
        if self.only is None or index in self.only:
            time.sleep(self.seconds)
        return index


class Large:
    """Samples of so many bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.nbytes,), index % 256, dtype=torch.uint8)


class Rows:
    """Samples that are rows of one large tensor, or lie askew in their memory."""

    def __init__(self, count: int) -> None:
        self.rows = torch.arange(count * 256, dtype=torch.float64).reshape(count, 256)
        self.askew = np.frombuffer(bytes(range(41)), dtype=np.float32, count=10, offset=1)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
        return self.rows[index], self.askew


class Hoard:
    """Keeps what it is given, and gives back the first that it got."""

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
    """What a dataset sees of the machine, and may do there."""

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
