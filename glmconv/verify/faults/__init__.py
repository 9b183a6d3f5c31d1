"""Faults put in on purpose, to show that verify would see them."""
