"""Rows that several families share. Names and layouts: Megatron-Core's GPT specs for Transformer
Engine (`gpt_layer_specs.py`), as trainers write them to a torch_dist checkpoint."""

from __future__ import annotations

from glmconv.basics.dtypes import DType
from glmconv.tables.dims import (
    EXPERT_FFN,
    EXPERTS,
    FFN,
    HEAD,
    HIDDEN,
    KV_A_ROWS,
    KV_B_ROWS,
    KV_LORA,
    KV_ROWS,
    O_COLS,
    Q_B_ROWS,
    Q_LORA,
    Q_ROWS,
    SHARED_FFN,
    TWICE_HIDDEN,
    VOCAB,
)
from glmconv.tables.hf import Hf
from glmconv.tables.rules import (
    DENSE,
    MOE,
    QK_NORM,
    QKV_BIAS,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    UNTIED,
    Drop,
    Rule,
    Tied,
)
from glmconv.tables.transforms import GateUp, GroupedQKV, PadVocab, Same

EMBEDDING_AND_HEAD = (
    Rule("embedding.word_embeddings.weight", PadVocab(Hf("model.embed_tokens.weight", VOCAB, HIDDEN))),
    Rule("decoder.final_layernorm.weight", Same(Hf("model.norm.weight", HIDDEN))),
    Rule("output_layer.weight", PadVocab(Hf("lm_head.weight", VOCAB, HIDDEN)), when=(UNTIED,)),
)

GROUPED_QUERY_ATTENTION = (
    Rule(
        "{layer}.self_attention.linear_qkv.layer_norm_weight",
        Same(Hf("{layer}.input_layernorm.weight", HIDDEN)),
    ),
    Rule(
        "{layer}.self_attention.linear_qkv.weight",
        GroupedQKV(
            q=Hf("{layer}.self_attn.q_proj.weight", Q_ROWS, HIDDEN),
            k=Hf("{layer}.self_attn.k_proj.weight", KV_ROWS, HIDDEN),
            v=Hf("{layer}.self_attn.v_proj.weight", KV_ROWS, HIDDEN),
        ),
    ),
    Rule(
        "{layer}.self_attention.linear_qkv.bias",
        GroupedQKV(
            q=Hf("{layer}.self_attn.q_proj.bias", Q_ROWS),
            k=Hf("{layer}.self_attn.k_proj.bias", KV_ROWS),
            v=Hf("{layer}.self_attn.v_proj.bias", KV_ROWS),
        ),
        when=(QKV_BIAS,),
    ),
    Rule(
        "{layer}.self_attention.q_layernorm.weight",
        Same(Hf("{layer}.self_attn.q_norm.weight", HEAD)),
        when=(QK_NORM,),
    ),
    Rule(
        "{layer}.self_attention.k_layernorm.weight",
        Same(Hf("{layer}.self_attn.k_norm.weight", HEAD)),
        when=(QK_NORM,),
    ),
    Rule(
        "{layer}.self_attention.linear_proj.weight",
        Same(Hf("{layer}.self_attn.o_proj.weight", HIDDEN, Q_ROWS)),
    ),
)

# The main rope channels need no reordering: both sides rotate interleaved pairs.
LATENT_ATTENTION = (
    Rule("{layer}.input_layernorm.weight", Same(Hf("{layer}.input_layernorm.weight", HIDDEN))),
    Rule(
        "{layer}.self_attention.linear_q_down_proj.weight",
        Same(Hf("{layer}.self_attn.q_a_proj.weight", Q_LORA, HIDDEN)),
    ),
    Rule(
        "{layer}.self_attention.linear_q_up_proj.weight",
        Same(Hf("{layer}.self_attn.q_b_proj.weight", Q_B_ROWS, Q_LORA)),
    ),
    Rule(
        "{layer}.self_attention.linear_kv_down_proj.weight",
        Same(Hf("{layer}.self_attn.kv_a_proj_with_mqa.weight", KV_A_ROWS, HIDDEN)),
    ),
    Rule(
        "{layer}.self_attention.linear_kv_up_proj.weight",
        Same(Hf("{layer}.self_attn.kv_b_proj.weight", KV_B_ROWS, KV_LORA)),
    ),
    Rule(
        "{layer}.self_attention.linear_proj.weight",
        Same(Hf("{layer}.self_attn.o_proj.weight", HIDDEN, O_COLS)),
    ),
)

SEPARATE_LATENT_NORMS = (
    Rule(
        "{layer}.self_attention.q_layernorm.weight",
        Same(Hf("{layer}.self_attn.q_a_layernorm.weight", Q_LORA)),
    ),
    Rule(
        "{layer}.self_attention.kv_layernorm.weight",
        Same(Hf("{layer}.self_attn.kv_a_layernorm.weight", KV_LORA)),
    ),
)

FUSED_LATENT_NORMS = (
    Rule(
        "{layer}.self_attention.linear_q_up_proj.layer_norm_weight",
        Same(Hf("{layer}.self_attn.q_a_layernorm.weight", Q_LORA)),
    ),
    Rule(
        "{layer}.self_attention.linear_kv_up_proj.layer_norm_weight",
        Same(Hf("{layer}.self_attn.kv_a_layernorm.weight", KV_LORA)),
    ),
)

DENSE_MLP = (
    Rule(
        "{layer}.mlp.linear_fc1.layer_norm_weight",
        Same(Hf("{layer}.post_attention_layernorm.weight", HIDDEN)),
        when=(DENSE,),
    ),
    Rule(
        "{layer}.mlp.linear_fc1.weight",
        GateUp(
            gate=Hf("{layer}.mlp.gate_proj.weight", FFN, HIDDEN),
            up=Hf("{layer}.mlp.up_proj.weight", FFN, HIDDEN),
        ),
        when=(DENSE,),
    ),
    Rule(
        "{layer}.mlp.linear_fc2.weight",
        Same(Hf("{layer}.mlp.down_proj.weight", HIDDEN, FFN)),
        when=(DENSE,),
    ),
)

ROUTED_EXPERTS = (
    Rule(
        "{layer}.pre_mlp_layernorm.weight",
        Same(Hf("{layer}.post_attention_layernorm.weight", HIDDEN)),
        when=(MOE,),
    ),
    Rule("{layer}.mlp.router.weight", Same(Hf("{layer}.mlp.gate.weight", EXPERTS, HIDDEN)), when=(MOE,)),
    # A persistent fp32 buffer in Megatron-Core: bf16 would round away the spread that routes tokens.
    Rule(
        "{layer}.mlp.router.expert_bias",
        Same(Hf("{layer}.mlp.gate.e_score_correction_bias", EXPERTS, lock=DType.F32)),
        when=(ROUTER_BIAS,),
    ),
    Rule(
        "{layer}.mlp.experts.experts.linear_fc1.weight[{expert}]",
        GateUp(
            gate=Hf("{layer}.mlp.experts.{expert}.gate_proj.weight", EXPERT_FFN, HIDDEN),
            up=Hf("{layer}.mlp.experts.{expert}.up_proj.weight", EXPERT_FFN, HIDDEN),
        ),
        when=(MOE,),
    ),
    Rule(
        "{layer}.mlp.experts.experts.linear_fc2.weight[{expert}]",
        Same(Hf("{layer}.mlp.experts.{expert}.down_proj.weight", HIDDEN, EXPERT_FFN)),
        when=(MOE,),
    ),
)

SHARED_EXPERT = (
    Rule(
        "{layer}.mlp.shared_experts.linear_fc1.weight",
        GateUp(
            gate=Hf("{layer}.mlp.shared_experts.gate_proj.weight", SHARED_FFN, HIDDEN),
            up=Hf("{layer}.mlp.shared_experts.up_proj.weight", SHARED_FFN, HIDDEN),
        ),
        when=(SHARED_EXPERTS,),
    ),
    Rule(
        "{layer}.mlp.shared_experts.linear_fc2.weight",
        Same(Hf("{layer}.mlp.shared_experts.down_proj.weight", HIDDEN, SHARED_FFN)),
        when=(SHARED_EXPERTS,),
    ),
)

# Column halves of eh_proj: [embedding | hidden] on both sides.
MULTI_TOKEN_PREDICTION = (
    Rule("{mtp}.enorm.weight", Same(Hf("{mtp}.enorm.weight", HIDDEN))),
    Rule("{mtp}.hnorm.weight", Same(Hf("{mtp}.hnorm.weight", HIDDEN))),
    Rule("{mtp}.eh_proj.weight", Same(Hf("{mtp}.eh_proj.weight", HIDDEN, TWICE_HIDDEN))),
    Rule("{mtp}.final_layernorm.weight", Same(Hf("{mtp}.shared_head.norm.weight", HIDDEN))),
)

# Some releases repeat the embedding and the head inside the MTP layer; Megatron shares them.
MTP_DUPLICATES = (
    Tied("{mtp}.embed_tokens.weight", to="model.embed_tokens.weight"),
    Tied("{mtp}.shared_head.head.weight", to="lm_head.weight", when=(UNTIED,)),
)

# transformers 5 in memory: the experts of a layer in one tensor, without a `.weight` suffix.
STACKED_EXPERTS = (
    Rule(
        "{layer}.mlp.experts.gate_up_proj[{expert}]",
        GateUp(
            gate=Hf("{layer}.mlp.experts.{expert}.gate_proj.weight", EXPERT_FFN, HIDDEN),
            up=Hf("{layer}.mlp.experts.{expert}.up_proj.weight", EXPERT_FFN, HIDDEN),
        ),
        when=(MOE,),
    ),
    Rule(
        "{layer}.mlp.experts.down_proj[{expert}]",
        Same(Hf("{layer}.mlp.experts.{expert}.down_proj.weight", HIDDEN, EXPERT_FFN)),
        when=(MOE,),
    ),
)

ROTARY_BUFFERS = (
    Drop("{layer}.self_attn.rotary_emb.inv_freq", reason="computed from rope_theta, not a weight"),
)
