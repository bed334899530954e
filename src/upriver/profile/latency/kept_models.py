"""Find the latency models of a device of this machine, without torch: a server's front passes them on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Literal

import upriver
from upriver.cache import Cache
from upriver.profile.profile_cache import TierIdentity

SCHEMA: Literal["upriver.latency/1"] = "upriver.latency/1"

MODELS = Cache("latency")


def name_of(place: TierIdentity) -> str:
    """Return the name of a device's models in `MODELS`."""
    facts = [upriver.__version__, SCHEMA, asdict(place)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def kept_text(place: TierIdentity) -> bytes | None:
    """Return the models kept for a device as JSON, unchecked; None where there are none."""
    return MODELS.load(name_of(place), bytes)
