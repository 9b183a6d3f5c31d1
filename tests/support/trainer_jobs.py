"""What a trainer does with the args of a checkpoint, in the processes that ``mcore_run`` starts."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import Any

import torch

from glmconv.verify.mcore import compat
from glmconv.verify.mcore.parallel import runtime


@compat.installed()
def load_all(units: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Load every tensor of each unit with ``dist_checkpointing.load``, with its args; what was found.

    The state asked for is that of the metadata, so that a load reads every record.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    found = {}
    with runtime():
        for name, unit in units.items():
            asked = dist_checkpointing.load_tensors_metadata(unit)
            loaded = dist_checkpointing.load(asked, unit, strict=StrictHandling.LOG_ALL)
            args = (
                loaded["args"]
                if "args" in loaded
                else dist_checkpointing.load_common_state_dict(unit)["args"]
            )
            tensors = {key: value for key, value in loaded.items() if isinstance(value, torch.Tensor)}
            found[name] = {
                "fields": sorted(vars(args)),
                "tensors": len(tensors),
                "elements": sum(tensor.numel() for tensor in tensors.values()),
                "dtype": str(args.params_dtype),
                "config": _config(args),
            }
    return found


def _config(args: Namespace) -> dict[str, Any]:
    """Numbers of the ``TransformerConfig`` made of every field that args has (Megatron-LM, -Bridge)."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    names = {field.name for field in dataclasses.fields(kind)}
    values = {name: value for name, value in vars(args).items() if name in names}
    values["num_moe_experts"] = args.num_experts
    values["num_query_groups"] = args.num_query_groups if args.group_query_attention else None
    values |= {"pipeline_dtype": args.params_dtype, "cp_comm_type": args.cp_comm_type[0]}
    values |= {"gated_linear_unit": args.swiglu, "activation_func": torch.nn.functional.silu}
    made = kind(**values)
    return {name: getattr(made, name) for name in ("num_layers", "hidden_size", "layernorm_epsilon")}


ROTARY = (
    *("multi_latent_attention", "qk_pos_emb_head_dim", "kv_channels", "position_embedding_type", "rope_type"),
    *("rotary_base", "rotary_percent", "rotary_scaling_factor", "mscale", "mscale_all_dim", "beta_fast"),
    *("beta_slow", "original_max_position_embeddings", "yarn_original_max_position_embeddings"),
    *("yarn_beta_fast", "yarn_beta_slow", "yarn_correction_range_round_to_int", "use_rope_scaling"),
    *("rope_scaling_factor", "rotary_seq_len_interpolation_factor"),
)
"""The fields of args that the rotary embedding is made of."""


@compat.installed()
def rotary_angles(cases: dict[str, dict[str, Any]], positions: int) -> dict[str, Any]:
    """Angles (``[positions, channels / 2]``) and the factor of cos and sin that args give Megatron's code.

    The embedding is made as ``GPTModel`` and ``MultiLatentAttention`` make it of these fields.
    """
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    found = {}
    with runtime():
        for name, values in cases.items():
            args = Namespace(**values)
            width = args.qk_pos_emb_head_dim if args.multi_latent_attention else args.kv_channels
            factor: Any = 1.0
            if "yarn" in (args.position_embedding_type, args.rope_type):
                prefix = "" if args.multi_latent_attention else "yarn_"
                given = {
                    key: getattr(args, prefix + key)
                    for key in ("original_max_position_embeddings", "beta_fast", "beta_slow")
                }
                if not args.multi_latent_attention:
                    given["correction_range_round_to_int"] = args.yarn_correction_range_round_to_int
                embedding = YarnRotaryEmbedding(
                    width,
                    rotary_percent=args.rotary_percent,
                    rotary_base=args.rotary_base,
                    scaling_factor=args.rotary_scaling_factor,
                    mscale=args.mscale,
                    mscale_all_dim=args.mscale_all_dim,
                    use_cpu_initialization=True,
                    **given,
                )
                angles, factor = embedding(positions)
            else:
                plain = RotaryEmbedding(
                    width,
                    rotary_percent=args.rotary_percent,
                    rotary_base=args.rotary_base,
                    rope_scaling=args.use_rope_scaling,
                    rope_scaling_factor=args.rope_scaling_factor,
                    seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
                    use_cpu_initialization=True,
                )
                angles = plain(positions)
            half = angles.shape[-1] // 2
            found[name] = [angles.reshape(positions, -1)[:, :half].double().tolist(), float(factor)]
    return found
