"""Implement ``upriver coldstart``."""
