"""How far two models' log-probabilities are apart, gathered part by part."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

STEPS_PER_DECADE = 100
"""Resolution of the histogram that quantiles are read from: 2.3 %."""

LOWEST = -12
"""Decade under which differences count as zero."""


@dataclass(frozen=True, slots=True)
class LogprobParity:
    """Differences of fp32 log-probabilities over all positions and the whole vocabulary.

    KL divergences are means over positions, in nats. ``positions`` is how many there were.
    """

    max_abs: float
    p99_abs: float
    mean_abs: float
    kl_hf_megatron: float
    kl_megatron_hf: float
    argmax_agreement: float
    positions: int


class LogprobMeter:
    """Takes logits of both sides in parts, gives a :class:`LogprobParity`.

    Memory: a few copies of one part in float64.
    """

    def __init__(self) -> None:
        self.max_abs = self.sum_abs = self.kl = self.reverse_kl = 0.0
        self.count = self.positions = self.agreeing = 0
        self.histogram = torch.zeros((-LOWEST + 4) * STEPS_PER_DECADE, dtype=torch.float64)

    def add(self, hf: Tensor, megatron: Tensor) -> None:
        """Add logits ``[..., vocab]`` of the same positions."""
        p, q = hf.double().log_softmax(-1).flatten(0, -2), megatron.double().log_softmax(-1).flatten(0, -2)
        difference = torch.nan_to_num((p - q).abs(), nan=math.inf, posinf=math.inf)
        self.max_abs = max(self.max_abs, float(difference.max()))
        self.sum_abs += float(difference.sum())
        self.count += difference.numel()
        self.positions += p.shape[0]
        self.agreeing += int((p.argmax(-1) == q.argmax(-1)).sum())
        self.kl += float((p.exp() * (p - q)).sum())
        self.reverse_kl += float((q.exp() * (q - p)).sum())
        size = len(self.histogram)
        steps = ((difference.clamp(min=10.0**LOWEST).log10() - LOWEST) * STEPS_PER_DECADE).ceil()
        counted = torch.bincount(steps.clamp(max=size - 1).long().flatten(), minlength=size)
        self.histogram += counted.double().cpu()

    def result(self) -> LogprobParity:
        """The figures of everything added so far."""
        positions, count = max(1, self.positions), max(1, self.count)
        return LogprobParity(
            self.max_abs,
            min(self._quantile(0.99), self.max_abs),
            self.sum_abs / count,
            self.kl / positions,
            self.reverse_kl / positions,
            self.agreeing / positions,
            self.positions,
        )

    def _quantile(self, share: float) -> float:
        """Upper edge of the histogram's step that holds the quantile."""
        below = self.histogram.cumsum(0)
        step = int(torch.searchsorted(below, share * float(below[-1])))
        return 0.0 if step == 0 else float(10.0 ** (step / STEPS_PER_DECADE + LOWEST))
