"""Final norm and head of both sides, a few positions at a time: logits of a long text are large."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

import torch
from torch import Tensor

from glmconv.verify.hf.side import HfSide
from glmconv.verify.mcore.side import MegatronSide
from glmconv.verify.measure.compare import hidden_error, relative_errors
from glmconv.verify.measure.logprobs import LogprobMeter, LogprobParity
from glmconv.verify.measure.report import PlaceReport
from glmconv.verify.measure.streams import Clock

POSITIONS = 256
"""Positions whose logits are held at a time."""

Hiddens = tuple[Tensor, Tensor, Tensor]
"""Hidden states of the Hugging Face model, of the Megatron model, and of Hugging Face in fp32."""


class Heads:
    """Both sides' norm and head, loaded; a context manager that drops them."""

    def __init__(self, hf: HfSide, megatron: MegatronSide, exact: HfSide | None, clock: Clock) -> None:
        self._sides = hf, megatron, exact
        self._clock = clock
        self._stack = ExitStack()

    def __enter__(self) -> Heads:
        hf, self.megatron, exact = self._sides
        with self._clock.of("megatron"):
            self.stage = self.megatron.filled("head")
        with self._clock.of("hf"):
            self.hf_norm, self.hf_logits = self._stack.enter_context(hf.head())
            self.exact = None if exact is None else self._stack.enter_context(exact.head())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        del self.stage, self.hf_norm, self.hf_logits, self.exact

    def normalise(self, theirs: Tensor, ours: Tensor, exact: Tensor) -> Hiddens:
        """The final norm, each side on its own hidden states."""
        return (
            self.hf_norm(theirs),
            self.megatron.run_norm(self.stage, ours),
            exact if self.exact is None else self.exact[0](exact),
        )

    def place(self, theirs: Tensor, ours: Tensor) -> PlaceReport:
        """Errors of the logits, relative and by token; ``theirs`` and ``ours`` are not normed yet."""
        same, running, other, floor = [], [], [], []
        for a, b in zip(torch.split(theirs, POSITIONS, 1), torch.split(ours, POSITIONS, 1), strict=True):
            hf, own = self.hf_logits(self.hf_norm(a)), self.megatron_logits(b)
            same.append(relative_errors(self.megatron_logits(a), hf))
            running.append(relative_errors(own, hf))
            other.append(relative_errors(own, self.hf_logits(self.hf_norm(b))))
            if self.exact is not None:
                floor.append(relative_errors(hf, self.exact[1](self.exact[0](a.float()))))
        summed = [
            hidden_error(torch.cat(one, dim=1)) if one else None for one in (same, running, other, floor)
        ]
        if summed[0] is None or summed[1] is None:
            raise ValueError("a model without tokens has no logits")
        return PlaceReport("head", "", summed[0], summed[1], same_other_input=summed[2], floor=summed[3])

    def megatron_logits(self, hidden: Tensor) -> Tensor:
        """Norm and head of the Megatron side on ``[batch, seq, width]``."""
        return self.megatron.run_output(self.stage, self.megatron.run_norm(self.stage, hidden))

    def compare(self, normed: Hiddens, skip_last: int = 0) -> tuple[LogprobParity, LogprobParity | None]:
        """Log-probabilities from normed hidden states, and the noise floor where there is one."""
        meter, floor = LogprobMeter(), LogprobMeter()
        stop = normed[0].shape[1] - skip_last
        parts = [torch.split(one[:, :stop], POSITIONS, 1) for one in normed]
        for theirs, ours, exact in zip(*parts, strict=True):
            with self._clock.of("hf"):
                hf = self.hf_logits(theirs)
            with self._clock.of("megatron"):
                megatron = self.megatron.run_output(self.stage, ours)
            meter.add(hf, megatron)
            if self.exact is not None:
                floor.add(self.exact[1](exact), hf)
        return meter.result(), None if self.exact is None else floor.result()
