"""Index the samples of a store."""
