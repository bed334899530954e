"""Measure epochs where the training side and the near-data server compute at very different speeds."""
