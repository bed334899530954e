"""Watch and restore the state of a PyTorch model: parameters, attributes, hooks."""
