"""Rewrite the program of a frozen prefix as a faster one with the same cuts."""
