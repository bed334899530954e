"""Run the training loop of ``upriver train``: an ordinary loop with a checkpoint from which it resumes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from upriver.cli.options import check_module
from upriver.cli.train import checkpoint
from upriver.errors import ConfigError, FrozenChanged, StoreError, UpriverError
from upriver.program.compiled_code import uncompiled
from upriver.program.eval_mode import in_eval
from upriver.progress import note
from upriver.text import error_text

if TYPE_CHECKING:
    from upriver.finetune.job import Features, FinetuneJob
    from upriver.pipeline import Dataset


def fit_classifier(
    model: nn.Module,
    name: str | None,
    num_classes: int,
    *,
    seed: int,
    example: Callable[[], torch.Tensor],
) -> str | None:
    """Replace the model's classifier if its number of classes differs.

    Args:
        name: Name of any module. The last linear or convolutional layer in it is replaced. A module without
            such a layer is replaced as a whole, by a linear layer of its input. None takes the model's last
            linear layer.
        example: Makes an input of the model, as one sample.

    Returns:
        Name of the layer that was replaced, or None.

    Raises:
        ConfigError: If no such module exists, or the model does not give one number for each class after the
            replacement.
    """
    path = _classifier(model, name)
    old = model.get_submodule(path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        match old:
            case nn.Linear():
                given = old.out_features
                new: nn.Module = nn.Linear(old.in_features, num_classes, bias=old.bias is not None)
            case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
                given, new = old.out_channels, _convolution(old, num_classes)
            case _:
                taken, given = _features(model, path, example())
                new = nn.Linear(taken, num_classes)
        if given == num_classes:
            return None
        parent, _, last = path.rpartition(".")
        setattr(model.get_submodule(parent), last, new)
        _check_classes(model, path, num_classes, example(), must_run=not isinstance(old, nn.Linear))
    return path


def _classifier(model: nn.Module, name: str | None) -> str:
    """Return the name of the layer to replace."""
    if name is None:
        linear: list[str] = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
        if not linear:
            raise ConfigError(
                "the model has no linear layer; name its classifier's module under 'classifier'"
            )
        return linear[-1]
    check_module(model, name)
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    within = model.get_submodule(name).named_modules(prefix=name)
    layers = [path for path, module in within if isinstance(module, kinds)]
    return layers[-1] if layers else name


def _convolution(old: nn.Conv1d | nn.Conv2d | nn.Conv3d, num_classes: int) -> nn.Module:
    kind: Any = next(kind for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d) if isinstance(old, kind))
    layer: nn.Module = kind(
        old.in_channels,
        num_classes,
        old.kernel_size,
        stride=old.stride,
        padding=old.padding,
        dilation=old.dilation,
        bias=old.bias is not None,
        padding_mode=old.padding_mode,
    )
    return layer


def _features(model: nn.Module, path: str, example: torch.Tensor) -> tuple[int, int]:
    """Return the sizes of the last dimension of a module's input and output.

    Raises:
        ConfigError: If the module does not turn one tensor into another.
    """
    seen: list[tuple[Any, Any]] = []
    module = model.get_submodule(path)
    hook = module.register_forward_hook(lambda _, given, result: seen.append((given, result)))
    try:
        _called(model, example)
    except Exception as error:
        raise ConfigError(f"the model cannot run: {error_text(error)}") from error
    finally:
        hook.remove()
    match seen:
        case [*_, ((torch.Tensor() as given, *_), torch.Tensor() as result)] if given.dim() and result.dim():
            return given.shape[-1], result.shape[-1]
    raise ConfigError(
        f"classifier {path!r} ({type(module).__name__}) must turn one tensor into another, and does not in "
        "a call of the model"
    )


def _check_classes(
    model: nn.Module, path: str, num_classes: int, example: torch.Tensor, *, must_run: bool
) -> None:
    """Check that the model gives one number for each class.

    Args:
        must_run: Whether an error, or an answer that is no tensor, counts too. A model may run in training
            alone, under autocast, or answer otherwise in eval.

    Raises:
        ConfigError: If the model does not.
    """
    try:
        found = logits(_called(model, example))
        got = str(tuple(found.shape)) if isinstance(found, torch.Tensor) else ""
    except Exception as error:
        found, got = None, error_text(error) if must_run else ""
    if not got:
        if not must_run:
            return
        got = type(found).__name__
    if got != str((1, num_classes)):
        raise ConfigError(
            f"classifier must be the module whose outputs are the classes: with {path!r} replaced, the model "
            f"must give a tensor of shape (1, {num_classes}) for one sample, got {got}"
        )


def _called(model: nn.Module, example: torch.Tensor) -> Any:
    device = next(model.parameters(), example).device
    with torch.no_grad(), in_eval(model), uncompiled():
        return model(example.to(device))


def make_optimizer(name: str, model: nn.Module, *, lr: float, momentum: float, weight_decay: float) -> Any:
    """Return an optimizer of the trainable parameters."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)
    kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
    return kind(parameters, lr=lr, weight_decay=weight_decay)


def accuracy(outputs: Any, targets: torch.Tensor) -> float:
    """Return the share of correctly classified samples."""
    return float((logits(outputs).argmax(1) == targets).float().mean())


def logits(outputs: Any) -> torch.Tensor:
    """Return a classifier's logits: the output itself, or its attribute ``logits``."""
    result: torch.Tensor = getattr(outputs, "logits", outputs)
    return result


class StopSignal:
    """Turn the first Ctrl-C or SIGTERM into a stop between two steps; the second one interrupts at once."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
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
    """A run: epochs of an ordinary loop, with a checkpoint after each epoch, and on an interruption or error.

    Attributes:
        epochs: One record for each trained epoch; the last one has no ``accuracy`` before it is evaluated.
        saved: False if the last checkpoint could not be written.
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
        self.saved = True
        self._losses: list[tuple[float, int]] = []
        self._model, self._job, self._optimizer = model, job, optimizer
        self._config, self._path, self._heldout = config, checkpoint_path, heldout
        self._link_bytes, self._on_step, self._on_epoch = link_bytes, on_step, on_epoch

    def resume(self) -> bool:
        """Resume from the checkpoint, if one exists, and return whether it did.

        Raises:
            ConfigError: If the checkpoint is of a run with other settings or other data.
        """
        if not self._path.exists():
            return False
        saved = checkpoint.load(self._path, config=self._config)
        progress = saved.progress
        try:
            self._job.load_state_dict(progress.job)
        except ConfigError as error:
            raise ConfigError(f"{error}; delete {self._path} to start anew") from error
        checkpoint.restore(saved, self._model, self._optimizer)
        self.epochs, self._losses = progress.epochs, progress.losses
        self._on_step(sum(count for _, count in progress.losses))
        return True

    def run(self, epochs: int) -> None:
        """Train until ``epochs`` epochs are done.

        Raises:
            KeyboardInterrupt: If it was interrupted; the checkpoint holds everything up to the last step.
            UpriverError: If the job raises one; the checkpoint holds everything up to the last step.
            ConfigError: If more epochs are trained already.
        """
        begun = len(self.epochs) + bool(self._losses)
        if begun > epochs:
            raise ConfigError(
                f"{self._path} is in epoch {begun}, so epochs must be at least {begun}, got {epochs}; delete "
                "it to start anew"
            )
        with StopSignal() as stop:
            self._evaluate()
            while len(self.epochs) < epochs:
                self._epoch(stop)
                self._evaluate()
                if stop.requested and len(self.epochs) < epochs:
                    raise KeyboardInterrupt

    def _epoch(self, stop: StopSignal) -> None:
        """Train the rest of an epoch."""
        began, bytes_before = time.perf_counter(), self._link_bytes()
        if len(self._losses) < len(self._job):  # else the job has no step left, and would begin another epoch
            self._train(stop)
        losses, self._losses = self._losses, []
        self.epochs.append(
            {
                "epoch": len(self.epochs) + 1,
                "loss": sum(loss * count for loss, count in losses) / sum(count for _, count in losses),
                "losses": [loss for loss, _ in losses],
                "seconds": time.perf_counter() - began,
                "bytes": self._link_bytes() - bytes_before,
            }
        )

    def _train(self, stop: StopSignal) -> None:
        self._model.train()
        for inputs, targets in self._batches():
            loss = nn.functional.cross_entropy(logits(self._job(inputs)), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._losses.append((loss.item(), len(targets)))
            self._on_step(len(targets))
            if stop.requested and len(self._losses) < len(self._job):
                self._save()
                raise KeyboardInterrupt

    def _batches(self) -> Iterator[tuple[Features, torch.Tensor]]:
        """Yield the job's batches.

        If the job fails, write a checkpoint first: all yielded batches are trained.
        """
        try:
            yield from self._job
        except FrozenChanged:  # the moment of the change is unknown
            raise
        except UpriverError:
            if self._losses:
                self._save()
            raise

    def _evaluate(self) -> None:
        """Evaluate the last epoch, once. If the evaluation fails or is interrupted, no step is lost."""
        if not self.epochs or "accuracy" in self.epochs[-1]:
            return
        record = self.epochs[-1]
        if self._heldout is None:
            record["accuracy"] = None
        else:
            self._save()
            record["accuracy"] = self._job.evaluate(self._heldout, accuracy)
        self._save()
        self._on_epoch(record)

    def _save(self) -> None:
        """Write a checkpoint. If it cannot be written, the old one stays, and the next one may fit."""
        progress = checkpoint.Progress(
            config=self._config, job=self._job.state_dict(), epochs=self.epochs, losses=self._losses
        )
        try:
            checkpoint.save(self._path, self._model, self._optimizer, progress)
        except StoreError as error:
            note(f"error: {error}; no checkpoint of epoch {len(self.epochs) + bool(self._losses)}")
            self.saved = False
        else:
            self.saved = True
