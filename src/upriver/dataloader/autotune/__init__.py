"""Decide which stages to offload, and for which share of the samples."""
