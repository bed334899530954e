"""Time the planning of a chain of a thousand stages."""
