"""Fine-tune a model whose frozen first layers may run near the data."""
