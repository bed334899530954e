"""Check with one sample whether a dataset can be read at one place and computed at another.

Many datasets use the names ``read`` and ``transform`` for something else: a helper with a path argument, or a
transform of the image and not of the label. Calling them on a guess could do anything, and batches without
labels would look complete. So one sample is made in the normal way, by a copy of the dataset that records the
calls in its ``__getitem__``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import copy
from typing import Any, NamedTuple

from upriver.dataloader.local.workers import SampleSource
from upriver.errors import ConfigError
from upriver.pipeline.draw import Draw
from upriver.pipeline.mapstyle import MAKE, MapStyle
from upriver.pipeline.seeding import Generators, apart, seed_generators
from upriver.protocol.tree import flatten
from upriver.text import error_text

log = logging.getLogger("upriver")


def is_divided(source: SampleSource) -> bool:
    """Return whether one sample shows that the dataset is divided."""
    try:
        _check(source)
    except Exception as why:  # the dataset's own error, too: it may have no sample 0
        log.info("p1 is not tried: %s", error_text(why))
        return False
    return True


def check_divided(source: SampleSource) -> None:
    """Check a division that the user has asked for; one that cannot be seen is taken on trust.

    Raises:
        ConfigError: If a sample is seen to be made in another way; the message says how.
    """
    try:
        _check(source)
    except _Otherwise:
        raise
    except Exception as why:
        log.info("that samples are transform(read(index)) is taken on trust: %s", error_text(why))


class _Otherwise(ConfigError):
    """Raised when samples are not made by reading and computing alone."""


class _Index(int):
    """Index that differs from every other number: an item looked up by it is seen to be another object."""


class _Call(NamedTuple):
    name: str
    given: list[Any]
    value: Any
    before: Generators
    after: Generators


def _check(source: SampleSource) -> None:
    if isinstance(source, MapStyle):
        with apart():
            why = _otherwise(source.dataset, _Index(0))
        if why:
            raise _Otherwise(
                f"{type(source.dataset).__name__} cannot be read here and computed there: its __getitem__ "
                f"must give self.transform(self.read(index)) and do no more, and {why}"
            )


def _otherwise(dataset: Any, index: _Index) -> str:
    """Return in words how a sample departs from reading and computing alone; empty if it does not."""
    calls = list[_Call]()

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            before = Generators.now()
            value = call(*args, **kwargs)
            calls.append(_Call(name, [*args, *kwargs.values()], value, before, Generators.now()))
            return value

        return run

    if hasattr(dataset, "__del__"):
        raise ConfigError("a copy would close what the dataset has open, where it ends (__del__)")
    copied = copy(dataset)
    if vars(copied) is vars(dataset):
        raise ConfigError("there is no copy of the dataset but itself")
    try:
        copied.read, copied.transform = watched("read", copied.read), watched("transform", copied.transform)
        seed_generators(Draw(seed=0, epoch=0, sample=0, stage=MAKE))
        began = Generators.now()
        made = copied[index]
        ended = Generators.now()
    finally:
        vars(copied).clear()  # else it would hold itself, and the dataset's objects, for an unknown time
    if [call.name for call in calls] != ["read", "transform"]:
        return f"it calls {' and then '.join(call.name for call in calls) or 'neither of them'}"
    read, transform = calls
    if len(read.given) != 1 or read.given[0] is not index:
        return "it reads by something else than the index"
    if len(transform.given) != 1 or transform.given[0] is not read.value:
        return "it transforms something else than what read gives"
    if made is not transform.value:
        return "it gives something else than what transform does"
    if not (began.same(read.before) and read.after.same(transform.before) and transform.after.same(ended)):
        return "it draws by chance besides"
    try:
        flatten(dataset.read(int(index)))  # use a plain index, as the value may contain it
    except ConfigError as error:
        return f"it reads what no worker can be sent: {error}"
    return ""
