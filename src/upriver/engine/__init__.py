"""Sample ids to micro-batches: the same code in server, worker and client."""
