"""Find a model by its name."""
