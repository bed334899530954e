"""Measure what upriver claims: one folder a claim, `harness` for what every claim needs."""
