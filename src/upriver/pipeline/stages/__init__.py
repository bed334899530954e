"""Declare input stages: decoding, augmentation, conversion."""
