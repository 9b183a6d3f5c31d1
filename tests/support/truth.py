"""What transformers computes from a checkpoint on disk, its MTP layer included."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional

from tests.support.checkpoints import load_config, load_tensors

TOKENS = 48


@dataclass(frozen=True, slots=True)
class Truth:
    """Log-probabilities ``[batch, seq, vocab]`` in fp32, of the MTP layer too where there is one."""

    tokens: Tensor
    logprobs: Tensor
    mtp_logprobs: Tensor | None


def tokens_for(config: dict[str, Any]) -> Tensor:
    """Random tokens ``[2, TOKENS]``: more than any tiny model's index_topk, so selection is sparse."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, config["vocab_size"], (2, TOKENS), generator=generator)


def load_hf(path: Path, config: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
    """The fp32 model and transformers' loading report; ``config`` replaces the raw one of the directory."""
    transformers.utils.logging.set_verbosity_error()
    raw = dict(config or load_config(path))
    parsed = transformers.AutoConfig.for_model(**raw)
    auto: Any = transformers.AutoModelForCausalLM
    model, report = auto.from_pretrained(
        path, config=parsed, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    return model.eval().requires_grad_(False), report


def truth_of(path: Path) -> Truth:
    """Run the checkpoint in ``path``.

    transformers drops MTP layers, so the block is loaded as one more decoder layer and the rest is
    composed by hand: position i of an MTP layer sees the final hidden state of token i and the
    embedding of token i + 1 (DeepSeek-V3 technical report, section 2.2).
    """
    config = load_config(path)
    ids = tokens_for(config)
    count = config.get("num_nextn_predict_layers") or 0
    layers = config["num_hidden_layers"]
    if not count:
        model, _ = load_hf(path)
        return Truth(ids, model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1), None)
    model, _ = load_hf(path, _longer(config, count))
    every = model.model.layers
    model.model.layers = every[:layers]
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    logprobs = model.lm_head(hidden).float().log_softmax(-1)
    own = {
        name.removeprefix(f"model.layers.{layers}."): tensor.float()
        for name, tensor in load_tensors(path).items()
        if name.startswith(f"model.layers.{layers}.")
    }
    size, epsilon = config["hidden_size"], config["rms_norm_eps"]
    following = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], dim=1)
    embedded = functional.rms_norm(model.model.embed_tokens(following), (size,), own["enorm.weight"], epsilon)
    normed = functional.rms_norm(hidden, (size,), own["hnorm.weight"], epsilon)
    model.model.layers = every[layers:]
    model.model.norm.weight.copy_(own["shared_head.norm.weight"])
    joined = functional.linear(torch.cat([embedded, normed], dim=-1), own["eh_proj.weight"])
    out = model.model(inputs_embeds=joined, use_cache=False).last_hidden_state
    return Truth(ids, logprobs, model.lm_head(out).float().log_softmax(-1))


def _longer(config: dict[str, Any], count: int) -> dict[str, Any]:
    """The config with ``count`` more decoder layers of the MTP block's kind."""
    longer = dict(config, num_hidden_layers=config["num_hidden_layers"] + count)
    for field, kind in (("mlp_layer_types", "sparse"), ("indexer_types", "full")):
        if longer.get(field) is not None:
            longer[field] = [*longer[field], *[kind] * count]
    return longer
