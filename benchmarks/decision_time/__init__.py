"""Time the decision where one request is cut."""
