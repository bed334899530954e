"""Render tables, plots and HTML."""
