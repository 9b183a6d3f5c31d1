"""Move checkpoints between Hugging Face safetensors and Megatron torch_dist, and prove it."""

from __future__ import annotations

__version__ = "0.1.0"
