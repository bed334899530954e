"""Confine worker processes: namespaces, control groups, resource limits."""
