"""Transport, loader, fine-tuning job."""
