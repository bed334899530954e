"""A model that answers while its weights are still arriving: construct, find, match, stream, guard.

PISeL (Jafari et al., CIKM 2024) overlaps download, load and execution of groups of layers whose boundaries
are those of modules. Here a call waits for single weights, whoever reads them, and groups say only what is
asked for together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace

import torch
from torch import nn

from upriver._threads import Beside
from upriver.coldstart.arguments import check_store, checked
from upriver.coldstart.fetch.strategy import asked_ahead, is_one_request, way_to
from upriver.coldstart.fetch.weight_stream import Sink, Stream, StreamLimits
from upriver.coldstart.format.checkpoint import WeightSource, find, keep_order
from upriver.coldstart.format.readahead import Ahead
from upriver.coldstart.format.uris import opened
from upriver.coldstart.grouping import grouping_cache
from upriver.coldstart.grouping.groups import choose, joins_s, knows_stream
from upriver.coldstart.grouping.timeline import Timeline
from upriver.coldstart.link_estimator import StoreLink
from upriver.coldstart.load_handle import Groupings, Handle, under_way
from upriver.coldstart.model.assignment import Match, held, match, memories, move
from upriver.coldstart.model.construction import construct
from upriver.coldstart.model.lazy_module import Guard
from upriver.coldstart.model.load_hooks import check_loading_code
from upriver.coldstart.model.weight_barrier import Gate
from upriver.coldstart.roofline import layer_seconds, pace_of
from upriver.errors import ConfigError, StoreError
from upriver.program.graph.devices import make_ready
from upriver.store import Store
from upriver.types import require_type

logger = logging.getLogger(__name__)

LOAD_BYTES_PER_S = 2e9
"""Of one core, from the link into place: a checksum and a copy."""

LAYER_BYTES = 1 << 18
"""Weights smaller than this are one layer with those after them, for grouping: a bias is asked for with what
it is added to."""


class Loading(Handle[nn.Module]):
    """A load of a model that is under way, or over."""

    def __init__(
        self,
        model: nn.Module,
        source: WeightSource,
        matched: Match,
        stream_of: Callable[[Sink], Stream],
        *,
        steps: Mapping[str, float],
        groupings: Groupings,
    ) -> None:
        """Guard the model; nothing is asked for yet.

        Args:
            model: Whatever is asked of it from now on waits for what it needs.
            source: Of all that is stored.
            matched: Those of it that the model has.
            stream_of: See :class:`Handle`, as what follows.
            steps: See there.
            groupings: See there; of all that is stored.
        """
        whole = len(matched.source.tensors) == len(source.tensors)
        super().__init__(
            matched.source,
            memories(matched.source.tensors, matched.targets),
            stream_of,
            steps=steps,
            groupings=groupings if whole else {},
        )
        self._all = source
        self._keeps, self._shown = threading.Lock(), False
        self._gate = Gate(self._arrivals, self._stream.hurry)
        self.touched = self._gate.touched
        for number, tensor in held(matched):
            self._gate.hold(tensor, number)
        self._guard: Guard | None = Guard(model, self._gate, after_call=self._answered)

    def _answered(self) -> None:
        """A call is over; the first one has shown the execution order, where nobody knew it."""
        with self._keeps:
            if self._all.ordered or not self.touched or self._shown:
                return
            self._shown = True
            names = [self._source.tensors[index].name for index in tuple(self.touched)]
            self._write_down("order", _keep, self._all, names)

    def _release(self, model: nn.Module) -> None:
        if self._guard is not None:
            self._guard.release()
        self._guard = None


def loading(model: nn.Module) -> Loading | None:
    """The load of a model that :func:`load` gave; None where everything is there.

    Raises:
        ConfigError: If it is no model.
    """
    require_type("model", model, nn.Module, "from coldstart.load()")
    found = under_way.get(model)
    return found if isinstance(found, Loading) else None


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
        ModelError: If the weights are not those of such a model, or its own code changes them when it is
            loaded; nobody has waited for a weight then.
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
    steps = {"began": time.monotonic()}
    _check_builder(build_model)
    require_type("uri", uri, str, "of the weights, or with store a name in it")
    require_type("strict", strict, bool, "whether weights that the model does not have are an error")
    check_store(store, store_options)
    place, limits = checked(device, grouping, limits)
    where, path = (store, uri) if store is not None else opened(uri, store_options)
    with asked_ahead(where, path, grouping, limits) as ahead:
        with Beside(3, name="upriver-coldstart-find") as beside:
            found = beside.submit(_found, where, path, grouping, limits, beside, ahead)
            if place.type == "cuda":
                beside.submit(make_ready, place)
            model = construct(build_model)
            steps["constructed"] = time.monotonic()
            source, link, known, steps["found"] = found.result()
        matched = match(move(model, place), source, strict=strict)
        check_loading_code(model, source, converted=matched.converted)
        groups, news = grouped(matched.source, link, grouping, limits, place, known)
        loading = Loading(
            model,
            source,
            matched,
            lambda sink: Stream(
                matched.source,
                groups,
                sink,
                limits=limits,
                link=link,
                joins_s=joins_s(grouping),
                ahead=ahead,
            ),
            steps=steps,
            groupings=news,
        )
        loading.start(model)
    return model, loading


def _check_builder(build_model: object) -> None:
    if isinstance(build_model, nn.Module) or not (isinstance(build_model, str) or callable(build_model)):
        raise ConfigError(
            "build_model must be a constructor, which makes the model when it is called, or "
            f"'package.module:callable', got an object of type {type(build_model).__name__}"
        )


def _found(
    store: Store,
    path: str,
    policy: str,
    limits: StreamLimits,
    beside: Executor,
    ahead: Ahead | None,
) -> tuple[WeightSource, StoreLink, Groupings, float]:
    """Where the weights lie, the way there, groupings that are kept, and when that was known."""
    source = find(store, path, ahead=ahead)
    near = source.tensors[0].path if source.tensors else path
    link, known = way_to(source, near, policy, limits, beside, ahead)
    return source, link, known, time.monotonic()


def grouped(
    source: WeightSource,
    link: StoreLink,
    policy: str,
    limits: StreamLimits,
    device: torch.device,
    known: Groupings,
) -> tuple[list[range], Groupings]:
    """Which weights are asked for together, and what is to be kept of it.

    Args:
        source: Of those that are wanted.
        link: The way to them.
        policy: One of :data:`~upriver.coldstart.grouping.groups.GROUPINGS`.
        limits: Of the stream.
        device: Where the model is to run.
        known: What is kept already, by what it is kept under.

    Returns:
        The groups, and all that is to be kept from now on; nothing where that has not changed.

    Raises:
        ConfigError: If there is no such policy.
    """
    if is_one_request(source, policy, limits):
        return [range(len(source.tensors))] if source.tensors else [], {}
    bandwidth = min(link.bandwidth_bytes_per_s, limits.bandwidth_bytes_per_s)
    link = replace(link, bandwidth_bytes_per_s=bandwidth)
    name, link, pace = grouping_cache.bucket(policy, link, limits.in_flight_bytes, pace_of(device))
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
        layer_seconds([placed.execution for placed in source.tensors], layers, pace),
        latency_s=link.latency_s,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        # What is larger comes in parts: a layer, or a group of a policy that knows no cap.
        memory_cap_bytes=max(
            [float(limits.in_flight_bytes), *(sizes if knows_stream(policy) else [sum(sizes)])]
        ),
        one_core=True,
    )
    chosen = choose(policy, timeline)
    groups = [range(layers[group.start].start, layers[group.stop - 1].stop) for group in chosen]
    return groups, {**known, name: groups}


def _layers(sizes: Sequence[int]) -> list[range]:
    """Weights that are grouped as one: each with the small ones before it."""
    layers, start, filled = [], 0, 0
    for stop, size in enumerate(sizes, start=1):
        filled += size
        if filled >= LAYER_BYTES:
            layers.append(range(start, stop))
            start, filled = stop, 0
    return layers if start == len(sizes) else [*layers, range(start, len(sizes))]


def _keep(source: WeightSource, names: Sequence[str]) -> None:
    try:
        keep_order(source, names)
    except StoreError as error:
        logger.info("the execution order is not kept: %s", error)
