"""``upriver train``: fine-tune an image classifier from a TOML file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from upriver.cli.common import DebugOption, JsonOption, emit, print_fields
from upriver.cli.config import read_toml
from upriver.cli.index import note_left_out
from upriver.cli.options import check_module, fill
from upriver.cli.serve.config_file import check_options
from upriver.cli.stages import input_stages
from upriver.errors import ConfigError, StoreError, UpriverError
from upriver.files import owned, remove_unfinished
from upriver.progress import note, progress_bar

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from upriver.cli.train.loop import Trainer
    from upriver.features.keep import Keep
    from upriver.finetune.job import FinetuneJob
    from upriver.finetune.options import MicroBatchSize
    from upriver.finetune.session import Near
    from upriver.pipeline import Dataset


class KeepTable(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The table ``keep``: the fields of `upriver.Keep`."""

    memory: int | str = "auto"
    disk: int | str = "auto"
    folder: str | None = None
    store: bool = False


class TrainFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Settings of the TOML file.

    Attributes:
        model: Name of the model, as for ``upriver cuts``.
        freeze_to: Last frozen module: it and all before it are frozen.
        store: URI or folder of the store; ``store_name`` is its name on the servers.
        path: Folder of the training samples; ``heldout`` is the folder of those to evaluate after each epoch.
        output: Safetensors file for the trained model; ``OUTPUT.checkpoint`` lies next to it until the run
            ends.
        weights: Safetensors file, index of several, or folder to start from.
        stages: Input stages, as for ``upriver index``.
        classifier: Module to replace if its number of classes differs; the last linear layer by default.
        servers: Addresses of servers; none means an embedded server.
        token_file: File with the token for the servers.
        ca: File with the authorities that vouch for servers at https://; the system's by default.
        certificate: File with the certificate for servers that ask for one; ``key`` names its key.
        on_left_out: "error" or "report" when an index would leave out files that may be samples.
        adapt_batch: Most samples that a server may run at once; with ``exact = "numeric"`` only.
        prefix: How the frozen part is made faster, within an error that the plan states.
        keep: ``auto``, ``nothing``, or a table with the fields of `upriver.Keep`: features are kept for later
            epochs and runs.
        views: Number of sets of random draws; see `upriver.Sampling`.
        micro_batch: Samples per micro-batch. ``auto`` measures and chooses once; a resumed run keeps the
            choice.
    """

    model: str
    freeze_to: str
    store: str
    output: str
    path: str = ""
    heldout: str | None = None
    weights: str | None = None
    classifier: str | None = None
    stages: str = "train"
    heldout_stages: str = "eval"
    image_size: int = 224
    epochs: int = 1
    batch_size: int = 32
    micro_batch: int | Literal["auto"] = 16
    lr: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 0.0
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    seed: int = 0
    servers: list[str] = []
    token_file: str | None = None
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    store_name: str = "default"
    store_options: dict[str, str] = {}
    policy: str = "upriver"
    replan: bool = True
    exact: Literal["auto", "bitwise", "numeric"] = "auto"
    adapt_batch: int = 0
    autocast: Literal["bfloat16", "float16"] | None = None
    prefix: Literal["compiled", "bf16", "int8"] | None = None
    keep: Literal["auto", "nothing"] | KeepTable = "auto"
    views: int | None = None
    granularity: Literal["module", "op"] = "module"
    compile_tail: bool = False
    on_bad_sample: Literal["fail", "skip"] = "fail"
    on_left_out: Literal["error", "report"] = "error"
    num_workers: int | None = None


FREE_TO_CHANGE = {
    "adapt_batch",
    "epochs",
    "exact",
    "keep",
    "output",
    "servers",
    "token_file",
    "ca",
    "certificate",
    "key",
    "store",
    "store_name",
    "store_options",
    "policy",
    "replan",
    "num_workers",
    "heldout",
    "heldout_stages",
    "on_left_out",
}
"""Settings that may differ in a resumed run: none of them changes a trained bit, except for what ``exact =
"numeric"`` leaves to servers in any case. The state of the job says whether it is bit for bit, and refuses
the other way. With another ``output`` the checkpoint must be renamed along, or it is not found."""


def train(
    config: Annotated[Path, typer.Argument(help="TOML file.")],
    on_bad_sample: Annotated[
        str | None, typer.Option(metavar="skip|fail", help="Wins over the file.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Fine-tune from a TOML file; run again after an interruption, it goes on where it stopped."""
    settings = _checked(read_toml(config, TrainFile), on_bad_sample)
    check_options(settings.store_options, config)
    output = Path(settings.output)
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"the directory of output {settings.output!r} does not exist")
    if output.exists() and not output.is_file():
        raise ConfigError(f"output must be a file, got {settings.output!r}, which is none")
    with _owned(output):
        document = _trained(settings, output)
    emit(document, as_json=as_json, text=lambda: _print(document))


def _keep(settings: TrainFile) -> Keep | Literal["auto"] | None:
    from upriver.features.keep import Keep

    keep = settings.keep
    if isinstance(keep, KeepTable):
        return Keep(**msgspec.structs.asdict(keep))
    return keep if keep == "auto" else None


def _trained(settings: TrainFile, output: Path) -> dict[str, Any]:
    """Train, write the model, and describe the run."""
    from upriver.cli.train.checkpoint import check_room, save_tensors
    from upriver.cli.train.loop import make_optimizer
    from upriver.finetune.options import Prefetch, Sampling, Splitting
    from upriver.finetune.replanner import Replanning

    keep = _keep(settings)
    dataset, heldout = _datasets(settings)
    model = _model(settings, dataset)
    with _near(settings) as near, progress_bar() as bar:
        task = bar.add_task("preparing", total=settings.epochs * len(dataset))
        job = near.finetune(
            model,
            dataset,
            batch_size=settings.batch_size,
            micro_batch=_micro_batch(settings),
            policy=settings.policy,
            exact=settings.exact,
            autocast=settings.autocast,
            prefix=settings.prefix,
            keep=keep,
            seed=settings.seed,
            sampling=Sampling(on_bad_sample=settings.on_bad_sample, views=settings.views),
            splitting=Splitting(
                granularity=settings.granularity,
                compile_tail=settings.compile_tail,
                epochs=settings.epochs,
            ),
            prefetch=Prefetch(num_workers=settings.num_workers, adapt_batch=settings.adapt_batch),
            replanning=Replanning(enabled=settings.replan),
            on_progress=note,
        )
        optimizer = make_optimizer(
            settings.optimizer,
            model,
            lr=settings.lr,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )
        check_room(_checkpoint_path(settings), output, model, optimizer)
        bar.update(task, description="training")
        trainer = _trainer(
            settings,
            model,
            job,
            optimizer,
            heldout,
            link_bytes=lambda: near.meter.total_bytes,
            on_step=lambda count: bar.advance(task, count),
        )
        resumed = trainer.resume()
        if resumed:
            note(f"going on after epoch {len(trainer.epochs)}, from {_checkpoint_path(settings)}")
            bar.advance(task, len(trainer.epochs) * len(dataset))
        try:
            trainer.run(settings.epochs)
            save_tensors(output, model.state_dict())
        except KeyboardInterrupt:
            note(_interrupted(_checkpoint_path(settings), saved=trainer.saved))
            raise
        except UpriverError:
            if _checkpoint_path(settings).exists():
                which = "what was trained" if trainer.saved else "an earlier state"
                note(f"{which} is in the checkpoint {_checkpoint_path(settings)}")
            raise
        document = _document(settings, job, trainer, resumed=resumed)
    with suppress(FileNotFoundError):
        os.unlink(_checkpoint_path(settings))
    return document


@contextmanager
def _owned(output: Path) -> Iterator[None]:
    """Lock the output and its checkpoint until the run ends, and remove unfinished files of killed runs.

    Raises:
        ConfigError: If another run holds them; the message names it.
        StoreError: If the lock cannot be taken.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(owned(output))
        except OSError as error:
            raise StoreError(f"cannot lock output {output}: {error.strerror or error}") from error
        for path in (output, _checkpoint_of(output)):
            remove_unfinished(path)
        yield


def _checked(settings: TrainFile, on_bad_sample: str | None) -> TrainFile:
    """Check values that need neither model nor data; the job checks the rest."""
    if on_bad_sample is not None:
        if on_bad_sample not in ("skip", "fail"):
            raise ConfigError(f"--on-bad-sample must be skip or fail, got {on_bad_sample!r}")
        settings = msgspec.structs.replace(settings, on_bad_sample=on_bad_sample)
    for name in ("epochs", "batch_size", "micro_batch", "image_size"):
        value = getattr(settings, name)
        if value != "auto" and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    for name in ("lr", "momentum", "weight_decay"):
        if not 0 <= getattr(settings, name) < float("inf"):
            raise ConfigError(f"{name} must be a finite number >= 0, got {getattr(settings, name)}")
    return settings


def _datasets(settings: TrainFile) -> tuple[Dataset, Dataset | None]:
    """Return training and held-out samples, indexed in their store."""
    from upriver.pipeline import index
    from upriver.store import Store

    store = Store.open(settings.store, name=settings.store_name, options=settings.store_options or None)
    chain = input_stages(settings.stages, size=settings.image_size)
    with progress_bar(of_bytes=True) as bar:
        task = bar.add_task("indexing", total=None)
        dataset = index(
            store,
            settings.path,
            stages=chain.stages,
            on_left_out=settings.on_left_out,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    note_left_out(dataset.left_out)
    if settings.heldout is None:
        return dataset, None
    held_chain = input_stages(settings.heldout_stages, size=settings.image_size)
    heldout = index(store, settings.heldout, stages=held_chain.stages, on_left_out=settings.on_left_out)
    note_left_out(heldout.left_out)
    try:
        heldout.targets_among(dataset)
    except ConfigError as exc:
        raise ConfigError(
            f"heldout {settings.heldout!r} has other classes than the training samples: {exc}"
        ) from None
    return dataset, heldout


def _model(settings: TrainFile, dataset: Dataset) -> nn.Module:
    import torch

    from upriver.cli.train.loop import fit_classifier
    from upriver.finetune.calibration.example_batch import example_batch
    from upriver.program.freeze import freeze_to
    from upriver.program.models.registry import load_model

    torch.manual_seed(settings.seed)
    weights = Path(settings.weights) if settings.weights is not None else None
    model, _ = load_model(settings.model, seed=settings.seed)
    fill(model, weights)
    if weights is None:
        note(f"{settings.model} starts from random weights; name a safetensors file under 'weights'")
    num_classes = len(dataset.classes)
    replaced = fit_classifier(
        model,
        settings.classifier,
        num_classes,
        seed=settings.seed,
        example=lambda: example_batch(
            dataset, range(len(dataset)), micro_batch=1, seed=0, on_bad_sample=settings.on_bad_sample
        ),
    )
    if replaced is not None:
        note(f"{replaced} is new, for {num_classes} classes")
    check_module(model, settings.freeze_to)
    freeze_to(model, settings.freeze_to)
    return model


def _trainer(
    settings: TrainFile,
    model: nn.Module,
    job: FinetuneJob,
    optimizer: Optimizer,
    heldout: Dataset | None,
    *,
    link_bytes: Callable[[], int],
    on_step: Callable[[int], None],
) -> Trainer:
    from upriver.cli.train.loop import Trainer

    fixed = {k: v for k, v in msgspec.structs.asdict(settings).items() if k not in FREE_TO_CHANGE}
    return Trainer(
        model,
        job,
        optimizer,
        config=fixed,
        checkpoint_path=_checkpoint_path(settings),
        heldout=heldout,
        link_bytes=link_bytes,
        on_step=on_step,
        on_epoch=_tell,
    )


def _checkpoint_path(settings: TrainFile) -> Path:
    return _checkpoint_of(Path(settings.output))


def _checkpoint_of(output: Path) -> Path:
    return Path(f"{output}.checkpoint")


def _micro_batch(settings: TrainFile) -> MicroBatchSize:
    """Return the micro-batch size; a resumed run with ``auto`` takes the earlier choice."""
    from upriver.cli.train.checkpoint import job_state

    path = _checkpoint_path(settings)
    if settings.micro_batch != "auto" or not path.exists():
        return settings.micro_batch
    chosen = job_state(path).get("micro_batch")
    if type(chosen) is not int:
        raise ConfigError(f"{path} does not say which micro_batch was chosen; delete it to start anew")
    return chosen


def _interrupted(checkpoint: Path, *, saved: bool) -> str:
    if not checkpoint.exists():
        return "interrupted before the first checkpoint was written; the same command begins anew"
    which = "" if saved else ", which is of an earlier state"
    return f"interrupted; the same command goes on from the checkpoint {checkpoint}{which}"


def _near(settings: TrainFile) -> Near:
    """Connect to the servers with their token and certificates."""
    from upriver.cli.serve.options import read_token
    from upriver.finetune.session import connect

    return connect(
        *settings.servers,
        token=read_token(Path(settings.token_file) if settings.token_file is not None else None),
        ca=settings.ca,
        certificate=settings.certificate,
        key=settings.key,
    )


def _tell(record: dict[str, Any]) -> None:
    held = "" if record["accuracy"] is None else f", accuracy {record['accuracy']:.1%}"
    note(f"epoch {record['epoch']}: loss {record['loss']:.4f}{held}, {record['seconds']:.1f} s")


def _document(settings: TrainFile, job: FinetuneJob, trainer: Trainer, *, resumed: bool) -> dict[str, Any]:
    plan, report = job.plan, job.report
    names = {row.cut: row.name for row in plan.table}
    output = Path(settings.output)
    return {
        "epochs": trainer.epochs,
        "micro_batch": job.state_dict()["micro_batch"],
        "plan": {
            "policy": plan.policy,
            "cut": plan.cut,
            "after": names.get(plan.cut, "as stored"),
            "shares": {str(route.cut): route.share for route in plan.routes},
            "switches": len(job.switches),
            "why": plan.why,
            "table": str(plan),
        },
        "samples": dict(report.samples),
        "retried": report.retried,
        "skipped": list(report.skipped),
        "unsplit_because": job.why_unsplit,
        "resumed": resumed,
        "output": settings.output,
        "output_sha256": hashlib.sha256(output.read_bytes()).hexdigest(),
    }


def _print(document: dict[str, Any]) -> None:
    print(f"{document['plan']['table']}\n")
    for record in document["epochs"]:
        held = "" if record["accuracy"] is None else f"  accuracy {record['accuracy']:.1%}"
        print(
            f"epoch {record['epoch']}  loss {record['loss']:.4f}{held}  {record['seconds']:.1f} s  "
            f"{record['bytes'] / 1e6:.1f} MB"
        )
    print_fields(
        {
            "samples from": ", ".join(f"{source}: {count}" for source, count in document["samples"].items()),
            "skipped": len(document["skipped"]),
            "written to": document["output"],
        }
    )
