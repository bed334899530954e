"""upriver: decides where each part of a PyTorch job runs; the answer never changes, only where it is computed."""

__version__ = "0.1.0"
