"""Describe a dataset so that a worker elsewhere has the same one."""
