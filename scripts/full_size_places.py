"""Where a GLM-5 class tensor lies in a Megatron checkpoint, written by hand for checks at full size.

This is an independent reference: names and orders are those that megatron-core and slime document,
places are read from torch's own ``.metadata`` and from the zip directory of each record. It shares
no code with ``glmconv``.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import RawIOBase
from math import prod
from pathlib import Path
from typing import Any

MARKER = 2048
"""Bytes of a marker at most: less than the shortest row of a matrix."""

TOP = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
MTP = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "shared_head.norm.weight": "final_layernorm.weight",
}
LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attn.q_a_proj.weight": "self_attention.linear_q_down_proj.weight",
    "self_attn.q_b_proj.weight": "self_attention.linear_q_up_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "self_attention.linear_kv_down_proj.weight",
    "self_attn.kv_b_proj.weight": "self_attention.linear_kv_up_proj.weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
    "mlp.shared_experts.down_proj.weight": "mlp.shared_experts.linear_fc2.weight",
}
LATENT_NORMS = {
    "mcore": {"q": "self_attention.q_layernorm.weight", "kv": "self_attention.kv_layernorm.weight"},
    "slime": {
        "q": "self_attention.linear_q_up_proj.layer_norm_weight",
        "kv": "self_attention.linear_kv_up_proj.layer_norm_weight",
    },
}
INDEXER = {
    "mcore": {
        "wq_b.weight": "self_attention.core_attention.indexer.linear_wq_b.weight",
        "wk.weight": "self_attention.core_attention.indexer.linear_wk.weight",
        "k_norm.weight": "self_attention.core_attention.indexer.k_norm.weight",
        "k_norm.bias": "self_attention.core_attention.indexer.k_norm.bias",
        "weights_proj.weight": "self_attention.core_attention.indexer.linear_weights_proj.weight",
    },
    "slime": {
        "wq_b.weight": "self_attention.wq_b.weight",
        "wk.weight": "self_attention.wk.weight",
        "k_norm.weight": "self_attention.k_norm.weight",
        "k_norm.bias": "self_attention.k_norm.bias",
        "weights_proj.weight": "self_attention.weights_proj.weight",
    },
}
DIALECTS = tuple(INDEXER)


@dataclass(frozen=True)
class Piece:
    """Rows ``first`` to ``end`` of a Hugging Face tensor; row ``first`` is at ``index`` of ``stored``."""

    first: int
    end: int
    stored: str
    index: tuple[int, ...]


def pieces(name: str, rows: int, config: Mapping[str, Any], dialect: str) -> list[Piece]:
    """The places of all rows of tensor ``name`` in a checkpoint of ``dialect`` (``mcore`` or ``slime``)."""
    if name in TOP:
        return [Piece(0, rows, TOP[name], (0,))]
    number, rest = name.removeprefix("model.layers.").split(".", 1)
    layer, layers = int(number), config["num_hidden_layers"]
    prefix = f"decoder.layers.{layer}."
    if layer >= layers:
        prefix = f"mtp.layers.{layer - layers}." + ("" if rest in MTP else "transformer_layer.")
    if rest.startswith("self_attn.indexer."):
        return _indexer(rest.removeprefix("self_attn.indexer."), rows, prefix, config, dialect)
    dense = layer < config["first_k_dense_replace"]
    stored, index = _in_block(rest, rows, dialect, dense)
    return [Piece(0, rows, prefix + stored, index)]


def _in_block(rest: str, rows: int, dialect: str, dense: bool) -> tuple[str, tuple[int, ...]]:
    """Name inside a layer and the index of the first row, for a tensor that stays in one piece."""
    if rest in MTP:
        return MTP[rest], (0,)
    second = rows if rest.endswith("up_proj.weight") else 0
    if rest.startswith("mlp.experts."):
        _, _, expert, matrix, _ = rest.split(".")
        fused = "linear_fc2" if matrix == "down_proj" else "linear_fc1"
        return f"mlp.experts.experts.{fused}.weight", (int(expert), second)
    if rest.endswith(("gate_proj.weight", "up_proj.weight")):
        folder = rest.rpartition(".")[0].rpartition(".")[0]
        return f"{folder}.linear_fc1.weight", (second,)
    if rest == "post_attention_layernorm.weight":
        return "mlp.linear_fc1.layer_norm_weight" if dense else "pre_mlp_layernorm.weight", (0,)
    if rest.endswith("_a_layernorm.weight"):
        return LATENT_NORMS[dialect][rest.removeprefix("self_attn.").partition("_")[0]], (0,)
    return LAYER[rest], (0,)


def _indexer(short: str, rows: int, prefix: str, config: Mapping[str, Any], dialect: str) -> list[Piece]:
    stored = prefix + INDEXER[dialect][short]
    if dialect == "slime" and short != "weights_proj.weight":
        return list(_swapped(rows, stored, config))
    return [Piece(0, rows, stored, (0,))]


def _swapped(rows: int, stored: str, config: Mapping[str, Any]) -> Iterator[Piece]:
    """Rope channels of every index head from its begin to its end."""
    size, rope = config["index_head_dim"], config["qk_rope_head_dim"]
    for head in range(0, rows, size):
        yield Piece(head, head + rope, stored, (head + size - rope,))
        yield Piece(head + rope, head + size, stored, (head,))


@dataclass(frozen=True)
class Marked:
    """Known bytes inside a tensor: they begin ``offset`` bytes behind the start of row ``row``."""

    tensor: str
    row: int
    offset: int
    data: bytes


def markers(name: str, shape: tuple[int, ...], itemsize: int) -> list[Marked]:
    """Distinct content for both ends of a tensor, each within one row (of a vector: one half)."""
    row_bytes = prod(shape[1:]) * itemsize
    size = min(MARKER, row_bytes if len(shape) > 1 else shape[0] * itemsize // 2)
    last = (shape[0] - 1, row_bytes - size) if len(shape) > 1 else (shape[0] - size // itemsize, 0)
    ends = {"first": (0, 0), "last": last}
    return [
        Marked(name, row, offset, hashlib.shake_256(f"{name} {end}".encode()).digest(size))
        for end, (row, offset) in ends.items()
    ]


class TorchDist:
    """Places in a unit directory, as torch's metadata and the records' zip directories tell them."""

    def __init__(self, unit: Path) -> None:
        from torch.distributed.checkpoint import FileSystemReader  # seconds to import

        self.unit = unit
        metadata = FileSystemReader(unit).read_metadata()
        self._chunks: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {
            name: [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            for name, entry in metadata.state_dict_metadata.items()
            if hasattr(entry, "chunks")
        }
        records = metadata.storage_data.items()
        self._records = {(key.fqn, tuple(key.offset or ())): place for key, place in records}
        self._payloads: dict[tuple[str, int], int] = {}

    def place(self, stored: str, index: tuple[int, ...], itemsize: int) -> tuple[Path, int]:
        """File and byte of the element at ``index`` (missing trailing indices are 0)."""
        full = index + (0,) * (len(self._chunks[stored][0][0]) - len(index))
        record = self._records.get((stored, full))
        if record is not None:  # it is the first element of a chunk
            return self.unit / record.relative_path, self._payload(record)
        for offsets, sizes in self._chunks[stored]:
            inside = [i - o for i, o in zip(full, offsets, strict=True)]
            if all(0 <= i < size for i, size in zip(inside, sizes, strict=True)):
                element = sum(i * prod(sizes[axis + 1 :]) for axis, i in enumerate(inside))
                record = self._records[stored, offsets]
                return self.unit / record.relative_path, self._payload(record) + element * itemsize
        raise LookupError(f"no chunk of {stored} holds {index}")

    def _payload(self, record: Any) -> int:
        """Byte of the file at which a record's ``data/0`` begins."""
        key = (record.relative_path, record.offset)
        if key not in self._payloads:
            with _Slice(self.unit / record.relative_path, record.offset, record.length) as file:
                info = next(i for i in zipfile.ZipFile(file).infolist() if i.filename.endswith("data/0"))
                file.seek(info.header_offset + 26)
                lengths = file.read(4)
            names = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
            self._payloads[key] = record.offset + info.header_offset + 30 + names
        return self._payloads[key]


class _Slice(RawIOBase):
    """A part of a file as a file of its own, for ``zipfile``."""

    def __init__(self, path: Path, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = path.open("rb", buffering=0), start, size, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = self._size - self._at
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data

    def close(self) -> None:
        self._file.close()
        super().close()
