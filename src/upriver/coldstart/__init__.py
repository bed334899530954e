"""Cold start: how a model's weights are published and grouped, so that it answers while they arrive.

``load(build_model, uri)`` gives a model that can be called at once; ``loading(model)`` tells of its load.
"""

from __future__ import annotations

from upriver.coldstart.model_load import Loading, load, loading
from upriver.coldstart.order import publish_model
from upriver.coldstart.stream import StreamLimits

__all__ = ["Loading", "StreamLimits", "load", "loading", "publish_model"]
