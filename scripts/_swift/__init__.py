"""Run OpenStack Swift on this machine, for tests and measurements; ``scripts/swift`` is its command line."""
