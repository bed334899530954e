"""Object access: file, memory and S3-compatible stores behind one small interface."""
