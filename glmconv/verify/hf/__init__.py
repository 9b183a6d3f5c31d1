"""The transformers side of a parity run."""
