"""Measure what strangers' connections cost somebody else's request."""
