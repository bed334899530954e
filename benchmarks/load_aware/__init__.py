"""Measure whether a device should know how busy a server is."""
