"""OpenStack Swift on this machine, for tests and measurements; ``scripts/swift`` runs it."""
