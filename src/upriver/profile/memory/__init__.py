"""Bound the memory of stages: tensors, kernel workspaces and memory that libraries keep."""
