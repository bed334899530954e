"""Decide which request runs next, with how many samples, in which memory."""
