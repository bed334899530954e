"""Run requests in worker processes."""
