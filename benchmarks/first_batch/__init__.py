"""Measure how soon a fine-tuning job has its first batch, and what a short job takes."""
