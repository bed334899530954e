"""Split a model at its freeze point, and prove that the split changes no bit."""
