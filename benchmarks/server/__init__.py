"""Measure a near-data server with many tenants."""
