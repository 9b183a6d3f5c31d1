"""GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7: grouped-query attention with bias, MoE, MTP."""

from __future__ import annotations

from glmconv.tables.rules import Table
from mappings.common import (
    DENSE_MLP,
    EMBEDDING_AND_HEAD,
    GROUPED_QUERY_ATTENTION,
    MTP_DUPLICATES,
    MULTI_TOKEN_PREDICTION,
    ROTARY_BUFFERS,
    ROUTED_EXPERTS,
    SHARED_EXPERT,
    STACKED_EXPERTS,
)

TABLE = Table(
    model_type="glm4_moe",
    rules=(
        *EMBEDDING_AND_HEAD,
        *GROUPED_QUERY_ATTENTION,
        *DENSE_MLP,
        *ROUTED_EXPERTS,
        *SHARED_EXPERT,
        *MULTI_TOKEN_PREDICTION,
    ),
    hf_stacked=STACKED_EXPERTS,
    drops=ROTARY_BUFFERS,
    tied=MTP_DUPLICATES,
)
