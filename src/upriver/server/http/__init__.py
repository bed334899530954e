"""Serve HTTP: routes, authentication, limits, streaming of answers."""
