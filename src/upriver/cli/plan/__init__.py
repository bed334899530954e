"""Implement ``upriver plan``."""
