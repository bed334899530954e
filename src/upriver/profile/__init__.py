"""What each stage costs on each tier: measured, predicted, kept."""
