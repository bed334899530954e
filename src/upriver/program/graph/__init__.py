"""Represent a program: schema, parser, validator, weights file and executor."""
