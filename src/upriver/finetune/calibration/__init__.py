"""Measure what stages and links cost before a job begins."""
