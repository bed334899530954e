"""Cache measurements of input pipelines between runs: ``upriver.metrics-store/1``.

Um, Oh, Seo, Kweun, Kim, Lee, "FastFlow: Accelerating Deep Learning Model Training with Smart Offloading of
Input Data Pipeline", PVLDB 16(5), 2023, section 5.2, Table 2: a job that was measured before need not be
measured again, and a job that shares its model with another knows a part.

    M                        Gthp
    (P, M)                   Lthp, Pcycle, and the seconds at Lthp
    (P, M, RemoteNodeInfo)   Rthp, P', Ocycle

Departures
    - Local resources and versions belong to every key. The paper also reloads "with the same resources".
    - Gthp also depends on the form of a sample, where given. A PyTorch module accepts inputs of many forms.
      The same rate is four times the MB/s where a pipeline ends in floats instead of bytes.
    - A candidate's measurement is found again whatever other candidates exist.

Each measurement is one small file, named by the digest of its key and written whole. No process reads before
it writes. So jobs that save at once lose none of each other's figures; of the same figure the last one stays.
A lost file costs the seconds of a new measurement, so no problem with a file is an error.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
import torch
from torch import distributed, nn

import upriver
from upriver.cache import Cache
from upriver.errors import ConfigError
from upriver.profile.throughput import MAX_CANDIDATES, MAX_NAME, MOST, Candidate
from upriver.resources import available_cpus
from upriver.text import error_text, printable
from upriver.types import require_finite

STORE_SCHEMA: Final = "upriver.metrics-store/1"

_PLAIN = ("gthp", "lthp", "pcycle", "pseconds")
_OF_CANDIDATE = ("rthp", "ocycle")
_MAY_BE_0 = frozenset(_OF_CANDIDATE)


# ------------------------------------------------------------------------------- what figures depend on


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalResources:
    """Resources of a training process.

    Attributes:
        cpus: CPUs that it can keep busy.
        num_workers: Loader processes.
        threads: Threads of PyTorch.
        device: Name of the CUDA device that trains, else the type of device, such as ``cpu``.
        machine: Architecture and instruction set.
        ranks: Processes that train together.
    """

    cpus: int
    num_workers: int
    threads: int
    device: str
    machine: str
    ranks: int = 1

    def __post_init__(self) -> None:
        for field, least in (("cpus", 1), ("num_workers", 0), ("threads", 1), ("ranks", 1)):
            _require_whole(field, getattr(self, field), least)
        for field in ("device", "machine"):
            _require_text(field, getattr(self, field))

    @classmethod
    def here(cls, num_workers: int, device: str | torch.device | None = None) -> LocalResources:
        """Return the resources of this process.

        Args:
            device: Device that trains. If None, the current CUDA device where CUDA is already in use, since
                this query must not initialize CUDA.
        """
        together = distributed.is_available() and distributed.is_initialized()
        return cls(
            cpus=available_cpus(),
            num_workers=num_workers,
            threads=torch.get_num_threads(),
            device=_device_name(device),
            machine=f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            ranks=distributed.get_world_size() if together else 1,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteWorker:
    """One worker, with the facts that it has reported.

    Attributes:
        address: Its URL, or another name where the URL changes from run to run.
        cpus: CPUs that it can keep busy.
        processes: Processes that make samples.
    """

    address: str
    cpus: int | None = None
    processes: int | None = None

    def __post_init__(self) -> None:
        _require_text("address", self.address, most=None)
        for field in ("cpus", "processes"):
            if getattr(self, field) is not None:
                _require_whole(field, getattr(self, field), 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteResources:
    """Workers that may make samples, and the parts of the work that they may do.

    Attributes:
        candidates: Names of what could be offloaded; each is stored and looked up separately.
    """

    workers: tuple[RemoteWorker, ...]
    candidates: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.workers:
            raise ConfigError("there must be a worker among the remote resources, got none")
        _require_names(self.candidates)

    @property
    def facts(self) -> list[Any]:
        """The workers as JSON, independent of their order."""
        return sorted(([each.address, each.cpus, each.processes] for each in self.workers), key=json.dumps)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreKey:
    """Everything that the figures of a job depend on.

    Attributes:
        model: Key by `model_key`.
        pipeline: Key by `pipeline_key`.
        batch_size: Samples of a batch; None where samples come one by one.
        remote: Remote resources; None where no worker makes samples, and then there are no candidates.
        sample: Key by `sample_key`. If empty, Gthp is that of the model for all samples (Table 2).
    """

    model: str
    pipeline: str
    batch_size: int | None
    local: LocalResources
    remote: RemoteResources | None = None
    sample: str = ""

    def __post_init__(self) -> None:
        _require_text("model", self.model, most=None)
        _require_text("pipeline", self.pipeline, most=None)
        if self.batch_size is not None:
            _require_whole("batch_size", self.batch_size, 1)

    def plain(self, figure: str) -> str:
        """Return the digest that names Gthp, Lthp or Pcycle."""
        return self._digest(figure, self.sample if figure == "gthp" else self.pipeline)

    def candidates(self) -> dict[str, str]:
        """Return the digest of each candidate's measurement, by the candidate's name."""
        if self.remote is None:
            return {}
        workers = self.remote.facts
        return {
            name: self._digest("candidate", self.pipeline, workers, name) for name in self.remote.candidates
        }

    def _digest(self, table: str, *own: Any) -> str:
        versions = [upriver.__version__, str(torch.__version__)]
        local = asdict(self.local)
        return _digest_of([STORE_SCHEMA, versions, table, self.model, self.batch_size, local, *own])


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownThroughput:
    """Known figures of a job; units as in `upriver.profile.throughput.Metrics`.

    Attributes:
        pcycle: CPU seconds per batch at ``lthp``.
        pseconds: Seconds per batch at ``lthp``.
        candidates: Measured candidates, with `Candidate.ocycle` in CPU seconds per batch.
    """

    gthp: float | None = None
    lthp: float | None = None
    pcycle: float | None = None
    pseconds: float | None = None
    candidates: tuple[Candidate, ...] = ()

    def __post_init__(self) -> None:
        for field in _PLAIN:
            if getattr(self, field) is not None:
                require_finite(field, getattr(self, field), positive=True, at_most=MOST)
        _require_names([candidate.name for candidate in self.candidates])

    def beyond(self, before: KnownThroughput) -> KnownThroughput:
        """Return the figures that are new or different from ``before``.

        A job that saves only these does not date figures that it loaded as if measured today.
        """
        plain = {name: getattr(self, name) for name in _PLAIN}
        new = {name: value for name, value in plain.items() if value != getattr(before, name)}
        candidates = tuple(each for each in self.candidates if each not in before.candidates)
        return KnownThroughput(**new, candidates=candidates)


# --------------------------------------------------------------------------------------------- the keys


def model_key(model: str | nn.Module) -> str:
    """Return the key of a model: its given name, or its architecture, never its learned values.

    The architecture is the class and name of each module, the settings that PyTorch's own modules print (a
    stride is in no shape), and the name, shape, type and ``requires_grad`` of each parameter. So a compiled,
    wrapped or partly frozen model is another one: it trains at another speed.

    Raises:
        ConfigError: If ``model`` is neither, or the name is empty or longer than 200 characters.
    """
    if isinstance(model, nn.Module):
        return f"module:{_digest_of(list(_architecture(model)))}"
    _require_text("model", model)
    return f"name:{model}"


def pipeline_key(
    name: str, arguments: Mapping[str, Any], collate_name: str | None = None, *, code: object = None
) -> str:
    """Return the key of an input pipeline.

    Args:
        name: Callable that makes the dataset, ``package.module:callable``.
        arguments: Its keyword arguments, which must fit JSON.
        collate_name: Name of the function that makes a batch of samples; None where it has none.
        code: The dataset's class or function. If given, a change of its file makes another pipeline.

    Raises:
        ConfigError: If the name is empty, or an argument does not fit JSON.
    """
    _require_text("name", name, most=None)
    try:
        facts = json.dumps(dict(arguments), sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the arguments of {name} must be what JSON can say: {error}") from None
    return _digest_of([name, facts, collate_name, _source_digest(code)])


def sample_key(sample: Any) -> str:
    """Return the key of a sample's or batch's form: shapes and types of tensors and arrays, no values."""
    return _digest_of(_form(sample))


def _architecture(model: nn.Module) -> Iterator[list[Any]]:
    for name, module in model.named_modules(remove_duplicate=False):
        kind = type(module)
        # A user's module may print anything; containers print the device of a parameter.
        tells = kind.__module__.startswith("torch.nn.") and not kind.__module__.endswith(".container")
        yield [name, kind.__module__, kind.__qualname__, module.extra_repr() if tells else ""]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shape = None if nn.parameter.is_lazy(parameter) else list(parameter.shape)
        yield [name, shape, str(parameter.dtype), parameter.requires_grad]


def _form(value: Any) -> Any:
    match value:
        case torch.Tensor() | np.ndarray():
            return [list(value.shape), str(value.dtype)]
        case Mapping():
            return {str(name): _form(item) for name, item in value.items()}
        case Sequence() if not isinstance(value, str | bytes):
            return [type(value).__name__, *map(_form, value)]
    return type(value).__name__


def _source_digest(code: Any) -> str:
    """Return the digest of the source file of a class or function; empty where it cannot be read."""
    try:
        file = inspect.getsourcefile(code) if code is not None else None
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file is not None else ""
    except (TypeError, OSError):  # built in, or made at run time
        return ""


def _device_name(device: str | torch.device | None) -> str:
    if device is None:
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = "cuda" if in_use else "cpu"
    try:
        found = torch.device(device)
        return torch.cuda.get_device_name(found) if found.type == "cuda" else found.type
    except (RuntimeError, TypeError, AssertionError) as error:  # AssertionError where there is no CUDA
        given = printable(repr(device), 80)
        raise ConfigError(
            f"device must be one that PyTorch has here, got {given}: {error_text(error)}"
        ) from None


def _digest_of(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


# -------------------------------------------------------------------------------------------- the store


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    schema: Literal["upriver.metrics-store/1"]
    key: str
    saved: float  # seconds since 1970
    figures: dict[str, float]


class MetricsStore:
    """Store figures of jobs in a folder that all jobs share.

    A problem with the folder or a file is logged once, and never raised.

    Args:
        folder: Folder of the files; if None, ``metrics`` in ``$UPRIVER_CACHE`` or the user's cache folder. In
            ``/dev/null`` nothing is stored, and nothing is logged.

    Raises:
        ConfigError: If the folder is not a path.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        if folder is not None and not _is_path(folder):
            raise ConfigError(f"folder must be a path or None, got {printable(repr(folder), 80)}")
        self._cache = Cache("metrics" if folder is None else _absolute(folder))

    def load(self, key: StoreKey, *, max_age_s: float | None = None) -> KnownThroughput:
        """Return the known figures of a job, with candidates in the order of the key.

        Args:
            max_age_s: Largest age in seconds; any age if None.
        """
        if max_age_s is not None:
            require_finite("max_age_s", max_age_s)
        oldest_s = math.inf if max_age_s is None else max_age_s
        plain = {name: self._figures(key.plain(name), (name,), oldest_s).get(name) for name in _PLAIN}
        found = {
            name: self._figures(digest, _OF_CANDIDATE, oldest_s) for name, digest in key.candidates().items()
        }
        candidates = tuple(Candidate(name=name, **figures) for name, figures in found.items() if figures)
        return KnownThroughput(**plain, candidates=candidates)

    def save(self, key: StoreKey, known: KnownThroughput) -> None:
        """Save a job's figures as of now. Unknown figures keep their stored values.

        Raises:
            ConfigError: If a candidate is not in the key.
        """
        candidates = key.candidates()
        plain = {name: getattr(known, name) for name in _PLAIN}
        files = {key.plain(name): {name: value} for name, value in plain.items() if value is not None}
        for each in known.candidates:
            if each.name not in candidates:
                allowed = ", ".join(candidates) or "there are none"
                raise ConfigError(f"{each.name!r} is no candidate of the key ({allowed})")
            files[candidates[each.name]] = {"rthp": each.rthp, "ocycle": each.ocycle}
        for digest, figures in files.items():
            text = msgspec.json.encode(
                _File(schema=STORE_SCHEMA, key=digest, saved=time.time(), figures=figures)
            )
            self._cache.save(digest, text.decode() + "\n")

    def _figures(self, digest: str, names: Sequence[str], oldest_s: float) -> dict[str, float]:
        """Return the figures of a file; empty where it is missing, too old or unusable."""
        found = self._cache.load(digest, lambda data: _checked(data, digest, names))
        # A negative age means that a clock was set back; it is no better known than a positive age.
        return found.figures if found is not None and abs(time.time() - found.saved) <= oldest_s else {}


def _absolute(folder: str | os.PathLike[str]) -> Path:
    try:
        return Path(folder).absolute()
    except OSError:  # the current folder is gone
        return Path(os.devnull)


def _checked(data: bytes, digest: str, names: Sequence[str]) -> _File:
    """Return the content of a file after checking it against the file's name."""
    found = msgspec.json.decode(data, type=_File)
    if found.key != digest:
        raise ConfigError("its key is not that of its name")
    if sorted(found.figures) != sorted(names):
        raise ConfigError(f"its figures must be {', '.join(names)}, got {', '.join(found.figures) or 'none'}")
    for name, value in found.figures.items():
        require_finite(name, value, positive=name not in _MAY_BE_0, at_most=MOST)
    return found


# ------------------------------------------------------------------------------------------- checking


def _is_path(value: object) -> bool:
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    return isinstance(text, str) and text != "" and "\0" not in text


def _require_whole(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise ConfigError(f"{name} must be a whole number >= {least}, got {printable(repr(value), 40)}")


def _require_text(name: str, value: object, *, most: int | None = MAX_NAME) -> None:
    if not isinstance(value, str) or not value or (most is not None and len(value) > most):
        allowed = "1 character or more" if most is None else f"1 to {most} characters"
        raise ConfigError(f"{name} must be a string of {allowed}, got {printable(repr(value), 80)}")


def _require_names(names: Sequence[str]) -> None:
    if len(names) > MAX_CANDIDATES:
        raise ConfigError(f"there are at most {MAX_CANDIDATES} candidates, got {len(names)}")
    for name in names:
        _require_text("a candidate's name", name)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"candidates must have names of their own, got {twice[0]!r} twice")
