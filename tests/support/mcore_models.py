"""Tiny models of each family: a transformers model with every weight random, and its ``ModelSpec``.

The sizes are chosen to expose mistakes: heads, groups, ranks and widths all differ, the weights
are large enough for attention, routing and selection to be far from uniform, and no norm, bias
or router bias keeps its neutral start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from glmconv.tables.spec import Dsa, Mla, ModelSpec, Moe, Rope
from glmconv.verify.mcore.align import align_hf_epsilons
from glmconv.verify.mcore.forward import hf_logprobs

SEED = 20250
VOCAB = 160
TOKENS = 48
INDEX_TOP_K = 8

FAMILIES = ("qwen3", "qwen3_moe", "glm4_moe", "glm_moe_dsa", "glm_moe_dsa_shared")


@dataclass(frozen=True, slots=True)
class Tiny:
    """What a test needs: the transformers config and the spec that a bridge would derive from it."""

    family: str
    config: dict[str, Any]
    spec: ModelSpec


def tiny(family: str) -> Tiny:
    """The tiny model of ``family``, one of ``FAMILIES``."""
    makers: dict[str, Callable[[], Tiny]] = {
        "qwen3": _qwen3,
        "qwen3_moe": _qwen3_moe,
        "glm4_moe": _glm4_moe,
        "glm_moe_dsa": partial(_glm_moe_dsa, shared=False),
        "glm_moe_dsa_shared": partial(_glm_moe_dsa, shared=True),
    }
    return makers[family]()


def hf_model(model: Tiny, *, extra_layers: int = 0, seed: int = SEED) -> Any:
    """The fp32 transformers model with random weights; the same seed gives the same weights.

    ``extra_layers`` more layers of the last kind follow: the blocks of MTP layers.
    """
    import transformers

    raw = dict(model.config)
    layers = raw["num_hidden_layers"] = raw["num_hidden_layers"] + extra_layers
    if "mlp_layer_types" in raw:
        raw["mlp_layer_types"] = [*raw["mlp_layer_types"], *["sparse"] * extra_layers][:layers]
    config = transformers.AutoConfig.for_model(**raw)
    torch.manual_seed(seed)
    auto: Any = transformers.AutoModelForCausalLM
    built = auto.from_config(config, attn_implementation="eager")
    built = built.to(torch.float32).eval().requires_grad_(False)
    for name, tensor in sorted([*built.named_parameters(), *built.named_buffers()]):
        if tensor.is_floating_point() and "inv_freq" not in name:
            tensor.copy_(_random(name, tensor))
    if model.spec.tied:
        built.tie_weights()
    return built


@dataclass(frozen=True, slots=True)
class Oracle:
    """What transformers computes: ``logprobs`` ``[batch, seq, vocab]``, of the MTP layer too.

    ``weights`` has transformers' names, the MTP layer's as layer ``num_hidden_layers``.
    """

    weights: dict[str, Tensor]
    logprobs: Tensor
    mtp_logprobs: Tensor | None


def oracle(model: Tiny, ids: Tensor) -> Oracle:
    """Run the transformers model, and the MTP layer by hand around transformers' own block.

    Position i of an MTP layer sees the final hidden state of token i and the embedding of token
    i + 1, and predicts token i + 2 (DeepSeek-V3 technical report, section 2.2).
    """
    layers, count = model.spec.num_layers, model.spec.num_mtp
    hf = hf_model(model, extra_layers=count)
    weights = {name: tensor.clone() for name, tensor in hf.state_dict().items()}
    every = hf.model.layers
    hf.model.layers = every[:layers]
    hidden = hf.model(input_ids=ids, use_cache=False).last_hidden_state
    logprobs = hf.lm_head(hidden).float().log_softmax(-1)
    if not count:
        return Oracle(weights, logprobs, None)
    size, epsilon = model.spec.hidden_size, model.spec.norm_eps
    names = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight", "eh_proj.weight")
    shapes = ((size,), (size,), (size,), (size, 2 * size))
    own = {name: _random(name, torch.empty(shape)) for name, shape in zip(names, shapes, strict=True)}
    weights |= {f"model.layers.{layers}.{name}": tensor for name, tensor in own.items()}
    following = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], dim=1)
    halves = [
        functional.rms_norm(hf.model.embed_tokens(following), (size,), own["enorm.weight"], epsilon),
        functional.rms_norm(hidden, (size,), own["hnorm.weight"], epsilon),
    ]
    hf.model.layers = every[layers:]
    hf.model.norm.weight.copy_(own["shared_head.norm.weight"])
    joined = functional.linear(torch.cat(halves, dim=-1), own["eh_proj.weight"])
    out = hf.model(inputs_embeds=joined, use_cache=False).last_hidden_state
    return Oracle(weights, logprobs, hf.lm_head(out).float().log_softmax(-1))


def engine_logprobs(model: Tiny, ids: Tensor) -> Tensor:
    """As ``Oracle.logprobs``, with the epsilons of serving engines (and of megatron-core) in MLA."""
    hf = hf_model(model, extra_layers=model.spec.num_mtp)
    align_hf_epsilons(hf, model.spec.norm_eps)
    hf.model.layers = hf.model.layers[: model.spec.num_layers]
    return hf_logprobs(hf, ids)


def _random(name: str, tensor: Tensor) -> Tensor:
    """Gammas around 1, router bias and offsets around 0, weights so that activations stay near 1."""
    noise: Tensor = torch.randn(tensor.shape)
    if "norm" in name and name.endswith("weight"):
        return 1.0 + 0.3 * noise
    if tensor.dim() == 1:
        return 0.3 * noise
    if "embed_tokens" in name:
        return 0.2 * noise
    weight: Tensor = noise * (1.1 / tensor.shape[-1] ** 0.5)
    return weight


def tokens(length: int = TOKENS, batch: int = 2, *, seed: int = SEED) -> Tensor:
    """Random token ids ``[batch, length]``."""
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def _rope(theta: float, partial: float | None = None) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    return rope if partial is None else rope | {"partial_rotary_factor": partial}


def _shared_fields() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _spec(config: dict[str, Any], **fields: Any) -> ModelSpec:
    return ModelSpec(
        model_type=config["model_type"],
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        num_groups=config["num_key_value_heads"],
        ffn_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        norm_eps=config["rms_norm_eps"],
        tied=config["tie_word_embeddings"],
        max_positions=config["max_position_embeddings"],
        dtype="float32",
        raw=config,
        **fields,
    )


def _qwen3() -> Tiny:
    config = _shared_fields() | {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "intermediate_size": 112,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "rope_parameters": _rope(1e6),
    }
    return Tiny("qwen3", config, _spec(config, head_dim=20, rope=Rope(1e6), qk_norm=True))


def _qwen3_moe() -> Tiny:
    config = _shared_fields() | {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "intermediate_size": 112,
        "moe_intermediate_size": 40,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rope_parameters": _rope(1e6),
    }
    moe = Moe(num_experts=8, ffn_size=40, top_k=3)
    spec = _spec(config, head_dim=24, rope=Rope(1e6), qk_norm=True, moe=moe, moe_layers=(True, True))
    return Tiny("qwen3_moe", config, spec)


def _glm4_moe() -> Tiny:
    config = _shared_fields() | {
        "model_type": "glm4_moe",
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 112,
        "moe_intermediate_size": 40,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
        "use_qk_norm": True,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "rope_parameters": _rope(1e6, 0.5),
    }
    moe = Moe(8, 40, 3, shared_ffn_size=40, router_bias=True, score_function="sigmoid", scaling=2.5)
    spec = _spec(
        config,
        head_dim=16,
        rope=Rope(1e6, partial_factor=0.5),
        qkv_bias=True,
        qk_norm=True,
        moe=moe,
        moe_layers=(False, True, True, True),
        num_mtp=1,
    )
    return Tiny("glm4_moe", config, spec)


def _glm_moe_dsa(*, shared: bool) -> Tiny:
    """``shared``: layers 2 and 4 (from 0) reuse the selection of the layer before (freq 2, offset 2)."""
    layers, freq, offset = (6, 2, 2) if shared else (4, 1, 0)
    full = tuple(max(layer - offset + 1, 0) % freq == 0 for layer in range(layers))
    config = _shared_fields() | {
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 40,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 20,
        "qk_rope_head_dim": 16,
        "qk_head_dim": 36,
        "v_head_dim": 28,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": INDEX_TOP_K,
        "indexer_rope_interleave": True,
        "intermediate_size": 112,
        "moe_intermediate_size": 40,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1),
        "num_nextn_predict_layers": 0 if shared else 1,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rope_parameters": _rope(1e6),
    }
    if shared:
        config["indexer_types"] = ["full" if owns else "shared" for owns in full]
    spec = _spec(
        config,
        head_dim=36,
        rope=Rope(1e6, interleaved=True),
        mla=Mla(40, 24, 20, 16, 28),
        moe=Moe(8, 40, 3, shared_ffn_size=40, router_bias=True, score_function="sigmoid", scaling=2.5),
        moe_layers=(False,) + (True,) * (layers - 1),
        dsa=Dsa(4, 32, INDEX_TOP_K, full, freq, offset, rope_interleave=True),
        num_mtp=0 if shared else 1,
    )
    return Tiny("glm_moe_dsa_shared" if shared else "glm_moe_dsa", config, spec)
