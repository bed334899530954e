"""Run the user's own code in a worker: datasets, and the samples and batches that they make.

No code comes from a client: it is installed here, and the operator has allowed it by name. If it raises, the
client gets one line and the last lines of a traceback, and the log gets the traceback. If it crashes, one
worker dies.
"""

from __future__ import annotations

import importlib
import os
import re
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import torch
from torch.utils.data import default_collate

from upriver.errors import CodeFailed, TooLarge, UpriverError
from upriver.pipeline.mapstyle import MapStyle
from upriver.protocol import BY_DEFAULT, TRACE_CHARS
from upriver.protocol.tree import flatten
from upriver.server.code_allowlist import check_found, look_up, qualname
from upriver.server.execution.worker_output import STDERR
from upriver.server.ipc.messages import RunCode
from upriver.server.observability import logging
from upriver.text import error_text, last_lines, said
from upriver.types import DONE, MicroBatch

MAX_DATASETS = 8
"""Datasets kept in each worker, evicted by least recent use: training and held-out data of some jobs."""

SAID_CHARS = 500
"""Characters of an exception's message in the one line: about five lines of a terminal."""

MOST_LINE_CHARS = 1000
"""Characters of a traceback's line that are searched for secrets: three times what the client gets."""

LEAST_SECRET_CHARS = 4
"""Least length of a secret argument. A shorter one protects nothing, and occurs in many words."""

_MAY_BE_SECRET = re.compile(r"(?i)key|token|secret|passw|credential|auth|private|cookie|session")
_LEAST_SECRET_VALUE_CHARS = 8
"""Same for environment variables, whose names tell less: many values are ``true`` or a number."""


class UserCode:
    """Make samples with code that is installed here."""

    def __init__(self, allow: Sequence[str]) -> None:
        self._allow = allow
        self._callables: dict[str, Callable[..., Any]] = {}
        self._datasets: OrderedDict[tuple[str, bytes], Any] = OrderedDict()

    def make(self, run: RunCode, raws: Sequence[Any] | None) -> Any:
        """Return a job's batch, or a list of its samples. Sets the generators of this process.

        Args:
            raws: The stored value of each sample, if the client sent it along.

        Raises:
            CodeFailed: If the code is not installed here, or raises.
            Forbidden: If a name leads to code that is not allowed.
        """
        source = MapStyle(self._dataset(run), run.seed)
        collate = self._collate(run) if run.collate else None
        given = run.ids if raws is None else raws
        samples = [_sample(source, run, sample, value) for sample, value in zip(run.ids, given, strict=True)]
        if collate is None:
            return samples
        with _told(f"{run.name}, {_of_batch(run)}", run):
            return source.join(samples, collate, epoch=run.epoch, batch=run.batch)

    def _dataset(self, run: RunCode) -> Any:
        key = (run.name, run.arguments)
        if key not in self._datasets:
            while len(self._datasets) >= MAX_DATASETS:
                self._datasets.popitem(last=False)
            self._datasets[key] = self._made(run)
        self._datasets.move_to_end(key)
        return self._datasets[key]

    def _made(self, run: RunCode) -> Any:
        make = self._found(run.name, run)
        with _told(f"{run.name} cannot be made", run):
            dataset = make(**msgspec.json.decode(run.arguments))
            MapStyle(dataset)  # raises if it has no samples by index
        return dataset

    def _collate(self, run: RunCode) -> Callable[[list[Any]], Any]:
        return default_collate if run.collate == BY_DEFAULT else self._found(run.collate, run)

    def _found(self, name: str, run: RunCode) -> Callable[..., Any]:
        if name in self._callables:
            return self._callables[name]
        module, _, path = name.partition(":")
        with _told(f"{module} cannot be imported", run):
            imported = importlib.import_module(module)
        with _told(f"there is no {name} here", run):
            steps = look_up(imported, name, self._allow)
        whole = len(steps) == len(path.split("."))  # and no step leads through an object
        if whole and not callable(steps[-1]):
            raise CodeFailed(f"{name} must be callable, got {qualname(type(steps[-1]))}")
        check_found(name, steps, self._allow)
        self._callables[name] = steps[-1]
        return self._callables[name]


def take_apart(run: RunCode, made: Any, *, most_tensors: int) -> MicroBatch:
    """Return a batch, or a list of samples, in the form that is sent.

    Raises:
        CodeFailed: If a value cannot be sent; names the sample and the value.
        TooLarge: If there are more tensors than ``most_tensors``.
    """
    try:
        node, tensors = flatten(made)
        tree = msgspec.Raw(msgspec.json.encode(node))
    except MemoryError:
        raise
    except Exception as error:
        raise CodeFailed(_why_not(run, made, error)) from None
    if len(tensors) > most_tensors:
        raise TooLarge(
            f"{run.name}: an answer has at most {most_tensors} tensors, these {len(run.ids)} samples have "
            f"{len(tensors)}: ask for fewer at once, or have them collated here"
        )
    return MicroBatch(ids=run.ids, position=DONE, tensors=tuple(map(_alone, tensors)), tree=tree)


def _sample(source: MapStyle, run: RunCode, sample: int, value: Any) -> Any:
    with _told(f"{run.name}, sample {sample}", run):
        return source.make(value, epoch=run.epoch, sample=sample, start=run.start)


@contextmanager
def _told(what: str, run: RunCode) -> Iterator[None]:
    """Turn exceptions of the user's code into `CodeFailed`, with the traceback in it and in the log.

    Args:
        run: The job. Its arguments may hold values that must not be logged.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        trace = "".join(traceback.format_exception(error))
        variables = _secrets_of(os.environ)
        hidden = [*_secrets(msgspec.json.decode(run.arguments)), *variables]
        with logging.request_context(hidden=hidden):
            _log(logging.redacted(f"{what}:\n{trace}"))
        told = last_lines(logging.redacted(_end_of(_without(trace, hidden))), TRACE_CHARS)
        message = said(_without(error_text(error, at_most=8 * SAID_CHARS), variables), SAID_CHARS)
        raise CodeFailed(f"{what}: {message}", trace=told) from error


def _without(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, logging.HIDDEN)
    return text


def _end_of(trace: str) -> str:
    """Return the end of a traceback that is searched for secrets.

    No word is cut, because half a secret would not look like one.
    """
    lines = [
        line if len(line) <= MOST_LINE_CHARS else line[:MOST_LINE_CHARS].rpartition(" ")[0] + " …"
        for line in trace.split("\n")
    ]
    end = "\n".join(lines)
    return end if len(end) <= logging.MAX_CHARS else end[-logging.MAX_CHARS :].partition("\n")[2]


def _secrets_of(environment: Mapping[str, str]) -> list[str]:
    """Return values of variables whose names suggest a secret; longest first, as one may contain another."""
    found = {value for name, value in environment.items() if _MAY_BE_SECRET.search(name)}
    return sorted(
        (value for value in found if len(value) >= _LEAST_SECRET_VALUE_CHARS), key=len, reverse=True
    )


def _log(text: str) -> None:
    """Write past Python's own stderr, which may be an object of the user's."""
    with suppress(OSError):  # stderr is closed
        os.write(STDERR, text.encode(errors="backslashreplace"))


def _why_not(run: RunCode, made: Any, error: Exception) -> str:
    """Return why samples cannot be sent, with the first sample that cannot."""
    if run.collate:
        return f"{run.name}, {_of_batch(run)}: {_reason(error)}"
    for sample, value in zip(run.ids, made, strict=True):
        try:
            msgspec.json.encode(flatten(value)[0])
        except Exception as found:
            return f"{run.name}, sample {sample}: {_reason(found)}"
    return f"{run.name}, {len(run.ids)} samples at once: {_reason(error)}"


def _of_batch(run: RunCode) -> str:
    return f"batch {run.batch} collated by {run.collate}"


def _reason(error: Exception) -> str:
    """Return the message of an upriver error; that of another error with its type."""
    return said(str(error)) if isinstance(error, UpriverError) else error_text(error)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that owns its memory, at a multiple of its element's size.

    Otherwise samples that are rows of one large tensor would be sent with all that lies between them.
    """
    nbytes = tensor.numel() * tensor.itemsize
    if nbytes < tensor.untyped_storage().nbytes() or tensor.data_ptr() % tensor.itemsize:
        return tensor.clone()
    return tensor


def _secrets(value: Any, *, secret: bool = False) -> Iterator[str]:
    """Yield the text among arguments that is named as a secret, at any depth."""
    match value:
        case str() if secret and len(value) >= LEAST_SECRET_CHARS:
            yield value
        case list():
            for item in value:
                yield from _secrets(item, secret=secret)
        case dict():
            for name, item in value.items():
                yield from _secrets(item, secret=secret or logging.names_secret(name))
