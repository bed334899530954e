"""Say which extra brings a package that a feature needs and a base install lacks."""

from __future__ import annotations

import importlib.util

SERVER = ("starlette", "uvicorn", "httptools", "prometheus_client")
"""Packages of the extra ``server``."""

DEMO = (*SERVER, "torchvision", "matplotlib", "skimage", "sklearn")
"""Packages of the extra ``demo``."""


def why_missing(feature: str, extra: str, *packages: str) -> str:
    """Return which of the packages is not installed, and the extra that brings it; empty if all are there."""
    missing = next((name for name in packages if importlib.util.find_spec(name) is None), None)
    return "" if missing is None else install(feature, missing, extra)


def install(feature: str, package: str, extra: str) -> str:
    """Return the error of a feature whose package is not installed."""
    return f"{feature} needs {package}, which is not installed: pip install 'upriver[{extra}]'"
