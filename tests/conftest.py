"""What holds for every test."""

from __future__ import annotations

import os

from hypothesis import settings

# Proofs are not remembered from test to test: each makes its own. Processes that tests start inherit this.
os.environ["UPRIVER_CACHE"] = os.devnull

# Tests assert results, never seconds: a busy machine is no failure. A tree is asked the same questions every
# time, so that it passes or fails for what it is; ``--hypothesis-profile=search`` asks more, others each run.
settings.register_profile("search", deadline=None, max_examples=1000)
settings.register_profile("upriver", deadline=None, derandomize=True)
settings.load_profile("upriver")
