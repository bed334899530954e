"""Input stages, per-sample randomness, dataset index."""
