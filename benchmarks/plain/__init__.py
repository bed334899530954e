"""Compare the plain way with an ordinary PyTorch loop."""
