"""Measure how much faster a frozen part is by each ``prefix`` of a job, and how far off its features are."""
