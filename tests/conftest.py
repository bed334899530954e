"""What holds for every test."""

from __future__ import annotations

import os

# Proofs are not remembered from test to test: each makes its own. Processes that tests start inherit this.
os.environ["UPRIVER_CACHE"] = os.devnull
