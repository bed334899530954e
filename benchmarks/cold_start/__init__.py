"""Time the first answer of a fresh process whose model is in an object store."""
