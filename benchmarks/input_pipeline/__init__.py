"""Measure whether offloading the input pipeline pays."""
