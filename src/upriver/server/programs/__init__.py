"""Keep programs and datasets that a server has read or was sent."""
