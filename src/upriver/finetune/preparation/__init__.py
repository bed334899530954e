"""Prepare a job in another process while its first batches are made the plain way."""
