"""Turn sample ids into micro-batches: the same code in server, worker and client."""
