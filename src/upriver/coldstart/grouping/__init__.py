"""Group weights into requests: PISeL's greedy grouping, and the best one under measured costs."""

from upriver.coldstart.grouping.groups import best, greedy

__all__ = ["best", "greedy"]
