"""Time the admission of a thousand requests."""
