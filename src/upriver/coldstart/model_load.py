"""A model that answers while its weights are still arriving: construct, find, match, stream, guard.

PISeL (Jafari et al., CIKM 2024) overlaps download, load and execution of groups of layers whose boundaries
are those of modules. Here a call waits for single weights, whoever reads them, and groups say only what is
asked for together.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import nn

from upriver.coldstart import kept, links
from upriver.coldstart.arrivals import Arrivals
from upriver.coldstart.barrier import Gate
from upriver.coldstart.construct import construct
from upriver.coldstart.filling import Match, Memory, held, match, memories, move
from upriver.coldstart.grouping import choose
from upriver.coldstart.guard import Guard
from upriver.coldstart.history import FILLED, Moment, moments
from upriver.coldstart.source import Source, find, keep_order
from upriver.coldstart.stream import Stream, StreamLimits
from upriver.coldstart.timeline import Timeline
from upriver.coldstart.uris import opened
from upriver.errors import StoreError, UpriverError
from upriver.store import Store
from upriver.types import Link

logger = logging.getLogger(__name__)

LOAD_BYTES_PER_S = 2e9
"""Of one core, from the link into place: a checksum and a copy."""

LAYER_BYTES = 1 << 18
"""Weights smaller than this are one layer with those after them, for grouping: a bias is asked for with what
it is added to."""


Groupings: TypeAlias = Mapping[str, list[range]]
"""By what they are kept under."""


class Loading:
    """A load that is under way, or over.

    Attributes:
        nbytes: That are to come.
    """

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        matched: Match,
        stream_of: Callable[[Loading], Stream],
        *,
        steps: Mapping[str, float],
        groupings: Groupings,
    ) -> None:
        self._all, self._source = source, matched.source
        self._steps, self._stream_s = dict(steps), 0.0
        self._groupings = groupings
        self._keeping: threading.Thread | None = None
        self._keeps = threading.Lock()
        self._memories: list[Memory] = memories(matched)
        self._arrivals = Arrivals(len(self._memories))
        self._gate = Gate(self._arrivals, self._hurry)
        for number, tensor in held(matched):
            self._gate.hold(tensor, number)
        self._guard: Guard | None = Guard(model, self._gate, after_call=self._answered)
        self._over = threading.Event()
        self.nbytes = sum(placed.stop - placed.start for placed in self._source.tensors)
        self._stream = stream_of(self)
        self._model = weakref.ref(model)
        self._dropped = weakref.finalize(model, self._stream.cancel)
        self._dropped.atexit = False

    def start(self) -> None:
        """Begin; whatever is asked of the model from now on waits for what it needs."""
        self._stream_s = time.monotonic()
        self._stream.start()
        if not self._memories:
            self._finish()

    # ------------------------------------------------------------------------------------- callers

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until everything is there; False where that takes longer.

        Raises:
            UpriverError: If something does not come.
        """
        if not self._over.wait(timeout_s):
            return False
        self._stream.join()
        if self._keeping is not None:
            self._keeping.join()
        if (error := self._arrivals.error) is not None:
            raise error
        return True

    def cancel(self) -> None:
        """Everybody who waits gets an error, and nothing more is read; nothing where all is there already."""
        self._stream.cancel()
        self._stream.join()

    def nbytes_here(self) -> int:
        """Bytes of the weights that are there."""
        events = tuple(self._stream.events)
        return sum(event.nbytes for event in events if event.kind == FILLED)

    def names_between(self, first: str, last: str | None = None) -> list[str]:
        """Of the weights from one to another, as they lie in the file."""
        names = [placed.name for placed in self._source.tensors]
        return names[names.index(first) : names.index(last or first) + 1]

    def history(self) -> list[Moment]:
        """What has happened so far, in order."""
        return moments(
            self._source,
            began_s=self._steps["began"],
            steps={kind: at for kind, at in self._steps.items() if kind != "began"},
            stream_s=self._stream_s,
            events=tuple(self._stream.events),
            touched=dict(self._gate.touched),
        )

    # -------------------------------------------------------------------------- what the stream tells

    def room(self, index: int) -> memoryview:
        """See :class:`~upriver.coldstart.stream.Sink`."""
        return self._memories[index].room()

    def filled(self, index: int) -> None:
        """See :class:`~upriver.coldstart.stream.Sink`."""
        self._memories[index].settle()
        if self._arrivals.filled(index):
            self._finish()

    def failed(self, error: UpriverError) -> None:
        """See :class:`~upriver.coldstart.stream.Sink`."""
        if self._arrivals.failed(error):
            self._steps["failed"] = time.monotonic()
            self._memories.clear()
            self._over.set()

    # ---------------------------------------------------------------------------------------- inside

    def _hurry(self, index: int) -> None:
        self._stream.hurry(index)

    def _answered(self) -> None:
        """A call is over; the first one has shown the execution order, where nobody knew it."""
        with self._keeps:
            if self._all.ordered or not self._gate.touched or self._keeping is not None:
                return
            self._keeping = threading.Thread(
                target=_keep, args=(self._all, self._touched()), name="upriver-coldstart-order", daemon=True
            )
            self._keeping.start()

    def _touched(self) -> list[str]:
        return [self._source.tensors[index].name for index in tuple(self._gate.touched)]

    def _finish(self) -> None:
        """The model is as any other, and nothing holds on to it."""
        if self._guard is not None:
            self._guard.release()
        self._guard = None
        self._dropped.detach()
        if (model := self._model()) is not None:
            _under_way.pop(model, None)
        self._memories.clear()
        self._steps["loaded"] = time.monotonic()
        self._over.set()
        self._remember()

    def _remember(self) -> None:
        whole = len(self._source.tensors) == len(self._all.tensors)
        remember(self._source, self._stream, self._groupings if whole else {})


_under_way: weakref.WeakKeyDictionary[nn.Module, Loading] = weakref.WeakKeyDictionary()


def loading(model: nn.Module) -> Loading | None:
    """The load of a model that :func:`load` gave; None where everything is there."""
    return _under_way.get(model)


def load(
    build_model: Callable[[], nn.Module] | str,
    uri: str,
    *,
    store: Store | None = None,
    store_options: Mapping[str, str] | None = None,
    device: str | torch.device = "cpu",
    strict: bool = True,
    grouping: str = "upriver",
    limits: StreamLimits | None = None,
) -> nn.Module:
    """A model that can be called at once; a call waits only for the weights that it reads.

    The answer is, to the bit, that of the model with all its weights loaded. Whatever else is asked of the
    model meanwhile waits until they are. Nothing is left of the loading then.

    Args:
        build_model: Makes the model, without its weights; or ``package.module:callable``.
        uri: Of the weights: ``s3://bucket/name``, ``file:///path/name``; safetensors, published by upriver or
            anybody, a Hugging Face index of shards, or the folder of either. With ``store`` a name in it.
        store: Where they are, if it is open already.
        store_options: Of an S3 store, see :func:`upriver.store.s3.open_s3`.
        device: Where the model is to run.
        strict: Whether weights that the model does not have are an error.
        grouping: Which weights are asked for together: ``upriver``, ``pisel`` or ``layer_by_layer``.
        limits: Of the stream.

    Returns:
        What ``build_model`` made, in evaluation or training mode as it was made. ``loading(model)`` tells of
        the load and can end it.

    Raises:
        ConfigError: If an argument is not what it may be.
        ModelError: If the weights are not those of such a model; nothing has been downloaded then.
        ProgramError: If the file is not what it should be.
        StoreError: If the store cannot be read. Where it breaks later, calls of the model raise it.
    """
    return begin(
        build_model,
        uri,
        store=store,
        store_options=store_options,
        device=device,
        strict=strict,
        grouping=grouping,
        limits=limits,
    )[0]


def begin(
    build_model: Callable[[], nn.Module] | str,
    uri: str,
    *,
    store: Store | None = None,
    store_options: Mapping[str, str] | None = None,
    device: str | torch.device = "cpu",
    strict: bool = True,
    grouping: str = "upriver",
    limits: StreamLimits | None = None,
) -> tuple[nn.Module, Loading]:
    """:func:`load`, and what tells of it, also when everything is there already."""
    limits, steps = limits or StreamLimits(), {"began": time.monotonic()}
    where, path = (store, uri) if store is not None else opened(uri, store_options)
    with ThreadPoolExecutor(2, thread_name_prefix="upriver-coldstart-find") as beside:
        found = beside.submit(_found, where, path, beside)
        model = construct(build_model)
        steps["constructed"] = time.monotonic()
        source, link, known, steps["found"] = found.result()
    matched = match(move(model, torch.device(device)), source, strict=strict)
    groups, news = grouped(matched.source, link, grouping, limits, known)
    loading = Loading(
        model,
        source,
        matched,
        lambda sink: Stream(
            matched.source,
            groups,
            sink,
            limits=limits,
            latency_s=link.rtt_s,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        ),
        steps=steps,
        groupings=news,
    )
    _under_way[model] = loading
    loading.start()
    return model, loading


def _found(store: Store, path: str, beside: Executor) -> tuple[Source, Link, Groupings, float]:
    """Where the weights lie, the way there, groupings that are kept, and when that was known."""
    source = find(store, path)
    known = beside.submit(kept.kept, source)
    link = Link(bandwidth_bytes_per_s=links.UNKNOWN_BYTES_PER_S)
    if source.tensors:
        link = links.link_to(store, source.tensors[0].path)
    return source, link, known.result(), time.monotonic()


def grouped(
    source: Source, link: Link, policy: str, limits: StreamLimits, known: Groupings
) -> tuple[list[range], Groupings]:
    """Which weights are asked for together, and what is to be kept of it.

    Args:
        source: Of those that are wanted.
        link: The way to them.
        policy: One of :data:`~upriver.coldstart.grouping.GROUPINGS`.
        limits: Of the stream.
        known: What is kept already, by what it is kept under.

    Returns:
        The groups, and all that is to be kept from now on; nothing where that has not changed.

    Raises:
        ConfigError: If there is no such policy, or it makes a group of more than may be in flight.
    """
    bandwidth = min(link.bandwidth_bytes_per_s, limits.bandwidth_bytes_per_s)
    name, link = kept.bucket(policy, replace(link, bandwidth_bytes_per_s=bandwidth), limits.in_flight_bytes)
    name += "" if source.ordered else " as they lie"
    groups = known.get(name)
    if groups and groups[-1].stop == len(source.tensors):
        return groups, {}
    layers = _layers([placed.stop - placed.start for placed in source.tensors])
    sizes = [
        float(sum(p.stop - p.start for p in source.tensors[layer.start : layer.stop])) for layer in layers
    ]
    timeline = Timeline(
        sizes,
        [size / LOAD_BYTES_PER_S for size in sizes],
        [0.0] * len(sizes),
        latency_s=link.rtt_s,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        # A layer that is larger comes in parts.
        memory_cap_bytes=max([float(limits.in_flight_bytes), *sizes]),
        one_core=True,
    )
    chosen = choose(policy, timeline)
    groups = [range(layers[group.start].start, layers[group.stop - 1].stop) for group in chosen]
    return groups, {**known, name: groups}


def remember(source: Source, stream: Stream, groupings: Groupings) -> None:
    """Keep what the next load can begin with.

    Args:
        source: What was loaded.
        stream: What brought it.
        groupings: All that are to be kept beside it; none where nothing is new.
    """
    nbytes = sum(placed.stop - placed.start for placed in source.tensors)
    links.keep(source.store, nbytes=nbytes, bandwidth_bytes_per_s=stream.measured.bandwidth_bytes_per_s)
    if groupings:
        try:
            kept.keep(source, groupings)
        except StoreError as error:
            logger.info("the grouping is not kept: %s", error)


def _layers(sizes: Sequence[int]) -> list[range]:
    """Weights that are grouped as one: each with the small ones before it."""
    layers, start, filled = [], 0, 0
    for stop, size in enumerate(sizes, start=1):
        filled += size
        if filled >= LAYER_BYTES:
            layers.append(range(start, stop))
            start, filled = stop, 0
    return layers if start == len(sizes) else [*layers, range(start, len(sizes))]


def _keep(source: Source, names: Sequence[str]) -> None:
    try:
        keep_order(source, names)
    except StoreError as error:
        logger.info("the execution order is not kept: %s", error)
