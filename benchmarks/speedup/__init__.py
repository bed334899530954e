"""Measure how much faster an epoch is near the data."""
