"""Measure what a step of a split model costs over the whole one."""
