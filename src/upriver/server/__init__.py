"""The near-data server: front (HTTP, access, metrics) and compute workers."""
