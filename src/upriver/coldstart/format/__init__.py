"""Describe published weights: manifests, checkpoints, access order and URIs."""
