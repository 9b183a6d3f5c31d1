"""Differences between the two *runtimes* that are no differences of weights, and their alignment.

Each function says what it changed, for the report: a parity figure means nothing without it.
"""

from __future__ import annotations

from typing import Any

LATENT_NORM_EPSILON = 1e-6
"""transformers builds the q and kv latent norms of MLA with this, whatever ``rms_norm_eps``."""
INDEXER_NORM_EPSILON = 1e-6
"""transformers builds the indexer's ``k_norm`` with this, whatever ``rms_norm_eps``."""


def align_model_epsilons(model: Any) -> list[str]:
    """Set the latent norms' and the indexer norm's epsilon of a Megatron model to transformers'.

    megatron-core uses ``layernorm_epsilon`` for them. Returns one line for each kind changed.
    """
    changed: dict[str, int] = {}
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        wanted = {
            "linear_q_up_proj": LATENT_NORM_EPSILON,
            "linear_kv_up_proj": LATENT_NORM_EPSILON,
            "k_norm": INDEXER_NORM_EPSILON,
        }.get(leaf)
        if leaf in ("q_layernorm", "kv_layernorm") and model.config.multi_latent_attention:
            wanted = LATENT_NORM_EPSILON
        if wanted is not None and getattr(module, "eps", wanted) != wanted:
            what = f"{leaf}: epsilon {module.eps:g} -> {wanted:g}"
            module.eps = wanted
            changed[what] = changed.get(what, 0) + 1
    return _lines(changed)


def align_hf_epsilons(model: Any, epsilon: float) -> list[str]:
    """Set the latent norms' epsilon of a transformers model, the other way to align the two.

    With ``rms_norm_eps`` it computes what megatron-core and the serving engines compute.
    Returns one line for each kind changed.
    """
    changed: dict[str, int] = {}
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if leaf in ("q_a_layernorm", "kv_a_layernorm") and module.variance_epsilon != epsilon:
            what = f"{leaf}: epsilon {module.variance_epsilon:g} -> {epsilon:g}"
            module.variance_epsilon = epsilon
            changed[what] = changed.get(what, 0) + 1
    return _lines(changed)


def feed_indexer_normalised_latent(model: Any) -> list[str]:
    """Give the indexer the normalised q latent where megatron-core gives it the raw one.

    megatron-core up to 0.18 fuses the q latent norm into the up projection and passes the
    latent from before it to the indexer, so its selection differs from transformers' for any
    gamma other than 1. From 0.19 there is no fused norm and nothing is done.
    """
    aligned = 0
    for module in model.modules():
        up_projection = getattr(module, "linear_q_up_proj", None)
        indexed = getattr(getattr(module, "core_attention", None), "indexer", None)
        if indexed is None or not hasattr(up_projection, "layer_norm_weight"):
            continue
        module.core_attention.register_forward_pre_hook(_normalise_latent(up_projection), with_kwargs=True)
        aligned += 1
    return [f"indexer fed the normalised q latent ({aligned} layers)"] if aligned else []


def _lines(changed: dict[str, int]) -> list[str]:
    return [f"{what} ({count} layers)" for what, count in changed.items()]


def _normalise_latent(up_projection: Any) -> Any:
    def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {"qr": up_projection.normalise(kwargs["qr"])}

    return hook
