"""Bound the memory of stages: tensors, kernel workspaces and what libraries keep."""
