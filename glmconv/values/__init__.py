"""Tensors read and compared by value."""
