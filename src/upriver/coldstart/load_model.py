"""Load a model that can be called while its weights arrive: construct, find, match, stream, guard.

PISeL (Jafari et al., CIKM 2024) overlaps download, load and execution of groups of layers, with module
boundaries. Here a call waits for single weights, in whichever operator reads them. Groups only decide which
weights are requested together.
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

from upriver._threads.executor import DaemonExecutor
from upriver.coldstart.fetch.strategy import Groupings, RequestPlan, asked_ahead, plan_requests, way_to
from upriver.coldstart.fetch.stream_limits import StreamLimits
from upriver.coldstart.format.checkpoint import WeightSource, find, keep_order
from upriver.coldstart.format.readahead import Readahead
from upriver.coldstart.format.uris import opened
from upriver.coldstart.link_cache import StoreLink
from upriver.coldstart.load_handle import Handle, check_options, under_way
from upriver.coldstart.model.assignment import MatchedWeights, held, match, memories, move
from upriver.coldstart.model.construction import construct
from upriver.coldstart.model.lazy_module import WeightGuard
from upriver.coldstart.model.load_hooks import check_loading_code
from upriver.coldstart.model.weight_barrier import WeightBarrier
from upriver.errors import ConfigError, StoreError
from upriver.program.graph.devices import make_ready
from upriver.store import Store
from upriver.types import require_type

logger = logging.getLogger(__name__)


class Loading(Handle[nn.Module]):
    """Handle of a model's load, running or finished."""

    def __init__(
        self,
        model: nn.Module,
        source: WeightSource,
        matched: MatchedWeights,
        plan: RequestPlan,
        *,
        ahead: Readahead | None,
        steps: Mapping[str, float],
    ) -> None:
        """Guard the model without sending a request."""
        if len(matched.source.tensors) < len(source.tensors):
            plan = replace(plan, groupings={})
        super().__init__(plan, memories(matched.source.tensors, matched.targets), ahead=ahead, steps=steps)
        self._all = source
        self._keeps, self._shown = threading.Lock(), False
        self._gate = WeightBarrier(self._arrivals, self._stream.hurry)
        self.touched = self._gate.touched
        for number, tensor in held(matched):
            self._gate.hold(tensor, number)
        self._guard: WeightGuard | None = WeightGuard(model, self._gate, after_call=self._answered)

    def _answered(self) -> None:
        """Store the execution order after the first call, if the order was unknown."""
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
    """Return the load of a model from :func:`load`, or None after its end.

    Raises:
        ConfigError: If the argument is no model.
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
    """Return a model that can be called at once; a call waits only for the weights that it reads.

    The result is, to the bit, that of the model with all weights loaded. Any other access to the model waits
    for all weights. Afterwards no trace of the load remains.

    Args:
        build_model: Function that makes the model without its weights; or ``package.module:callable``.
        uri: URI of the weights, ``s3://bucket/name`` or ``file:///path/name``: safetensors from upriver or
            other software, a Hugging Face index of shards, or the folder of either. With ``store``, a name in
            that store.
        store: Open store that holds the weights.
        store_options: Options of an S3 store, see :func:`upriver.store.s3.open_s3`.
        device: Device of the model.
        strict: If true, stored weights that the model lacks are an error.
        grouping: Policy that groups the requests: ``upriver``, ``pisel`` or ``layer_by_layer``.
        limits: Limits of the stream.

    Returns:
        The model of ``build_model``, in the evaluation or training mode in which it was made.
        ``loading(model)`` is the handle of the load and can end it.

    Raises:
        ConfigError: If an argument is invalid.
        ModelError: If the weights are for another model, or the model's own code changes them when it is
            loaded. Both raise before the first weight arrives.
        ProgramError: If the file is invalid.
        StoreError: If the store cannot be read. A later failure is raised by calls of the model.
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
    """Return the model of :func:`load` and the handle of its load, even after the last weight."""
    steps = {"began": time.monotonic()}
    _check_builder(build_model)
    require_type("uri", uri, str, "of the weights, or with store a name in it")
    require_type("strict", strict, bool, "whether weights that the model does not have are an error")
    place, limits = check_options(store, store_options, device, grouping, limits)
    where, path = (store, uri) if store is not None else opened(uri, store_options)
    with asked_ahead(where, path, grouping, limits) as ahead:
        with DaemonExecutor(3, name="coldstart-find") as beside:
            found = beside.submit(_found, where, path, grouping, limits, beside, ahead)
            if place.type == "cuda":
                beside.submit(make_ready, place)
            model = construct(build_model)
            steps["constructed"] = time.monotonic()
            source, link, known, steps["found"] = found.result()
        matched = match(move(model, place), source, strict=strict)
        check_loading_code(model, source, converted=matched.converted)
        plan = plan_requests(matched.source, link, grouping, limits, place, known)
        loading = Loading(model, source, matched, plan, ahead=ahead, steps=steps)
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
    ahead: Readahead | None,
) -> tuple[WeightSource, StoreLink, Groupings, float]:
    """Return the weights' locations, the link, the stored groupings, and the time of this lookup's end."""
    source = find(store, path, ahead=ahead)
    near = source.tensors[0].path if source.tensors else path
    link, known = way_to(source, near, policy, limits, beside, ahead)
    return source, link, known, time.monotonic()


def _keep(source: WeightSource, names: Sequence[str]) -> None:
    try:
        keep_order(source, names)
    except StoreError as error:
        logger.info("the execution order is not kept: %s", error)
