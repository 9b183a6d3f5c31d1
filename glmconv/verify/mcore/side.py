"""The Megatron model, one stage at a time: megatron-core's own modules, filled and run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from glmconv.tables.spec import ModelSpec
from glmconv.verify.mcore.forward import causal_mask
from glmconv.verify.mcore.stages import Stage, StageBuilder
from glmconv.verify.mcore.weights import Weights
from glmconv.verify.measure.capture import Choice, Choices, Result

OWN, CROSS = "own", "cross"
"""Streams: the Megatron model's own hidden states, and those of the Hugging Face model."""


class MegatronSide:
    """Stages of the model that ``weights`` fills. Tensors are ``[batch, seq, width]``.

    Layers share a token selection as they do inside a ``GPTModel``: through the attention mask
    object, one for each stream.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        *,
        precision: str,
        index_topk: int | None,
        device: str,
        seq: int,
    ) -> None:
        self.spec, self.weights, self.device, self.seq = spec, weights, device, seq
        self.builder = StageBuilder(spec, precision, index_topk, device)
        self.index_topk = (index_topk or spec.dsa.top_k) if spec.dsa else 0
        self.masks = {stream: causal_mask(seq, device) for stream in (OWN, CROSS)}
        self.rotary: Tensor | None = None
        self.alignments: dict[str, int] = {}
        self._selected: dict[str, Tensor | None] = {OWN: None, CROSS: None}

    def stage(self, place: str, number: int = 0) -> Stage:
        """An empty stage: ``embedding``, ``layer``, ``head`` or ``mtp``."""
        made: Stage = (
            getattr(self.builder, place)(number)
            if place in ("layer", "mtp")
            else getattr(self.builder, place)()
        )
        for line in made.alignments:
            what = line.rpartition(" (")[0]
            self.alignments[what] = self.alignments.get(what, 0) + 1
        return made

    def filled(self, place: str, number: int = 0) -> Stage:
        """A stage with its weights."""
        stage = self.stage(place, number)
        self.weights.fill(stage)
        return stage

    def embed(self, tokens: Tensor, stage: Stage) -> Tensor:
        """Embeddings of ``[batch, seq]`` token ids; the rotary embedding is kept for the layers."""
        model: Any = stage.module
        with torch.no_grad():
            embedded = model.embedding(input_ids=tokens, position_ids=self._positions(tokens))
            if self.spec.mla is None and self.rotary is None:
                self.rotary = model.rotary_pos_emb(self.seq)
        return _batch_first(embedded)

    @contextmanager
    def layer(self, number: int) -> Iterator[Callable[[Tensor, str], Result]]:
        """Decoder layer ``number``: (hidden states, stream) to its result."""
        stage = self.filled("layer", number)
        yield lambda hidden, stream: self.run_layer(stage, number, hidden, stream)

    def run_layer(self, stage: Stage, number: int, hidden: Tensor, stream: str) -> Result:
        """Run a filled layer on ``[batch, seq, width]``."""
        block: Any = stage.module

        def call() -> Any:
            out = block(
                hidden_states=_seq_first(hidden),
                attention_mask=self.masks[stream],
                rotary_pos_emb=self.rotary,
            )
            return out[0] if isinstance(out, tuple) else out

        result = self._observed(block, hidden.shape[0], call)
        if self.spec.has_indexer(number):
            self._selected[stream] = result.selected
            return result
        return Result(result.hidden, None, self._selected[stream], result.routing, result.router_bias, None)

    def run_norm(self, stage: Stage, hidden: Tensor) -> Tensor:
        """The final norm of ``[batch, seq, width]``."""
        model: Any = stage.module
        with torch.no_grad():
            return _batch_first(model.decoder.final_layernorm(_seq_first(hidden)))

    def run_output(self, stage: Stage, normed: Tensor) -> Tensor:
        """Normed hidden states to fp32 logits ``[batch, seq, vocab]``."""
        model: Any = stage.module
        weight = model.shared_embedding_or_output_weight() if self.spec.tied else None
        with torch.no_grad():
            logits, _ = model.output_layer(_seq_first(normed), weight=weight)
        return _batch_first(logits).float()

    def run_mtp(self, stage: Stage, embedding: Stage, tokens: Tensor, hidden: Tensor) -> Result:
        """One MTP layer: token ids as its depth sees them and the normed hidden states before it."""
        layer: Any = stage.module
        embedder: Any = embedding.module

        def call() -> Any:
            out = layer(
                input_ids=tokens,
                position_ids=self._positions(tokens),
                # A copy: megatron-core sets requires_grad on what it is given.
                hidden_states=_seq_first(hidden).clone(),
                attention_mask=causal_mask(self.seq, self.device),
                rotary_pos_emb=self.rotary,
                embedding=embedder.embedding,
            )
            return out[0]

        return self._observed(layer, hidden.shape[0], call)

    def _observed(self, module: Any, batch: int, call: Callable[[], Any]) -> Result:
        """Run ``call`` and note what was chosen inside ``module``."""
        choices = Choices(self.spec, batch, self.seq, self.index_topk, seq_first=True)
        raw: dict[str, Tensor] = {}
        attention = _indexed_attention(module)
        hook = None
        if attention is not None and _is_realigned(module):
            hook = attention.register_forward_pre_hook(
                lambda _module, _args, kwargs: raw.update(x=kwargs["x"], qr=kwargs["qr"]),
                with_kwargs=True,
                prepend=True,
            )
        try:
            with torch.no_grad(), choices:
                hidden = call()
        finally:
            if hook is not None:
                hook.remove()
        own = choices.selection
        return Result(
            _batch_first(hidden),
            own,
            None if own is None else own.indices,
            choices.routing,
            _router_bias(module),
            self._select(attention, raw) if raw else None,
        )

    def _select(self, attention: Any, raw: dict[str, Tensor]) -> Choice:
        """What the runtime's own indexer selects from the latent that it is given by itself."""
        seq = raw["x"].shape[0]
        mask = torch.full((seq, seq), float("-inf"), device=raw["x"].device).triu(1)
        with torch.no_grad():
            scores, indices = attention.indexer.forward_with_scores(raw["x"], raw["qr"], mask=mask)
        return Choice(scores, indices)

    def _positions(self, tokens: Tensor) -> Tensor:
        return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)


def _indexed_attention(module: Any) -> Any:
    for one in module.modules():
        if getattr(one, "indexer", None) is not None:
            return one
    return None


def _is_realigned(module: Any) -> bool:
    """Whether the q latent norm is fused into the up projection, as up to megatron-core 0.18."""
    return any(
        hasattr(getattr(one, "linear_q_up_proj", None), "layer_norm_weight") for one in module.modules()
    )


def _router_bias(module: Any) -> Tensor | None:
    for one in module.modules():
        bias = getattr(one, "expert_bias", None)
        if isinstance(bias, Tensor):
            return bias
    return None


def _seq_first(hidden: Tensor) -> Tensor:
    return hidden.transpose(0, 1).contiguous()


def _batch_first(hidden: Tensor) -> Tensor:
    return hidden.transpose(0, 1).contiguous()
