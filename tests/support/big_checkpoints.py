"""Checkpoints of real widths as sparse files with single elements marked, to try large records on."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from tests.support.checkpoints import TensorInfo, raw_config, write_layout

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"


def sparse_qwen3(out: Path, vocab: int, hidden: int, *, ffn: int = 8, tied: bool = True) -> Path:
    """A Qwen3 of one layer in fp32: true widths of vocabulary, hidden size and FFN, all data a hole."""
    config = raw_config("qwen3" if tied else "qwen3-untied", dtype="float32")
    config |= {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": ffn}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    for name in ("layer_types", "max_window_layers"):
        config.pop(name, None)
    layer = "model.layers.0"
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (vocab, hidden),
        "model.norm.weight": (hidden,),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.self_attn.q_proj.weight": (8, hidden),
        f"{layer}.self_attn.k_proj.weight": (4, hidden),
        f"{layer}.self_attn.v_proj.weight": (4, hidden),
        f"{layer}.self_attn.q_norm.weight": (4,),
        f"{layer}.self_attn.k_norm.weight": (4,),
        f"{layer}.self_attn.o_proj.weight": (hidden, 8),
        GATE: (ffn, hidden),
        UP: (ffn, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, ffn),
    }
    if not tied:
        shapes[HEAD] = (vocab, hidden)
    tensors: dict[str, TensorInfo] = {name: (shape, "F32") for name, shape in shapes.items()}
    write_layout(out, config, tensors, 1 << 50)
    return out


def mark_rows(hf: Path, name: str, rows: list[int]) -> None:
    """Give the first and the last element of each row a value of its own: :func:`marker`."""
    file, start, (_, cols) = _place(hf, name)
    with file.open("r+b") as stream:
        for row in rows:
            for col in (0, cols - 1):
                stream.seek(start + 4 * (row * cols + col))
                stream.write(struct.pack("<f", marker(row, col)))


def read_marks(hf: Path, name: str, rows: list[int]) -> list[float]:
    """The first and the last element of each row."""
    file, start, (_, cols) = _place(hf, name)
    found = []
    with file.open("rb") as stream:
        for row in rows:
            for col in (0, cols - 1):
                stream.seek(start + 4 * (row * cols + col))
                found.append(struct.unpack("<f", stream.read(4))[0])
    return found


def marker(row: int, col: int) -> float:
    return float(row + 1) + (0.5 if col else 0.0)


def _place(hf: Path, name: str) -> tuple[Path, int, tuple[int, int]]:
    for file in hf.glob("*.safetensors"):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            entry = json.loads(stream.read(length)).get(name)
        if entry is not None:
            rows, cols = entry["shape"]
            return file, 8 + length + entry["data_offsets"][0], (rows, cols)
    raise KeyError(name)
