"""Compare estimates of memory with measured peaks."""
