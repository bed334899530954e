"""Measure the share of a raw socket's rate that micro-batches reach."""
