"""Hugging Face safetensors files: headers, index, checkpoint folder."""
