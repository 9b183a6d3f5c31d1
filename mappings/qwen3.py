"""Qwen3 (dense) and Qwen3-MoE: grouped-query attention with qk-norm, no bias."""

from __future__ import annotations

from glmconv.tables.rules import TIED, Table, Tied
from mappings.common import (
    DENSE_MLP,
    EMBEDDING_AND_HEAD,
    GROUPED_QUERY_ATTENTION,
    ROTARY_BUFFERS,
    ROUTED_EXPERTS,
    STACKED_EXPERTS,
)

TIED_HEAD = (Tied("lm_head.weight", to="model.embed_tokens.weight", when=(TIED,)),)

DENSE_TABLE = Table(
    model_type="qwen3",
    rules=(*EMBEDDING_AND_HEAD, *GROUPED_QUERY_ATTENTION, *DENSE_MLP),
    drops=ROTARY_BUFFERS,
    tied=TIED_HEAD,
    stacked_layers=("mcore", "mcore-0.18", "slime", "miles"),
)

# slime and miles pass `moe_layer_freq` as a list, which makes their layers separate on disk.
MOE_TABLE = Table(
    model_type="qwen3_moe",
    rules=(*EMBEDDING_AND_HEAD, *GROUPED_QUERY_ATTENTION, *ROUTED_EXPERTS, *DENSE_MLP),
    hf_stacked=STACKED_EXPERTS,
    drops=ROTARY_BUFFERS,
    tied=TIED_HEAD,
    stacked_layers=("mcore", "mcore-0.18"),
)
