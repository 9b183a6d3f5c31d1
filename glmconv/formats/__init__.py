"""What is on disk, nothing more: safetensors and torch_dist, read and framed."""
