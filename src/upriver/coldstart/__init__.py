"""Cold start: how a model's weights are published and grouped, so that it answers while they arrive.

``load(build_model, uri)`` gives a model that can be called at once, ``begin`` what tells of its load, too.
``open(uri)`` gives a program that can be run at once; ``arriving(program)`` tells of its weights.
"""

from __future__ import annotations

from upriver.coldstart.incoming import Arriving, arriving
from upriver.coldstart.model_load import Loading, begin, load, loading
from upriver.coldstart.order import publish_model
from upriver.coldstart.programs import open
from upriver.coldstart.stream import StreamLimits

__all__ = [
    "Arriving",
    "Loading",
    "StreamLimits",
    "arriving",
    "begin",
    "load",
    "loading",
    "open",
    "publish_model",
]
