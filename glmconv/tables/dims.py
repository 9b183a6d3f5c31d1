"""Named sizes that the rows of a table use for the shapes of Hugging Face tensors.

Each is a number of rows or columns computed from the :class:`~glmconv.tables.spec.ModelSpec`; a table
that names one for a feature that the model lacks is a mistake in the table and raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from glmconv.basics.errors import DataError
from glmconv.tables.spec import Dsa, Mla, ModelSpec, Moe


@dataclass(frozen=True, slots=True)
class Dim:
    """A size with a name; ``of(spec)`` is its value."""

    name: str
    of: Callable[[ModelSpec], int]

    def __repr__(self) -> str:
        return self.name


def _mla(spec: ModelSpec) -> Mla:
    if spec.mla is None:
        raise DataError("the table names an MLA size, the config describes no MLA", where=spec.model_type)
    return spec.mla


def _moe(spec: ModelSpec) -> Moe:
    if spec.moe is None:
        raise DataError("the table names an expert size, the config describes none", where=spec.model_type)
    return spec.moe


def _dsa(spec: ModelSpec) -> Dsa:
    if spec.dsa is None:
        raise DataError("the table names an indexer size, the config describes none", where=spec.model_type)
    return spec.dsa


def _q_lora_rank(spec: ModelSpec) -> int:
    rank = _mla(spec).q_lora_rank
    if rank is None:
        raise DataError("the table names q_lora_rank, the config has none", where=spec.model_type)
    return rank


def _kv_a_rows(spec: ModelSpec) -> int:
    return _mla(spec).kv_lora_rank + _mla(spec).qk_rope_head_dim


def _kv_b_rows(spec: ModelSpec) -> int:
    return spec.num_heads * (_mla(spec).qk_nope_head_dim + _mla(spec).v_head_dim)


HIDDEN = Dim("hidden_size", lambda spec: spec.hidden_size)
TWICE_HIDDEN = Dim("2*hidden_size", lambda spec: 2 * spec.hidden_size)
VOCAB = Dim("vocab_size", lambda spec: spec.vocab_size)
FFN = Dim("ffn_size", lambda spec: spec.ffn_size)
HEAD = Dim("head_dim", lambda spec: spec.head_dim)
Q_ROWS = Dim("num_heads*head_dim", lambda spec: spec.num_heads * spec.head_dim)
KV_ROWS = Dim("num_groups*head_dim", lambda spec: spec.num_groups * spec.head_dim)

Q_LORA = Dim("q_lora_rank", _q_lora_rank)
KV_LORA = Dim("kv_lora_rank", lambda spec: _mla(spec).kv_lora_rank)
KV_A_ROWS = Dim("kv_lora_rank+qk_rope_head_dim", _kv_a_rows)
Q_B_ROWS = Dim("num_heads*qk_head_dim", lambda spec: spec.num_heads * _mla(spec).qk_head_dim)
KV_B_ROWS = Dim("num_heads*(qk_nope_head_dim+v_head_dim)", _kv_b_rows)
O_COLS = Dim("num_heads*v_head_dim", lambda spec: spec.num_heads * _mla(spec).v_head_dim)

EXPERTS = Dim("num_experts", lambda spec: _moe(spec).num_experts)
EXPERT_FFN = Dim("moe_ffn_size", lambda spec: _moe(spec).ffn_size)
SHARED_FFN = Dim("shared_ffn_size", lambda spec: _moe(spec).shared_ffn_size)

INDEX_HEADS = Dim("index_n_heads", lambda spec: _dsa(spec).num_heads)
INDEX_HEAD = Dim("index_head_dim", lambda spec: _dsa(spec).head_dim)
INDEX_ROWS = Dim("index_n_heads*index_head_dim", lambda spec: _dsa(spec).num_heads * _dsa(spec).head_dim)
