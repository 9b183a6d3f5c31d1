"""Figures of how far two results are apart, in bounded memory, aware of ties.

Where scores are a hair apart, rounding decides which of two tokens or experts is chosen. A choice
is *right up to ties* where everything that one side chose and the other did not has a score
within ``tie`` (times the row's spread) of the last one chosen. What such a token computes then
says nothing about weights, so it is set aside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glmconv.verify.measure.capture import Choice, Result

ROWS = 256
"""Rows of a score matrix that are looked at together."""

BINS = 32
"""Parts of a sequence in which overlaps are averaged for the picture."""


@dataclass(frozen=True, slots=True)
class HiddenError:
    """Per token ``|ours - theirs| / |theirs|`` over the tokens that were not set aside."""

    max: float
    p99: float
    mean: float
    set_aside: float
    """Share of all tokens that chose another way."""


@dataclass(frozen=True, slots=True)
class SelectionParity:
    """Token selections of an indexer over rows that have more tokens than are selected.

    ``pearson`` of all scores under the causal mask; ``overlap`` is the share of selected tokens
    that both selected, ``with_ties`` counts ties as the same; ``by_position`` is the overlap in
    equal parts of the sequence.
    """

    sparse_rows: int
    pearson: float | None
    overlap: float
    with_ties: float
    by_position: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RoutingParity:
    """Share of routed experts that both chose, and the largest difference of the biases used."""

    agreement: float
    with_ties: float
    bias_difference: float | None


def tokens_alike(a: Tensor, b: Tensor, *, causal: bool, width: int) -> Tensor:
    """``[batch, seq]``: whether the rows of two choices ``[batch, seq, k]`` are the same sets."""
    same = []
    for start in range(0, a.shape[1], ROWS):
        one, other = (_chosen(x[:, start : start + ROWS], start, causal, width) for x in (a, b))
        same.append((one == other).all(dim=-1))
    return torch.cat(same, dim=1)


def hidden_error(errors: Tensor, judged: Tensor | None = None) -> HiddenError:
    """Sum up :func:`relative_errors` ``[batch, seq]``, of all tokens or of those in ``judged``."""
    kept = errors.flatten() if judged is None else errors[judged]
    aside = 1.0 - kept.numel() / max(1, errors.numel())
    if not kept.numel():
        return HiddenError(math.nan, math.nan, math.nan, aside)
    return HiddenError(float(kept.max()), _quantile(kept, 0.99), float(kept.mean()), aside)


def relative_errors(ours: Tensor, theirs: Tensor) -> Tensor:
    """``[batch, seq]`` in float64; infinite where ours is no number."""
    found = []
    for start in range(0, theirs.shape[1], ROWS):
        a, b = ours[:, start : start + ROWS].double(), theirs[:, start : start + ROWS].double()
        found.append((a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-30))
    return torch.nan_to_num(torch.cat(found, dim=1), nan=math.inf, posinf=math.inf)


def selection_parity(ours: Choice, theirs: Choice, tie: float) -> SelectionParity:
    """Compare two indexers over the same tokens; ``theirs`` says what is a tie."""
    seq, k = theirs.scores.shape[-1], theirs.indices.shape[-1]
    rows = range(k, seq)
    both = tied = 0.0
    overlaps = torch.ones(seq, dtype=torch.float64)
    for start in range(0, seq, ROWS):
        stop = min(start + ROWS, seq)
        mine = _chosen(ours.indices[:, start:stop], start, True, seq)
        other = _chosen(theirs.indices[:, start:stop], start, True, seq)
        hit, near = _overlap(mine, other, theirs.scores[:, start:stop].float(), tie)
        sparse = torch.arange(start, stop, device=hit.device) >= k
        both += float(hit[:, sparse].sum())
        tied += float(near[:, sparse].sum())
        overlaps[start:stop] = (hit / other.sum(dim=-1)).mean(dim=0).cpu()
    chosen = max(1, len(rows) * k * theirs.scores.shape[0])
    return SelectionParity(
        len(rows) * theirs.scores.shape[0],
        pearson(ours.scores, theirs.scores),
        both / chosen if rows else 1.0,
        tied / chosen if rows else 1.0,
        [float(part.mean()) for part in overlaps.tensor_split(min(BINS, seq))],
    )


def routing_parity(ours: Result, theirs: Result, tie: float) -> RoutingParity | None:
    """Compare the experts that two routers chose; None where the layer has none."""
    a, b = ours.routing, theirs.routing
    if a is None or b is None:
        return None
    width, chosen = b.scores.shape[-1], b.indices.numel()
    both = tied = 0.0
    for start in range(0, b.scores.shape[1], ROWS):
        span = slice(start, start + ROWS)
        mine, other = (_chosen(x.indices[:, span], start, False, width) for x in (a, b))
        hit, near = _overlap(mine, other, b.scores[:, span].float(), tie)
        both += float(hit.sum())
        tied += float(near.sum())
    return RoutingParity(both / chosen, tied / chosen, _bias_difference(ours.router_bias, theirs.router_bias))


def pearson(a: Tensor, b: Tensor) -> float | None:
    """Correlation of two ``[batch, seq, seq]`` score matrices under the causal mask, in float64."""
    count = 0
    means = [0.0, 0.0]
    for x, y in _causal_values(a, b):
        count += x.numel()
        means = [means[0] + float(x.sum()), means[1] + float(y.sum())]
    means = [mean / max(count, 1) for mean in means]
    products = [0.0, 0.0, 0.0]
    for x, y in _causal_values(a, b):
        dx, dy = x - means[0], y - means[1]
        found = (float((dx * dy).sum()), float((dx * dx).sum()), float((dy * dy).sum()))
        products = [total + one for total, one in zip(products, found, strict=True)]
    scale = math.sqrt(products[1]) * math.sqrt(products[2])
    return products[0] / scale if scale > 0 and math.isfinite(scale) else None


def _causal_values(a: Tensor, b: Tensor) -> list[tuple[Tensor, Tensor]]:
    found = []
    for start in range(0, a.shape[1], ROWS):
        x, y = a[:, start : start + ROWS], b[:, start : start + ROWS]
        mask = _causal(start, x.shape[1], x.shape[2], x.device).expand(x.shape)
        found.append((x[mask].double(), y[mask].double()))
    return found


def _causal(start: int, rows: int, width: int, device: torch.device) -> Tensor:
    return torch.arange(width, device=device) <= torch.arange(start, start + rows, device=device)[:, None]


def _chosen(indices: Tensor, start: int, causal: bool, width: int) -> Tensor:
    """``[batch, rows, k]`` indices as ``[batch, rows, width]`` truths.

    Rows that may look at fewer than ``k`` tokens fill up with tokens that they may not look at, or
    with -1; both are left out. Such a row holds token 0 anyway.
    """
    shape = (*indices.shape[:2], width)
    chosen = torch.zeros(shape, dtype=torch.bool, device=indices.device)
    chosen.scatter_(-1, indices.long().clamp(min=0), True)
    return chosen & _causal(start, shape[1], width, indices.device) if causal else chosen


def _overlap(ours: Tensor, theirs: Tensor, scores: Tensor, tie: float) -> tuple[Tensor, Tensor]:
    """Counts ``[batch, rows]`` of common choices, and of those common up to ties."""
    hit = (ours & theirs).sum(dim=-1)
    # Masked scores are huge negative numbers or infinite: no spread may come from them.
    finite = scores > torch.finfo(torch.float32).min / 2
    last = scores.masked_fill(~theirs, math.inf).amin(dim=-1, keepdim=True)
    spread = _spread(scores, finite)
    near = ours & ~theirs & (scores >= last - tie * spread)
    return hit.double(), (hit + near.sum(dim=-1)).double()


def _spread(scores: Tensor, finite: Tensor) -> Tensor:
    """Standard deviation of each row's finite scores, ``[batch, rows, 1]``."""
    count = finite.sum(dim=-1, keepdim=True).clamp_min(1)
    kept = scores.masked_fill(~finite, 0.0)
    mean = kept.sum(dim=-1, keepdim=True) / count
    square = (kept - mean).masked_fill(~finite, 0.0).square().sum(dim=-1, keepdim=True) / count
    return square.sqrt()


def _bias_difference(ours: Tensor | None, theirs: Tensor | None) -> float | None:
    if ours is None and theirs is None:
        return None
    if ours is None or theirs is None:
        return math.inf
    return float((ours.double() - theirs.double()).abs().max())


def _quantile(values: Tensor, share: float) -> float:
    ordered = values.flatten().sort().values
    return float(ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)])
