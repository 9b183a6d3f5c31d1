"""Hugging Face checkpoints: safetensors headers, the index, side files."""
