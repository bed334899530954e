"""Decide while things run: pure rules that servers and clients call, and that a simulator can call too.

No module here starts a thread, waits, opens anything or reads a clock. Where time matters, ``now`` is an
argument. Callers hold their own locks.
"""
