"""Hold each stage's costs on each tier: measured, predicted, cached."""

from __future__ import annotations

from typing import TYPE_CHECKING

from upriver.imports import lazy_names

_PLACES = {
    "build_profile": "builder",
    "cluster_from": "builder",
    "cluster_from_json": "serialization",
    "cluster_to_json": "serialization",
    "metrics_from_json": "throughput",
    "metrics_to_json": "throughput",
    "profile_from_json": "serialization",
    "profile_to_json": "serialization",
}

__all__ = sorted(_PLACES)

if TYPE_CHECKING:
    from upriver.profile.builder import build_profile as build_profile
    from upriver.profile.builder import cluster_from as cluster_from
    from upriver.profile.serialization import cluster_from_json as cluster_from_json
    from upriver.profile.serialization import cluster_to_json as cluster_to_json
    from upriver.profile.serialization import profile_from_json as profile_from_json
    from upriver.profile.serialization import profile_to_json as profile_to_json
    from upriver.profile.throughput import metrics_from_json as metrics_from_json
    from upriver.profile.throughput import metrics_to_json as metrics_to_json

# Resolve names at first use: a server's front reads this machine's resources, and builds no profile.
__getattr__, __dir__ = lazy_names(__name__, _PLACES)
