"""Capture a PyTorch model as a program."""
