"""Load models and programs that can be called while their weights arrive, and publish weights for that.

``load(build_model, uri)`` returns a model that can be called at once. ``begin`` also returns a handle of the
load. ``open(uri)`` returns a program that can be run at once; ``arriving(program)`` returns the handle of its
weights.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from upriver.coldstart.fetch.weight_stream import StreamLimits
from upriver.coldstart.load_model import Loading, begin, load, loading

_PLACES = {
    "Arriving": "incoming_weights",
    "arriving": "incoming_weights",
    "open": "load_program",
    "publish_model": "format.access_order",
}

__all__ = ["Loading", "StreamLimits", "begin", "load", "loading", *sorted(_PLACES)]

if TYPE_CHECKING:
    from upriver.coldstart.format.access_order import publish_model as publish_model
    from upriver.coldstart.incoming_weights import Arriving as Arriving
    from upriver.coldstart.incoming_weights import arriving as arriving
    from upriver.coldstart.load_program import open as open


def __getattr__(name: str) -> Any:
    # Import these on first use: recording an order and running programs need slow imports, and loading a
    # model needs neither.
    if name in _PLACES:
        return getattr(importlib.import_module(f"upriver.coldstart.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'upriver.coldstart' has no attribute {name!r}")
