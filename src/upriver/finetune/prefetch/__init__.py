"""Fetch the micro-batches of an epoch ahead of training, in order."""
