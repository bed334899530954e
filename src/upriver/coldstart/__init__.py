"""Load models and programs that can be called while their weights arrive, and publish weights for that.

``load(build_model, uri)`` returns a model that can be called at once. ``begin`` also returns a handle of the
load. ``open(uri)`` returns a program that can be run at once; ``arriving(program)`` returns the handle of its
weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from upriver.imports import lazy_names

_PLACES = {
    "Arriving": "incoming_weights",
    "Loading": "load_model",
    "StreamLimits": "fetch.stream_limits",
    "arriving": "incoming_weights",
    "begin": "load_model",
    "load": "load_model",
    "loading": "load_model",
    "open": "load_program",
    "publish_model": "format.access_order",
}

__all__ = sorted(_PLACES)

if TYPE_CHECKING:
    from upriver.coldstart.fetch.stream_limits import StreamLimits as StreamLimits
    from upriver.coldstart.format.access_order import publish_model as publish_model
    from upriver.coldstart.incoming_weights import Arriving as Arriving
    from upriver.coldstart.incoming_weights import arriving as arriving
    from upriver.coldstart.load_model import Loading as Loading
    from upriver.coldstart.load_model import begin as begin
    from upriver.coldstart.load_model import load as load
    from upriver.coldstart.load_model import loading as loading
    from upriver.coldstart.load_program import open as open

# Import these on first use: recording an order and running programs need slow imports, which loading a
# model does not, and a server's front needs the limits alone. `grouping` is a public package, too.
__getattr__, __dir__ = lazy_names(__name__, _PLACES, ("grouping",))
