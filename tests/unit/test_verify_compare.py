"""The figures of ``verify``: ties are told from differences, and nothing depends on how parts are cut."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from glmconv.verify.measure.capture import Choice, Choices, Result
from glmconv.verify.measure.compare import (
    hidden_error,
    pearson,
    relative_errors,
    routing_parity,
    selection_parity,
    tokens_alike,
)
from glmconv.verify.measure.logprobs import LogprobMeter
from tests.support.mcore_models import tiny

SEQ, K, TIE = 40, 8, 1e-4


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def causal_choice(scores: Tensor, k: int = K) -> Choice:
    masked = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return Choice(masked, masked.topk(min(k, scores.shape[-1]), dim=-1).indices)


def test_equal_selections_agree_whatever_their_order() -> None:
    choice = causal_choice(random(2, SEQ, SEQ))
    found = selection_parity(Choice(choice.scores, choice.indices.flip(-1)), choice, TIE)
    assert (found.overlap, found.with_ties, found.sparse_rows) == (1.0, 1.0, 2 * (SEQ - K))
    assert found.pearson == pytest.approx(1.0, abs=1e-12)
    assert found.by_position == [1.0] * len(found.by_position)


def test_the_two_runtimes_fill_short_rows_differently_and_that_is_no_difference() -> None:
    """transformers fills them with masked tokens, megatron-core with -1 or others."""
    choice = causal_choice(random(1, SEQ, SEQ))
    positions = torch.arange(SEQ)[None, :, None]
    filled = choice.indices.masked_fill(choice.indices > positions, -1)
    assert selection_parity(Choice(choice.scores, filled), choice, TIE).by_position == [1.0] * 32
    assert bool(tokens_alike(filled, choice.indices, causal=True, width=SEQ).all())


def test_a_tie_at_the_edge_is_counted_apart_from_a_difference() -> None:
    scores = random(1, SEQ, SEQ)
    row = SEQ - 1
    order = scores[0, row].argsort(descending=True)
    last_in, first_out = int(order[K - 1]), int(order[K])
    scores[0, row, first_out] = scores[0, row, last_in] - 1e-7
    theirs = causal_choice(scores)
    turned = theirs.indices.clone()
    turned[0, row][turned[0, row] == last_in] = first_out
    found = selection_parity(Choice(theirs.scores, turned), theirs, TIE)
    total = (SEQ - K) * K
    assert found.overlap == pytest.approx(1 - 1 / total)
    assert found.with_ties == 1.0
    far = int(order[-1])
    turned[0, row][turned[0, row] == first_out] = far
    assert selection_parity(Choice(theirs.scores, turned), theirs, TIE).with_ties == pytest.approx(
        1 - 1 / total
    )
    alike = tokens_alike(turned, theirs.indices, causal=True, width=SEQ)
    assert alike.sum() == SEQ - 1
    assert not alike[0, row]


def test_pearson_looks_under_the_mask_only() -> None:
    a, b = random(1, 300, 300), random(1, 300, 300, seed=1)
    lower = torch.ones(300, 300, dtype=torch.bool).tril()
    wanted = torch.corrcoef(torch.stack([a[0][lower], b[0][lower]]).double())[0, 1]
    noise = torch.full((300, 300), 1e30).triu(1)
    assert pearson(a + noise, b - noise) == pytest.approx(float(wanted), abs=1e-9)
    assert pearson(a, torch.zeros_like(a)) is None


def test_routing_is_compared_as_sets_and_its_bias_exactly() -> None:
    scores = random(2, SEQ, 10)
    choice = Choice(scores, scores.topk(3, dim=-1).indices)
    bias = random(10)
    theirs = Result(scores, routing=choice, router_bias=bias)
    same = Result(scores, routing=Choice(scores, choice.indices.flip(-1)), router_bias=bias.clone())
    found = routing_parity(same, theirs, TIE)
    assert found is not None
    assert (found.agreement, found.bias_difference) == (1.0, 0.0)
    rounded = Result(scores, routing=choice, router_bias=bias.bfloat16().float())
    changed = routing_parity(rounded, theirs, TIE)
    assert changed is not None
    assert changed.bias_difference is not None
    assert changed.bias_difference > 0
    assert routing_parity(Result(scores), theirs, TIE) is None


def test_errors_leave_out_what_is_set_aside_and_never_hide_a_nan() -> None:
    theirs = random(1, SEQ, 16)
    ours = theirs.clone()
    ours[0, 3] += 1.0
    errors = relative_errors(ours, theirs)
    judged = torch.ones(1, SEQ, dtype=torch.bool)
    assert hidden_error(errors, judged).max > 0.1
    judged[0, 3] = False
    found = hidden_error(errors, judged)
    assert found.max == 0.0
    assert found.set_aside == pytest.approx(1 / SEQ)
    ours[0, 5, 0] = math.nan
    assert math.isinf(hidden_error(relative_errors(ours, theirs)).max)


@pytest.mark.parametrize("parts", [1, 3, 40])
def test_logprobs_do_not_depend_on_the_parts(parts: int) -> None:
    hf, megatron = random(SEQ, 50), random(SEQ, 50) + 1e-3 * random(SEQ, 50, seed=2)
    meter = LogprobMeter()
    for a, b in zip(hf.tensor_split(parts), megatron.tensor_split(parts), strict=True):
        meter.add(a, b)
    found = meter.result()
    p, q = hf.double().log_softmax(-1), megatron.double().log_softmax(-1)
    difference = (p - q).abs()
    assert found.max_abs == pytest.approx(float(difference.max()))
    assert found.mean_abs == pytest.approx(float(difference.mean()))
    assert found.p99_abs == pytest.approx(float(difference.quantile(0.99)), rel=0.03)
    assert found.kl_hf_megatron == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()))
    assert found.kl_megatron_hf == pytest.approx(float((q.exp() * (q - p)).sum(-1).mean()))
    assert found.argmax_agreement == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert found.positions == SEQ


def test_equal_logits_are_zero_apart() -> None:
    meter = LogprobMeter()
    meter.add(random(SEQ, 50), random(SEQ, 50))
    found = meter.result()
    assert (found.max_abs, found.p99_abs, found.mean_abs, found.argmax_agreement) == (0.0, 0.0, 0.0, 1.0)


def test_choices_are_noted_by_their_shapes() -> None:
    spec = tiny("glm_moe_dsa").spec
    experts, top_k = (spec.moe.num_experts, spec.moe.top_k) if spec.moe else (0, 0)
    scores, routed = random(2, SEQ, SEQ), random(2 * SEQ, experts)
    with Choices(spec, 2, SEQ, K, seq_first=True) as choices:
        scores.topk(K, dim=-1)
        torch.topk(routed, k=top_k, dim=1)
        random(2, SEQ, 7).topk(2)
    assert choices.selection is not None
    assert choices.selection.scores is scores
    assert choices.routing is not None
    # Tokens came as [seq, batch]; they are noted as [batch, seq].
    assert torch.equal(choices.routing.scores, routed.reshape(SEQ, 2, experts).transpose(0, 1))
