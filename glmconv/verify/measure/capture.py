"""What a layer chose while it ran: token selections of an indexer, experts of a router.

Both runtimes choose with ``topk``. A torch function mode notes the calls whose shapes say what
they choose, so no copy of either runtime's arithmetic is needed, whatever its version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from glmconv.tables.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Choice:
    """``scores`` ``[batch, seq, n]`` that were chosen from and the ``indices`` chosen, ``[batch, seq, k]``.

    Of an indexer ``n`` is ``seq``, of a router the number of experts.
    """

    scores: Tensor
    indices: Tensor


class Choices(TorchFunctionMode):
    """While it is entered: ``selection`` and ``routing`` hold the last choice of each kind.

    ``seq_first``: the runtime's tokens are in the order ``[seq, batch]``.
    """

    def __init__(self, spec: ModelSpec, batch: int, seq: int, index_topk: int, *, seq_first: bool) -> None:
        super().__init__()
        self.batch, self.seq, self.seq_first = batch, seq, seq_first
        self.index_topk = min(index_topk, seq)
        self.experts = spec.moe.num_experts if spec.moe else 0
        self.top_k = spec.moe.top_k if spec.moe else 0
        self.selection: Choice | None = None
        self.routing: Choice | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        out = func(*args, **options)
        if func is torch.topk or func is Tensor.topk:
            scores: Tensor = args[0] if args else options["input"]
            self._note(scores, args[1] if len(args) > 1 else options["k"], out[1])
        return out

    def _note(self, scores: Tensor, k: int, indices: Tensor) -> None:
        if scores.dim() == 3 and scores.shape[1:] == (self.seq, self.seq) and k == self.index_topk:
            self.selection = Choice(scores, indices)
        elif scores.dim() == 2 and scores.shape[-1] == self.experts and k == self.top_k:
            self.routing = Choice(self._by_token(scores), self._by_token(indices))

    def _by_token(self, flat: Tensor) -> Tensor:
        """``[tokens, n]`` to ``[batch, seq, n]``."""
        if self.seq_first:
            return flat.reshape(self.seq, self.batch, -1).transpose(0, 1)
        return flat.reshape(self.batch, self.seq, -1)


@dataclass(frozen=True, slots=True)
class Result:
    """What one stage gave: ``hidden`` ``[batch, seq, width]`` and what it chose on the way.

    ``selected`` is the token selection in force, ``[batch, seq, k]``: the layer's own, or the
    one that it shares. ``raw_selection`` is what the runtime would select by itself where an
    alignment changed its indexer's input.
    """

    hidden: Tensor
    selection: Choice | None = None
    selected: Tensor | None = None
    routing: Choice | None = None
    router_bias: Tensor | None = None
    raw_selection: Choice | None = None
