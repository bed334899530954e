"""The training loop of ``upriver train``: an ordinary one, with a checkpoint it can go on from."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from upriver.cli import checkpoint
from upriver.errors import ConfigError

if TYPE_CHECKING:
    from upriver.client.job import FinetuneJob
    from upriver.pipeline import Dataset


def fit_classifier(model: nn.Module, name: str | None, num_classes: int, *, seed: int) -> str | None:
    """Give the model a new last layer when its own tells another number of classes apart.

    Args:
        name: The layer; the last linear one of the model if None.

    Returns:
        Name of the layer that was replaced, or None.

    Raises:
        ConfigError: If there is no such linear layer.
    """
    linear = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    if name is None and not linear:
        raise ConfigError("the model has no linear layer; name its classifier's module under 'classifier'")
    path = name if name is not None else linear[-1]
    if path not in linear:
        raise ConfigError(
            f"classifier must be a linear layer of the model, got {path!r}; the last is {linear[-1:]}"
        )
    old = model.get_submodule(path)
    if not isinstance(old, nn.Linear) or old.out_features == num_classes:
        return None
    parent, _, last = path.rpartition(".")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        new = nn.Linear(old.in_features, num_classes, bias=old.bias is not None)
    setattr(model.get_submodule(parent), last, new)
    return path


def make_optimizer(name: str, model: nn.Module, *, lr: float, momentum: float, weight_decay: float) -> Any:
    """An optimizer over what is trainable."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)
    kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
    return kind(parameters, lr=lr, weight_decay=weight_decay)


def accuracy(outputs: Any, targets: torch.Tensor) -> float:
    """Share of samples told right."""
    return float((logits(outputs).argmax(1) == targets).float().mean())


def logits(outputs: Any) -> torch.Tensor:
    """What a classifier gives: a tensor, or an object that has it under ``logits``."""
    result: torch.Tensor = getattr(outputs, "logits", outputs)
    return result


class Stop:
    """Turns the first Ctrl-C or SIGTERM into a request that is met between two steps; the second one ends."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


class Trainer:
    """A run: epochs of an ordinary loop, a checkpoint after each and when it is interrupted.

    Attributes:
        epochs: One record for each finished epoch.
    """

    def __init__(
        self,
        model: nn.Module,
        job: FinetuneJob,
        optimizer: torch.optim.Optimizer,
        *,
        config: dict[str, Any],
        checkpoint_path: Path,
        heldout: Dataset | None,
        link_bytes: Callable[[], int],
        on_step: Callable[[int], None],
        on_epoch: Callable[[dict[str, Any]], None],
    ) -> None:
        self.epochs: list[dict[str, Any]] = []
        self._losses: list[tuple[float, int]] = []
        self._model, self._job, self._optimizer = model, job, optimizer
        self._config, self._path, self._heldout = config, checkpoint_path, heldout
        self._link_bytes, self._on_step, self._on_epoch = link_bytes, on_step, on_epoch

    def resume(self) -> bool:
        """Go on from the checkpoint, if there is one.

        Raises:
            ConfigError: If it is of a run with other settings.
        """
        if not self._path.exists():
            return False
        progress = checkpoint.load(self._path, self._model, self._optimizer, config=self._config)
        self._job.load_state_dict(progress.job)
        self.epochs, self._losses = progress.epochs, progress.losses
        self._on_step(sum(count for _, count in progress.losses))
        return True

    def run(self, epochs: int) -> None:
        """Train until that many epochs are done.

        Raises:
            KeyboardInterrupt: If it was interrupted; the checkpoint holds everything up to the last step.
        """
        with Stop() as stop:
            while len(self.epochs) < epochs:
                self._epoch(stop)
                if stop.requested and len(self.epochs) < epochs:
                    raise KeyboardInterrupt

    def _epoch(self, stop: Stop) -> None:
        began, bytes_before = time.perf_counter(), self._link_bytes()
        self._model.train()
        for inputs, targets in self._job:
            loss = nn.functional.cross_entropy(logits(self._job(inputs)), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._losses.append((loss.item(), len(targets)))
            self._on_step(len(targets))
            if stop.requested and len(self._losses) < len(self._job):
                self._save()
                raise KeyboardInterrupt
        record = {
            "epoch": len(self.epochs) + 1,
            "loss": sum(loss * count for loss, count in self._losses) / sum(n for _, n in self._losses),
            "losses": [loss for loss, _ in self._losses],
            "seconds": time.perf_counter() - began,
            "bytes": self._link_bytes() - bytes_before,
            "accuracy": self._job.evaluate(self._heldout, accuracy) if self._heldout is not None else None,
        }
        self.epochs.append(record)
        self._losses = []
        self._save()
        self._on_epoch(record)

    def _save(self) -> None:
        progress = checkpoint.Progress(
            config=self._config, job=self._job.state_dict(), epochs=self.epochs, losses=self._losses
        )
        checkpoint.save(self._path, self._model, self._optimizer, progress)
