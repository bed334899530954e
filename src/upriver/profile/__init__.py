"""Hold each stage's costs on each tier: measured, predicted, cached."""

from __future__ import annotations

from upriver.profile.builder import build_profile, cluster_from
from upriver.profile.serialization import (
    cluster_from_json,
    cluster_to_json,
    profile_from_json,
    profile_to_json,
)
from upriver.profile.throughput import metrics_from_json, metrics_to_json

__all__ = [
    "build_profile",
    "cluster_from",
    "cluster_from_json",
    "cluster_to_json",
    "metrics_from_json",
    "metrics_to_json",
    "profile_from_json",
    "profile_to_json",
]
