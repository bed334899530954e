"""Fetch weights from a store: which ranges, how many requests at once, into which memory."""
