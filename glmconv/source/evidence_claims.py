"""The claims that a trainer's files make about a model, each beside what the spec holds.

How the trainer's word is read (``Fields``), what the spec holds, and whether a difference moves rows
or counts, so that tensors would be cut wrongly, or changes the forward pass alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from glmconv.tables.rope_args import scaling_kind, yarn_factor, yarn_mscales
from glmconv.tables.spec import Dsa, Mla, ModelSpec, Moe
from glmconv.tables.trainer_fields import PLAIN, STEPWISE, Fields, Scaling


def same(said: Any, held: Any) -> bool:
    if isinstance(said, (int, float)) and isinstance(held, (int, float)):
        return math.isclose(said, held, rel_tol=1e-9)
    return bool(said == held)


@dataclass(frozen=True, slots=True)
class Claim:
    """``names`` in the trainer's files, ``field`` of config.json. ``said`` or ``held`` None: no claim."""

    names: tuple[str, ...]
    field: str
    said: Callable[[Fields], Any]
    held: Callable[[ModelSpec], Any]
    moves: bool = True
    agrees: Callable[[Any, Any], bool] = same


def _number(names: str, field: str, held: Callable[[ModelSpec], Any], moves: bool = True) -> Claim:
    words = tuple(names.split())
    return Claim(words, field, lambda fields: fields.number(*words), held, moves)


def _flag(names: str, field: str, held: Callable[[ModelSpec], Any], moves: bool = True) -> Claim:
    words = tuple(names.split())
    return Claim(words, field, lambda fields: fields.flag(*words), held, moves)


def _only(when: Callable[[Fields], Any], claim: Claim) -> Claim:
    """The claim where its fields are in use; else they are defaults."""
    return Claim(
        claim.names,
        claim.field,
        lambda fields: claim.said(fields) if when(fields) else None,
        claim.held,
        claim.moves,
        claim.agrees,
    )


def _grouped(fields: Fields) -> bool:
    return not fields.latent


def _with_experts(fields: Fields) -> bool:
    return fields.experts is not None


def _mla(get: Callable[[Mla], Any]) -> Callable[[ModelSpec], Any]:
    return lambda spec: None if spec.mla is None else get(spec.mla)


def _moe(get: Callable[[Moe], Any]) -> Callable[[ModelSpec], Any]:
    return lambda spec: None if spec.moe is None else get(spec.moe)


def _dsa(get: Callable[[Dsa], Any]) -> Callable[[ModelSpec], Any]:
    return lambda spec: None if spec.dsa is None else get(spec.dsa)


def _plain(get: Callable[[ModelSpec], Any]) -> Callable[[ModelSpec], Any]:
    """Of models without latent attention."""
    return lambda spec: None if spec.mla is not None else get(spec)


def _scaling(spec: ModelSpec) -> Scaling | None:
    """None for kinds that no trainer's args can say."""
    block = spec.rope.scaling
    kind, factor = scaling_kind(block), block.get("factor")
    if kind == "yarn":
        factor = yarn_factor(block, spec.max_positions)
    if kind == "default" or factor == 1:
        return PLAIN
    if kind not in ("yarn", "linear", STEPWISE) or not isinstance(factor, (int, float)):
        return None
    return kind, float(factor)


def _yarn(name: str, held: Callable[[ModelSpec], float]) -> Claim:
    def in_use(spec: ModelSpec) -> float | None:
        scaling = _scaling(spec)
        return held(spec) if scaling is not None and scaling[0] == "yarn" else None

    return Claim((f"yarn_{name}", name), name, lambda fields: fields.yarn(name), in_use, False)


def _mscales(spec: ModelSpec) -> tuple[float, float]:
    return yarn_mscales(spec.rope.scaling, spec.max_positions)


CLAIMS: tuple[Claim, ...] = (
    _number("num_layers", "num_hidden_layers", lambda spec: spec.num_layers),
    _number("hidden_size", "hidden_size", lambda spec: spec.hidden_size),
    _number("num_attention_heads", "num_attention_heads", lambda spec: spec.num_heads),
    Claim(
        ("num_query_groups",),
        "num_key_value_heads",
        Fields.groups,
        _plain(lambda spec: spec.num_groups),
    ),
    _only(_grouped, _number("kv_channels", "head_dim", _plain(lambda spec: spec.head_dim))),
    # A model whose every layer has experts has no other ffn: the field is a default there.
    _number(
        "ffn_hidden_size",
        "intermediate_size",
        lambda spec: None if all(spec.is_moe(i) for i in range(spec.num_layers)) else spec.ffn_size,
    ),
    Claim(
        ("vocab_size",),
        "vocab_size",
        lambda fields: fields.natural("vocab_size"),
        lambda spec: spec.vocab_size,
        agrees=lambda said, held: said <= held,
    ),
    Claim(
        ("padded_vocab_size",),
        "vocab_size",
        lambda fields: fields.natural("padded_vocab_size"),
        lambda spec: spec.vocab_size,
        agrees=lambda said, held: said >= held,
    ),
    _flag("untie_embeddings_and_output_weights", "not tie_word_embeddings", lambda spec: not spec.tied),
    _flag("share_embeddings_and_output_weights", "tie_word_embeddings", lambda spec: spec.tied),
    Claim(("mtp_num_layers",), "num_nextn_predict_layers", Fields.mtp_layers, lambda spec: spec.num_mtp),
    _flag("add_bias_linear", "bias of linear layers", lambda spec: False),
    _only(_grouped, _flag("add_qkv_bias", "attention_bias", _plain(lambda spec: spec.qkv_bias))),
    _only(_grouped, _flag("qk_layernorm", "use_qk_norm", _plain(lambda spec: spec.qk_norm))),
    _flag("swiglu gated_linear_unit", "hidden_act", lambda spec: True),
    # Such weights are stored minus one; no table of ours adds it.
    _flag("layernorm_zero_centered_gamma apply_layernorm_1p", "norms around zero", lambda spec: False),
    _flag("multi_latent_attention", "kv_lora_rank", lambda spec: spec.mla is not None),
    *(
        _only(lambda fields: fields.latent, _number(name, field, held))
        for name, field, held in (
            ("q_lora_rank", "q_lora_rank", _mla(lambda mla: mla.q_lora_rank)),
            ("kv_lora_rank", "kv_lora_rank", _mla(lambda mla: mla.kv_lora_rank)),
            ("qk_head_dim", "qk_nope_head_dim", _mla(lambda mla: mla.qk_nope_head_dim)),
            ("qk_pos_emb_head_dim", "qk_rope_head_dim", _mla(lambda mla: mla.qk_rope_head_dim)),
            ("v_head_dim", "v_head_dim", _mla(lambda mla: mla.v_head_dim)),
        )
    ),
    _number(
        "num_experts num_moe_experts",
        "number of experts",
        lambda spec: spec.moe.num_experts if spec.moe else 0,
    ),
    Claim(
        ("moe_layer_freq",),
        "layers with experts",
        Fields.moe_layers,
        lambda spec: spec.moe_layers if spec.moe else None,
    ),
    *(
        _only(_with_experts, _number(name, field, _moe(held), moves))
        for name, field, held, moves in (
            ("moe_ffn_hidden_size", "moe_intermediate_size", lambda moe: moe.ffn_size, True),
            (
                "moe_shared_expert_intermediate_size",
                "size of the shared expert",
                lambda moe: moe.shared_ffn_size,
                True,
            ),
            ("moe_router_topk", "num_experts_per_tok", lambda moe: moe.top_k, False),
        )
    ),
    _only(
        _with_experts,
        Claim(
            ("moe_router_score_function",),
            "scoring_func",
            lambda fields: fields.text("moe_router_score_function"),
            _moe(lambda moe: moe.score_function),
            False,
        ),
    ),
    _only(
        _with_experts,
        _flag(
            "moe_router_enable_expert_bias", "bias of the router", _moe(lambda moe: moe.router_bias), False
        ),
    ),
    # Read by Megatron in the softmax branch only.
    _only(
        lambda fields: _with_experts(fields) and fields.text("moe_router_score_function") == "softmax",
        _flag(
            "moe_router_pre_softmax",
            "norm_topk_prob (the opposite)",
            _moe(lambda moe: not moe.normalise if moe.score_function == "softmax" else None),
            False,
        ),
    ),
    Claim(
        ("moe_router_topk_scaling_factor",),
        "routed_scaling_factor",
        Fields.router_scaling,
        _moe(lambda moe: moe.scaling),
        False,
    ),
    Claim(
        ("moe_router_num_groups",),
        "n_group",
        lambda fields: fields.router_groups("moe_router_num_groups"),
        _moe(lambda moe: moe.num_groups),
        False,
    ),
    Claim(
        ("moe_router_group_topk",),
        "topk_group",
        lambda fields: fields.router_groups("moe_router_group_topk"),
        _moe(lambda moe: moe.top_k_groups if moe.num_groups > 1 else 1),
        False,
    ),
    *(
        _only(lambda fields: fields.sparse, _number(name, field, _dsa(held), moves))
        for name, field, held, moves in (
            ("dsa_indexer_n_heads", "index_n_heads", lambda dsa: dsa.num_heads, True),
            ("dsa_indexer_head_dim", "index_head_dim", lambda dsa: dsa.head_dim, True),
            ("dsa_indexer_topk", "index_topk", lambda dsa: dsa.top_k, False),
        )
    ),
    Claim(
        ("dsa_indexer_topk_freq",),
        "layers with an indexer of their own",
        Fields.indexers,
        _dsa(lambda dsa: dsa.full),
    ),
    _only(
        lambda fields: fields.sparse,
        _flag(
            "dsa_indexer_rope_interleaved",
            "indexer_rope_interleave",
            _dsa(lambda dsa: dsa.rope_interleave),
            False,
        ),
    ),
    # miles stores the indexer's rows in another order where this is set.
    _flag("indexer_rope_interleave", "indexer_rope_interleave", _dsa(lambda dsa: dsa.rope_interleave)),
    _number("layernorm_epsilon norm_epsilon", "rms_norm_eps", lambda spec: spec.norm_eps, False),
    Claim(
        ("normalization",),
        "kind of norm",
        lambda fields: fields.text("normalization"),
        lambda spec: "RMSNorm",
        False,
    ),
    _only(lambda fields: fields.rotates, _number("rotary_base", "rope_theta", lambda s: s.rope.theta, False)),
    _only(
        lambda fields: fields.rotates and not fields.latent,
        _number("rotary_percent", "partial_rotary_factor", _plain(lambda s: s.rope.partial_factor), False),
    ),
    _only(
        lambda fields: fields.rotates and not fields.latent,
        _flag("rotary_interleaved", "interleaved rope", _plain(lambda s: s.rope.interleaved), False),
    ),
    Claim(
        ("position_embedding_type", "rope_type", "use_rope_scaling", "rope_scaling"),
        "rope_scaling",
        Fields.scaling,
        _scaling,
        False,
    ),
    _yarn("beta_fast", lambda spec: spec.rope.scaling.get("beta_fast") or 32.0),
    _yarn("beta_slow", lambda spec: spec.rope.scaling.get("beta_slow") or 1.0),
    _yarn("mscale", lambda spec: _mscales(spec)[0]),
    _yarn("mscale_all_dim", lambda spec: _mscales(spec)[1]),
    _yarn(
        "original_max_position_embeddings",
        lambda spec: spec.rope.scaling.get("original_max_position_embeddings") or spec.max_positions,
    ),
    _only(
        lambda fields: fields.values.get("window_size") is not None,
        Claim(
            ("window_size",),
            "use_sliding_window",
            lambda fields: True,
            lambda spec: bool(spec.raw.get("use_sliding_window")),
            False,
        ),
    ),
)
