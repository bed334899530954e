"""What holds for every test."""

from __future__ import annotations

import os

from hypothesis import settings

# Proofs are not remembered from test to test: each makes its own. Processes that tests start inherit this.
os.environ["UPRIVER_CACHE"] = os.devnull

# Tests assert results, never seconds: a busy machine is no failure.
settings.register_profile("upriver", deadline=None)
settings.load_profile("upriver")
