"""Measure how far latency models are off."""
