"""The shared faults: each changes values and nothing else, and shows where it says it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from glmconv.tables.registry import get_bridge
from glmconv.verify.faults.faults import BY_NAME, FAULTS, Geometry
from glmconv.verify.faults.faults import geometry as geometry_of
from tests.support.checkpoints import MODELS, raw_config, tiny_tensors
from tests.support.reference import DIALECTS, hf_to_megatron, hub_to_stacked, megatron_to_hf

State = dict[str, Tensor]
SEEN_IN_LOGPROBS = 1e-4
"""Far above what the same model differs by between runtimes (2e-5), far below what faults do."""


def geometry(config: dict[str, Any]) -> Geometry:
    return geometry_of(get_bridge(config["model_type"]).spec(config, {}))


@pytest.fixture(scope="module")
def states() -> dict[tuple[str, str], State]:
    hf = {model: tiny_tensors(model) for model in MODELS}
    return {(m, d): hf_to_megatron(hf[m], raw_config(m), d) for m in MODELS for d in DIALECTS}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_values_alone(states: dict[tuple[str, str], State], fault: Any) -> None:
    tried = 0
    for (model, _), state in states.items():
        sizes = geometry(raw_config(model))
        if not fault.applicable(state, sizes):
            continue
        tried += 1
        before = {key: tensor.clone() for key, tensor in state.items()}
        mutant = fault.apply(state, sizes)
        assert all(torch.equal(state[key], before[key]) for key in before), "the given state was changed"
        if fault.name == "mtp-dropped":
            assert set(state) - set(mutant) == {key for key in state if key.startswith("mtp.")}
            continue
        assert {k: (t.shape, t.dtype) for k, t in mutant.items()} == {
            k: (t.shape, t.dtype) for k, t in state.items()
        }
        assert any(not torch.equal(mutant[key], state[key]) for key in state)
    assert tried or fault.name == "latent-norms-swapped"


@pytest.mark.parametrize("model", MODELS)
def test_faults_apply_in_every_dialect_and_layer_keys_alike(
    states: dict[tuple[str, str], State], model: str
) -> None:
    sizes = geometry(raw_config(model))
    sets = [{f.name for f in FAULTS if f.applicable(states[model, dialect], sizes)} for dialect in DIALECTS]
    assert all(names == sets[0] for names in sets)


def test_a_fault_breaks_stacked_layers_as_it_breaks_single_ones() -> None:
    config = raw_config("qwen3-moe")
    hf, sizes = tiny_tensors("qwen3-moe"), geometry(config)
    for fault in FAULTS:
        stacked = hf_to_megatron(hf, config, "mcore", "stacked")
        if fault.applicable(stacked, sizes):
            left = megatron_to_hf(fault.apply(stacked, sizes), config, "mcore")
            single = fault.apply(hf_to_megatron(hf, config, "mcore", "per-layer"), sizes)
            right = megatron_to_hf(single, config, "mcore")
            assert all(torch.equal(left[name], right[name]) for name in hf), fault.name


def test_latent_norms_swap_where_the_ranks_are_equal() -> None:
    state = {f"decoder.layers.0.self_attention.{n}_layernorm.weight": torch.rand(4) for n in ("q", "kv")}
    mutant = BY_NAME["latent-norms-swapped"].apply(state, Geometry(heads=2, kv_rank=4))
    assert [mutant[key] is state[other] for key, other in zip(state, reversed(state), strict=True)] == [
        True
    ] * 2


def test_a_fault_that_does_not_apply_says_so() -> None:
    with pytest.raises(ValueError, match="mtp-dropped"):
        BY_NAME["mtp-dropped"].apply({"decoder.final_layernorm.weight": torch.ones(2)}, Geometry(heads=1))


def test_q_k_swapped_changes_the_named_rows_alone(states: dict[tuple[str, str], State]) -> None:
    config = raw_config("glm-4.5")
    mutant = BY_NAME["q-k-swapped"].apply(states["glm-4.5", "mcore"], geometry(config))
    right, wrong = (megatron_to_hf(s, config, "mcore") for s in (states["glm-4.5", "mcore"], mutant))
    prefix, dim = "model.layers.0.self_attn.", config["head_dim"]
    ratio = config["num_attention_heads"] // config["num_key_value_heads"]
    key, first_queries = right[prefix + "k_proj.weight"], wrong[prefix + "q_proj.weight"]
    for group in range(config["num_key_value_heads"]):
        start = group * ratio * dim
        assert torch.equal(first_queries[start : start + dim], key[group * dim : (group + 1) * dim])
    assert torch.equal(wrong[prefix + "v_proj.weight"], right[prefix + "v_proj.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["glm-5.2", "glm-4.5", "qwen3-untied", "qwen3-moe"])
def test_logprobs_show_what_they_should(states: dict[tuple[str, str], State], model: str) -> None:
    """transformers, given back the mutant's weights, is the judge."""
    config, sizes = raw_config(model), geometry(raw_config(model))
    state = states[model, "mcore"]
    hf_config = transformers.AutoConfig.for_model(**config)
    causal: Any = transformers.AutoModelForCausalLM
    runner = causal.from_config(hf_config, dtype=torch.float32).eval()
    ids = torch.randint(5, config["vocab_size"], (2, 64), generator=torch.Generator().manual_seed(1))

    def logprobs(weights: State) -> Tensor:
        missing, _ = runner.load_state_dict(
            hub_to_stacked(megatron_to_hf(weights, config, "mcore")), strict=False
        )
        assert not missing
        with torch.no_grad():
            out: Tensor = runner(ids).logits.log_softmax(-1)
        return out

    right = logprobs(state)
    for fault in FAULTS:
        if fault.name != "mtp-dropped" and fault.applicable(state, sizes):
            difference = (logprobs(fault.apply(state, sizes)) - right).abs().max().item()
            assert difference > SEEN_IN_LOGPROBS or not fault.in_logprobs, (fault.name, difference)
            assert difference == 0 or not fault.name.startswith("mtp-"), (fault.name, difference)
