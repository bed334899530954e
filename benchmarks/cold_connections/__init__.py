"""Time first answers from a store that limits each connection."""
