"""The way through the whole Hugging Face model: what its own forward hands to each layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class ForwardPath:
    """transformers' own decoder with nothing in its layers: masks, positions and rotary embeddings.

    The decoder's ``forward`` makes them and chooses among them for each layer (full or local
    attention), so they are taken from it. ``choosing``: a layer gives its token selection beside
    the hidden states. The decoder may be without storage; it is changed.
    """

    def __init__(self, decoder: Any, config: Any, device: str, *, choosing: bool) -> None:
        self.decoder = decoder
        self.layers = [_Recorder(choosing) for _ in decoder.layers]
        decoder.rotary_emb = type(decoder.rotary_emb)(config).to(device)
        decoder.layers = nn.ModuleList(self.layers)
        decoder.norm, decoder.embed_tokens = nn.Identity(), nn.Identity()

    def arguments(self, number: int, hidden: Tensor) -> dict[str, Any]:
        """What layer ``number`` is called with beside its hidden states ``[batch, seq, width]``."""
        layer = self.layers[number]
        layer.seen = {}
        with torch.no_grad():
            self.decoder(inputs_embeds=hidden, use_cache=False)
        return layer.seen


class _Recorder(nn.Module):
    """A layer that notes its arguments and does nothing."""

    def __init__(self, choosing: bool) -> None:
        super().__init__()
        self.choosing = choosing
        self.seen: dict[str, Any] = {}

    def forward(self, hidden: Tensor, **options: Any) -> Any:
        self.seen = options
        return (hidden, None) if self.choosing else hidden
