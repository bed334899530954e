"""Time the first answer of a fresh process on an accelerator."""
