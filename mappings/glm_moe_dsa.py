"""GLM-5, GLM-5.1, GLM-5.2: MLA, DSA indexer (shared between layers in 5.2), MoE, MTP.

Base: megatron-core >= 0.19 (`experimental_attention_variant_module_specs.py`): separate latent
norms, indexer channels as in Hugging Face. megatron-core 0.16 to 0.18 fuses the latent norms and
rotates the last indexer channels; slime and miles hang the indexer directly under the attention.
"""

from __future__ import annotations

from glmconv.tables.dims import HIDDEN, INDEX_HEAD, INDEX_HEADS, INDEX_ROWS, Q_LORA
from glmconv.tables.hf import Hf
from glmconv.tables.rules import (
    HALF_SPLIT_INDEXER,
    INDEXER,
    INTERLEAVED_INDEXER,
    SHARES_INDEX,
    Drop,
    Rule,
    Table,
)
from glmconv.tables.transforms import RopeHalfSwap, Same
from mappings.common import (
    DENSE_MLP,
    EMBEDDING_AND_HEAD,
    FUSED_LATENT_NORMS,
    LATENT_ATTENTION,
    MTP_DUPLICATES,
    MULTI_TOKEN_PREDICTION,
    ROTARY_BUFFERS,
    ROUTED_EXPERTS,
    SEPARATE_LATENT_NORMS,
    SHARED_EXPERT,
    STACKED_EXPERTS,
)

WQ_B = Hf("{layer}.self_attn.indexer.wq_b.weight", INDEX_ROWS, Q_LORA)
WK = Hf("{layer}.self_attn.indexer.wk.weight", INDEX_HEAD, HIDDEN)
K_NORM_WEIGHT = Hf("{layer}.self_attn.indexer.k_norm.weight", INDEX_HEAD)
K_NORM_BIAS = Hf("{layer}.self_attn.indexer.k_norm.bias", INDEX_HEAD)
WEIGHTS_PROJ = Hf("{layer}.self_attn.indexer.weights_proj.weight", INDEX_HEADS, HIDDEN)

INDEXER_MCORE = (
    Rule("{layer}.self_attention.core_attention.indexer.linear_wq_b.weight", Same(WQ_B), (INDEXER,)),
    Rule("{layer}.self_attention.core_attention.indexer.linear_wk.weight", Same(WK), (INDEXER,)),
    Rule("{layer}.self_attention.core_attention.indexer.k_norm.weight", Same(K_NORM_WEIGHT), (INDEXER,)),
    Rule("{layer}.self_attention.core_attention.indexer.k_norm.bias", Same(K_NORM_BIAS), (INDEXER,)),
    Rule(
        "{layer}.self_attention.core_attention.indexer.linear_weights_proj.weight",
        Same(WEIGHTS_PROJ),
        (INDEXER,),
    ),
)

INDEXER_MCORE_0_18 = (
    Rule("{layer}.self_attention.core_attention.indexer.linear_wq_b.weight", RopeHalfSwap(WQ_B), (INDEXER,)),
    Rule("{layer}.self_attention.core_attention.indexer.linear_wk.weight", RopeHalfSwap(WK), (INDEXER,)),
    Rule(
        "{layer}.self_attention.core_attention.indexer.k_norm.weight",
        RopeHalfSwap(K_NORM_WEIGHT),
        (INDEXER,),
    ),
    Rule("{layer}.self_attention.core_attention.indexer.k_norm.bias", RopeHalfSwap(K_NORM_BIAS), (INDEXER,)),
)

INDEXER_SLIME = (
    Rule("{layer}.self_attention.wq_b.weight", RopeHalfSwap(WQ_B), (INDEXER,)),
    Rule("{layer}.self_attention.wk.weight", RopeHalfSwap(WK), (INDEXER,)),
    Rule("{layer}.self_attention.k_norm.weight", RopeHalfSwap(K_NORM_WEIGHT), (INDEXER,)),
    Rule("{layer}.self_attention.k_norm.bias", RopeHalfSwap(K_NORM_BIAS), (INDEXER,)),
    Rule("{layer}.self_attention.weights_proj.weight", Same(WEIGHTS_PROJ), (INDEXER,)),
)

# miles swaps only where the config says `indexer_rope_interleave`.
INDEXER_MILES = (
    Rule("{layer}.self_attention.wq_b.weight", RopeHalfSwap(WQ_B), (INTERLEAVED_INDEXER,)),
    Rule("{layer}.self_attention.wk.weight", RopeHalfSwap(WK), (INTERLEAVED_INDEXER,)),
    Rule("{layer}.self_attention.k_norm.weight", RopeHalfSwap(K_NORM_WEIGHT), (INTERLEAVED_INDEXER,)),
    Rule("{layer}.self_attention.k_norm.bias", RopeHalfSwap(K_NORM_BIAS), (INTERLEAVED_INDEXER,)),
    Rule("{layer}.self_attention.wq_b.weight", Same(WQ_B), (HALF_SPLIT_INDEXER,)),
    Rule("{layer}.self_attention.wk.weight", Same(WK), (HALF_SPLIT_INDEXER,)),
    Rule("{layer}.self_attention.k_norm.weight", Same(K_NORM_WEIGHT), (HALF_SPLIT_INDEXER,)),
    Rule("{layer}.self_attention.k_norm.bias", Same(K_NORM_BIAS), (HALF_SPLIT_INDEXER,)),
    Rule("{layer}.self_attention.weights_proj.weight", Same(WEIGHTS_PROJ), (INDEXER,)),
)

UNUSED_INDEXER = "the layer shares the index of an earlier layer; no runtime reads its own"

TABLE = Table(
    model_type="glm_moe_dsa",
    rules=(
        *EMBEDDING_AND_HEAD,
        *LATENT_ATTENTION,
        *SEPARATE_LATENT_NORMS,
        *INDEXER_MCORE,
        *DENSE_MLP,
        *ROUTED_EXPERTS,
        *SHARED_EXPERT,
        *MULTI_TOKEN_PREDICTION,
    ),
    overlays={
        "mcore-0.18": (*FUSED_LATENT_NORMS, *INDEXER_MCORE_0_18),
        "slime": (*FUSED_LATENT_NORMS, *INDEXER_SLIME),
        "miles": (*FUSED_LATENT_NORMS, *INDEXER_MILES),
    },
    hf_stacked=STACKED_EXPERTS,
    drops=(
        *ROTARY_BUFFERS,
        Drop("{layer}.self_attn.indexer.wq_b.weight", UNUSED_INDEXER, (SHARES_INDEX,), warn=True),
        Drop("{layer}.self_attn.indexer.wk.weight", UNUSED_INDEXER, (SHARES_INDEX,), warn=True),
        Drop("{layer}.self_attn.indexer.k_norm.weight", UNUSED_INDEXER, (SHARES_INDEX,), warn=True),
        Drop("{layer}.self_attn.indexer.k_norm.bias", UNUSED_INDEXER, (SHARES_INDEX,), warn=True),
        Drop("{layer}.self_attn.indexer.weights_proj.weight", UNUSED_INDEXER, (SHARES_INDEX,), warn=True),
    ),
    tied=MTP_DUPLICATES,
)
