"""The megatron-core side of a parity run."""
