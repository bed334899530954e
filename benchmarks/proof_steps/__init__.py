"""Check whether a split trains what its model trains whole, over many models."""
