"""Keys of ``config.json`` that no bridge reads: which are inert, which say what is computed.

A ledger for all families, as data. What stands in neither table is reported by its name, so nothing
in a config is passed over in silence. Facts: transformers 5.24 (``PreTrainedConfig`` and the config
classes of the families), 4.x for keys that it used to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

INERT: Mapping[str, tuple[str, ...]] = {
    "read elsewhere": ("model_type", "quantization_config", "compression_config"),
    "says where the file comes from": (
        "architectures",
        "auto_map",
        "custom_pipelines",
        "transformers_version",
        "_name_or_path",
        "name_or_path",
        "_commit_hash",
        "tokenizer_class",
        "processor_class",
        "finetuning_task",
        "task_specific_params",
        "unsloth_fixed",
        "unsloth_version",
    ),
    "names a token": (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "cls_token_id",
        "mask_token_id",
        "unk_token_id",
        "decoder_start_token_id",
        "prefix",
    ),
    "labels of a classifier": ("id2label", "label2id", "num_labels", "problem_type", "classifier_dropout"),
    "what a call returns": (
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "output_scores",
        "return_dict",
        "return_dict_in_generate",
        "use_return_dict",
    ),
    "how text is generated": (
        "max_length",
        "min_length",
        "max_new_tokens",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "diversity_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "num_beams",
        "num_beam_groups",
        "num_return_sequences",
        "early_stopping",
        "bad_words_ids",
        "suppress_tokens",
        "begin_suppress_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "exponential_decay_length_penalty",
        "remove_invalid_values",
    ),
    "how a runtime computes the same": (
        "use_cache",
        "cache_implementation",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "experts_implementation",
        "_experts_implementation",
        "chunk_size_feed_forward",
        "gradient_checkpointing",
        "num_logits_to_keep",
        "pretraining_tp",
        "ep_size",
        "torchscript",
        "tf_legacy_loss",
        "use_bfloat16",
        "is_decoder",
    ),
    "weights before training": ("initializer_range", "initializer_factor"),
    "a loss of training": (
        "router_aux_loss_coef",
        "router_z_loss_coef",
        "aux_loss_alpha",
        "seq_aux",
        "mtp_loss_scaling_factor",
    ),
}
"""Keys without a part in the forward pass, by the reason."""

_REASONS = {key: reason for reason, keys in INERT.items() for key in keys}


@dataclass(frozen=True, slots=True)
class Neutral:
    """A key that changes what is computed, unless its value is one of ``values`` (or null).

    ``otherwise``: in what way the model then differs from the one that is converted to.
    ``training``: only while it is trained.
    """

    values: tuple[Any, ...]
    otherwise: str
    training: bool = False


_DROPOUT = Neutral(
    (0,), "training would drop values out, the trainer's arguments written here do not", training=True
)
_BOUND = "a bound on scores or activations that no table or runtime argument carries"
_FACTOR = "a factor in the forward pass that no table or runtime argument carries"
_WINDOW = "attention would be local; the Megatron model attends to everything before a token"

FORWARD: Mapping[str, Neutral] = {
    "hidden_act": Neutral(("silu", "swish"), "the Megatron model's MLP is gated by SiLU"),
    "hidden_activation": Neutral(("silu", "swish"), "the Megatron model's MLP is gated by SiLU"),
    "mlp_bias": Neutral((False,), "the Megatron model's MLP has no bias"),
    "is_encoder_decoder": Neutral((False,), "the Megatron model is a decoder"),
    "add_cross_attention": Neutral((False,), "the Megatron model has no cross attention"),
    "tie_encoder_decoder": Neutral((False,), "the Megatron model is a decoder"),
    "pruned_heads": Neutral(({},), "the Megatron model has all heads"),
    "use_sliding_window": Neutral((False,), _WINDOW),
    "sliding_window": Neutral((), _WINDOW),
    "attention_chunk_size": Neutral((), _WINDOW),
    "no_rope_layers": Neutral(([],), "the Megatron model rotates in every layer"),
    "rope_interleave": Neutral((False,), "the Megatron model rotates the halves of a head, not pairs"),
    "rotary_pct": Neutral((1,), "the Megatron model rotates another share of a head"),
    "partial_rotary_factor": Neutral((1,), "the Megatron model rotates whole heads"),
    "final_logit_softcapping": Neutral((), _BOUND),
    "attn_logit_softcapping": Neutral((), _BOUND),
    "router_logit_softcapping": Neutral((0,), _BOUND),
    "logits_soft_cap": Neutral((0,), _BOUND),
    "clip_qkv": Neutral((), _BOUND),
    "swiglu_limit": Neutral((), _BOUND),
    "attention_multiplier": Neutral((), _FACTOR),
    "query_pre_attn_scalar": Neutral((), _FACTOR),
    "embedding_multiplier": Neutral((1,), _FACTOR),
    "residual_multiplier": Neutral((1,), _FACTOR),
    "logits_scaling": Neutral((1,), _FACTOR),
    "logit_scale": Neutral((1,), _FACTOR),
    "scale_emb": Neutral((1,), _FACTOR),
    "scale_depth": Neutral((), _FACTOR),
    "moe_layer_freq": Neutral((1,), "the Megatron model has experts in every layer after the dense ones"),
    "moe_router_dtype": Neutral(("float32", "fp32"), "both runtimes route in fp32"),
    "topk_method": Neutral(
        ("noaux_tc",), "the Megatron model's router corrects its choice by a bias, without another loss"
    ),
    "shared_expert_intermediate_size": Neutral((0,), "the Megatron model has no shared expert"),
    "attention_dropout": _DROPOUT,
    "hidden_dropout": _DROPOUT,
    "hidden_dropout_prob": _DROPOUT,
    "attention_probs_dropout_prob": _DROPOUT,
    "resid_pdrop": _DROPOUT,
    "embd_pdrop": _DROPOUT,
    "attn_pdrop": _DROPOUT,
    "router_jitter_noise": Neutral(
        (0,), "training would add noise to the router, the trainer's arguments written here do not", True
    ),
}
"""Keys with a part in what is computed that no table carries. A bridge that reads one decides itself."""

NESTED = ("text_config",)
"""Blocks that hold a model's fields once more; their keys are looked at one by one."""


def is_inert(key: str) -> bool:
    """Whether no value of ``key`` has a part in what the model computes."""
    return key in _REASONS


def is_neutral(value: Any, neutral: Neutral) -> bool:
    """Whether ``value`` leaves the forward pass as it is. True and 1 are two values here."""
    return value is None or any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral.values
    )
