"""Implement ``upriver train``."""
