"""Log-probabilities of both runtimes over the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def megatron_logprobs(model: Any, tokens: Tensor) -> Tensor | None:
    """``[batch, seq]`` token ids to fp32 log-softmax ``[batch, seq, rows of the head]``.

    Every process of the layout calls it with the same tokens; ``seq`` must divide by tp. The
    result is on all ranks of the last pipeline stage, and None on the others. With a padded
    vocabulary, cut the logits (``megatron_logits``) before the softmax.
    """
    logits = megatron_logits(model, tokens)
    return None if logits is None else logits[0].log_softmax(-1)


def megatron_logits(model: Any, tokens: Tensor, vocab_size: int | None = None) -> list[Tensor] | None:
    """fp32 logits of the model, then of each MTP layer: ``[batch, seq, vocab]`` each.

    Position ``i`` of MTP layer ``k`` (from 0) predicts token ``i + k + 2``. ``vocab_size`` cuts
    padded rows off. Returned as by ``megatron_logprobs``.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    tokens = tokens.to(next(model.parameters()).device)
    captured: list[Tensor] = []
    hooks = []
    if model.post_process:
        # Cloned, because the cross entropy of the MTP layers works in place.
        hooks.append(
            model.output_layer.register_forward_hook(lambda *call: captured.append(call[2][0].clone()))
        )
    try:
        with torch.no_grad():
            _receive(model, tokens)
            hidden = model(
                tokens,
                torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens),
                causal_mask(tokens.shape[1], tokens.device),
                # megatron-core 0.16 computes the MTP losses whenever there are MTP layers.
                labels=tokens if model.config.mtp_num_layers and model.post_process else None,
            )
            if not parallel_state.is_pipeline_last_stage():
                torch.distributed.send(
                    hidden.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank()
                )
    finally:
        for hook in hooks:
            hook.remove()
    if not captured:
        return None
    # The head is called for the MTP layers first, in order, and for the model last.
    ordered = [captured[-1], *captured[:-1]]
    full = [gather_from_tensor_model_parallel_region(part).transpose(0, 1).float() for part in ordered]
    return [part[..., :vocab_size].contiguous() for part in full]


def hf_logprobs(model: Any, tokens: Tensor) -> Tensor:
    """``[batch, seq]`` token ids to fp32 log-softmax ``[batch, seq, vocab]`` of a transformers model."""
    import torch

    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens.to(model.device), use_cache=False).logits
    return logits.float().log_softmax(-1)


def causal_mask(length: int, device: Any) -> Tensor:
    """``[1, 1, length, length]``, true where a position may not look (megatron-core's sense)."""
    import torch

    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None, None]


def _receive(model: Any, tokens: Tensor) -> None:
    """Hand a later pipeline stage its input, ``[seq / tp, batch, hidden]`` under sequence parallelism."""
    import torch
    from megatron.core import parallel_state

    if parallel_state.is_pipeline_first_stage():
        return
    config = model.config
    shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
    hidden = torch.empty(
        tokens.shape[1] // shards,
        tokens.shape[0],
        config.hidden_size,
        dtype=config.params_dtype,
        device=tokens.device,
    )
    torch.distributed.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
    model.set_input_tensor(hidden)
