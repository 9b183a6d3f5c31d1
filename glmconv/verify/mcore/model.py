"""A ``ModelSpec`` as megatron-core's ``GPTModel``.

The layers come from megatron-core's own Transformer Engine spec functions, so the model has
the parameter names that trainers write. Build inside ``glmconv.verify.mcore.parallel.runtime``.
"""

from __future__ import annotations

from typing import Any

from glmconv.basics.errors import UsageError
from glmconv.tables.spec import ModelSpec
from glmconv.verify.mcore import compat
from glmconv.verify.mcore.align import align_model_epsilons, feed_indexer_normalised_latent
from glmconv.verify.mcore.config import runtime_dialect, transformer_config
from glmconv.verify.mcore.parallel import SINGLE, Parallel

__all__ = ["block_spec", "build_model", "runtime_dialect", "transformer_config"]


def build_model(
    spec: ModelSpec,
    *,
    precision: str = "fp32",
    parallel: Parallel = SINGLE,
    index_topk: int | None = None,
    layer_keys: str = "auto",
    mtp: bool = True,
    padded_vocab_size: int | None = None,
    align_epsilons: bool = True,
    align_indexer_latent: bool = True,
) -> Any:
    """This rank's part of the ``GPTModel`` of ``spec``, in eval mode, with arbitrary weights.

    ``padded_vocab_size`` is the row count of embedding and head (default ``vocab_size``).
    ``align_epsilons`` gives the latent norms and the indexer's norm the epsilons that
    transformers hard-codes. ``align_indexer_latent`` feeds the indexer the normalised q latent
    where megatron-core (up to 0.18) feeds it the raw one; from 0.19 it changes nothing.
    Both align runtimes, not weights: ``alignments`` of the result lists what was done.

    Raises ``UsageError`` outside ``runtime`` and for what megatron-core cannot run.
    """
    if not compat.is_installed():
        raise UsageError("build_model was called outside glmconv.verify.mcore.parallel.runtime")
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = transformer_config(
        spec, precision=precision, parallel=parallel, index_topk=index_topk, layer_keys=layer_keys, mtp=mtp
    )
    block = block_spec(config)
    model = GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=padded_vocab_size or spec.vocab_size,
        max_sequence_length=spec.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=spec.tied,
        position_embedding_type="rope",
        rotary_percent=spec.rope.partial_factor,
        rotary_base=spec.rope.theta,
        mtp_block_spec=(
            get_gpt_mtp_block_spec(config, block, use_transformer_engine=True)
            if config.mtp_num_layers
            else None
        ),
    )
    model.eval().requires_grad_(False)
    if torch.cuda.is_available():
        # The router's weight is made on the CPU and moved later, as trainers do.
        model.cuda(torch.cuda.current_device())
    done = align_model_epsilons(model) if align_epsilons else []
    if align_indexer_latent:
        done += feed_indexer_normalised_latent(model)
    model.alignments = tuple(done)
    return model


def block_spec(config: Any) -> Any:
    """This pipeline stage's layers, by megatron-core's own TE spec function for the attention."""
    if config.experimental_attention_variant is None:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        return get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
        get_transformer_block_with_experimental_attention_variant_spec,
    )

    return get_transformer_block_with_experimental_attention_variant_spec(config)
