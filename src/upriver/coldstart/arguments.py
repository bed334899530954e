"""Check the arguments of a load once, before any lookup."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from upriver.coldstart.fetch.weight_stream import DEFAULT_LIMITS, StreamLimits
from upriver.coldstart.grouping.groups import check_policy
from upriver.errors import ConfigError
from upriver.program.graph.devices import check_device
from upriver.store import Store
from upriver.types import require_type


def check_store(store: Store | None, options: Mapping[str, str] | None) -> None:
    """Check an open store, and the options of a store that a URI names.

    Raises:
        ConfigError: If one of them has another type.
    """
    if store is not None:
        require_type("store", store, Store, "Store.open(URI)")
    if options is None:
        return
    texts = (*options.keys(), *options.values()) if isinstance(options, Mapping) else (options,)
    others = [each for each in texts if not isinstance(each, str)]
    if others or not isinstance(options, Mapping):  # values may be secret: the error names only the type
        kind = type(others[0] if others else options).__name__
        raise ConfigError(f"store_options must be a mapping of texts to texts, got something of type {kind}")


def checked(
    device: str | torch.device, grouping: str, limits: StreamLimits | None
) -> tuple[torch.device, StreamLimits]:
    """Return the device and the limits of a load.

    Raises:
        ConfigError: If torch cannot compute on the device, no such grouping exists, or the limits have
            another type.
    """
    check_policy(grouping)
    if limits is None:
        limits = DEFAULT_LIMITS
    return check_device(device), require_type("limits", limits, StreamLimits, "coldstart.StreamLimits()")
