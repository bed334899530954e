"""Make samples on workers elsewhere, and find or start these workers."""
