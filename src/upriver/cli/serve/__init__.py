"""Implement ``upriver serve``."""
