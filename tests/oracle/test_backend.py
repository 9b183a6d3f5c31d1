"""The torch backend computes what transformers computes, and saves under the names of trainers.

Every run is a real ``GPTModel`` of megatron-core, in a process of its own, in two versions of it.
The weights come from a hand-written reference that shares no code with the tables.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import mcore_jobs, mcore_models, mcore_run

FAMILIES = {
    "0.16.1": ("qwen3", "qwen3_moe", "glm4_moe", "glm_moe_dsa"),
    "0.19.2": mcore_models.FAMILIES,
}
EVERY_MODEL = [(lane, family) for lane, families in FAMILIES.items() for family in families]
LEGS = {
    "tp2pp1ep1": ([2, 1, 1], ("qwen3", "glm4_moe", "glm_moe_dsa", "glm_moe_dsa_shared")),
    "tp1pp2ep1": ([1, 2, 1], ("qwen3", "glm_moe_dsa", "glm_moe_dsa_shared")),
    "tp1pp1ep2": ([1, 1, 2], ("qwen3_moe", "glm_moe_dsa")),
    "tp2pp1ep2": ([2, 1, 2], ("glm4_moe",)),
}
EVERY_LEG = [
    (lane, f"{leg} {family}")
    for lane, families in FAMILIES.items()
    for leg, (_, members) in LEGS.items()
    for family in members
    if family in families
]
NOISE = 2e-5
"""fp32 noise of the largest log-probability difference; a wrong mapping ends above 1."""

pytestmark = pytest.mark.slow


class Runs:
    """Results of each job in each lane, run when first asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.results: dict[tuple[str, str], list[dict[str, Any]] | AssertionError] = {}

    def reference(self, lane: str) -> dict[str, Any]:
        out = self._made(lane, "tp1")
        return self._once(lane, "save_reference", out=out, families=FAMILIES[lane])[0]

    def relay(self, lane: str) -> list[dict[str, Any]]:
        self.reference(lane)
        legs = [(sizes, [name for name in names if name in FAMILIES[lane]]) for sizes, names in LEGS.values()]
        first, out = self._made(lane, "tp1"), self._made(lane, "relay")
        return self._once(lane, "relay", world=2, first=first, out=out, legs=legs)

    def probe(self, lane: str) -> dict[str, Any]:
        self.reference(lane)
        out = self._made(lane, "probe")
        return self._once(lane, "probe", saved=self._made(lane, "tp1"), out=out)[0]

    def _made(self, lane: str, name: str) -> str:
        path = self.directory / lane / name
        path.mkdir(parents=True, exist_ok=True)
        return str(path)

    def _once(self, lane: str, job: str, *, world: int = 1, **arguments: Any) -> list[dict[str, Any]]:
        if mcore_run.lane_path(lane) is None:
            pytest.fail(f"megatron-core {lane} is not here: set GLMCONV_MCORE_NEXT, as scripts/test.sh does")
        if not list(self.directory.glob("*.pt")):
            mcore_jobs.write_cases(self.directory)
        key = (lane, job)
        if key not in self.results:
            arguments |= {"cases": str(self.directory)}
            try:
                job_function = getattr(mcore_jobs, job)
                self.results[key] = mcore_run.run(job_function, lane=lane, world=world, arguments=arguments)
            except AssertionError as error:
                self.results[key] = error
        result = self.results[key]
        if isinstance(result, AssertionError):
            raise result
        return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("backend"))


@pytest.fixture(params=list(FAMILIES))
def lane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(("lane", "family"), EVERY_MODEL)
def test_megatron_computes_what_transformers_computes(runs: Runs, lane: str, family: str) -> None:
    found = runs.reference(lane)[family]["parity"]
    assert max(found.values()) < NOISE
    assert ("mtp" in found) == bool(mcore_models.tiny(family).spec.num_mtp)


@pytest.mark.parametrize(("lane", "leg"), EVERY_LEG)
def test_parallel_layouts_load_and_compute_the_same(runs: Runs, lane: str, leg: str) -> None:
    ranks = [rank[leg] for rank in runs.relay(lane)]
    differences = [value for rank in ranks for value in rank["parity"].values()]
    assert differences
    assert max(differences) < NOISE
    assert [rank["missing"] + rank["unexpected"] for rank in ranks] == [[], []]


def test_what_would_be_an_error_shows(runs: Runs, lane: str) -> None:
    found = runs.probe(lane)["sensitivity"]
    assert found["right"] < NOISE
    assert found["indexer swapped"] > 1
    assert found["right, not sparse"] > 1
    assert NOISE < found["epsilons not aligned"] < 1e-2


def test_an_indexer_error_hides_where_the_selection_is_not_sparse(runs: Runs, lane: str) -> None:
    assert runs.probe(lane)["sensitivity"]["swap seen without sparsity"] < NOISE


def test_indexer_latent_needs_alignment_before_0_19_only(runs: Runs, lane: str) -> None:
    found = runs.probe(lane)["sensitivity"]["latent not aligned"]
    assert found > 1 if lane == "0.16.1" else found < NOISE
    aligned = [line for line in runs.reference(lane)["glm_moe_dsa"]["alignments"] if "indexer fed" in line]
    assert len(aligned) == (lane == "0.16.1")


def test_either_runtime_can_take_the_epsilon_of_the_other(runs: Runs) -> None:
    assert runs.probe("0.19.2")["sensitivity"]["epsilons aligned in transformers"] < NOISE


def test_bf16_model_keeps_router_bias_in_fp32(runs: Runs, lane: str) -> None:
    assert runs.probe(lane)["sensitivity"]["dtypes"] == ["torch.bfloat16", "torch.float32"]


LATENT_NORMS = {
    "0.16.1": ("linear_q_up_proj.layer_norm_weight", "linear_kv_up_proj.layer_norm_weight"),
    "0.19.2": ("q_layernorm.weight", "kv_layernorm.weight"),
}
SPARSE_ATTENTION = {
    "input_layernorm.weight": [64],
    "self_attention.linear_q_down_proj.weight": [40, 64],
    "self_attention.linear_q_up_proj.weight": [4 * 36, 40],
    "self_attention.linear_kv_down_proj.weight": [24 + 16, 64],
    "self_attention.linear_kv_up_proj.weight": [4 * (20 + 28), 24],
    "self_attention.linear_proj.weight": [64, 4 * 28],
    "self_attention.core_attention.indexer.linear_wq_b.weight": [4 * 32, 40],
    "self_attention.core_attention.indexer.linear_wk.weight": [32, 64],
    "self_attention.core_attention.indexer.k_norm.weight": [32],
    "self_attention.core_attention.indexer.k_norm.bias": [32],
    "self_attention.core_attention.indexer.linear_weights_proj.weight": [4, 64],
}
EXPERTS = {
    "pre_mlp_layernorm.weight": [64],
    "mlp.router.weight": [8, 64],
    "mlp.router.expert_bias": [8],
    "mlp.shared_experts.linear_fc1.weight": [2 * 40, 64],
    "mlp.shared_experts.linear_fc2.weight": [64, 40],
    "mlp.experts.experts.linear_fc1.weight": [8, 2 * 40, 64],
    "mlp.experts.experts.linear_fc2.weight": [8, 64, 40],
}
DENSE = {
    "mlp.linear_fc1.layer_norm_weight": [64],
    "mlp.linear_fc1.weight": [2 * 112, 64],
    "mlp.linear_fc2.weight": [64, 112],
}


def tensors(keys: dict[str, list[int]], prefix: str = "") -> dict[str, list[int]]:
    """The tensors below ``prefix``, without it."""
    return {
        key.removeprefix(prefix): shape
        for key, shape in keys.items()
        if key.startswith(prefix) and "_extra_state" not in key and key != "common_state"
    }


def test_sparse_attention_model_is_saved_under_the_names_of_trainers(runs: Runs, lane: str) -> None:
    keys = runs.reference(lane)["glm_moe_dsa"]["keys"]
    q_norm, kv_norm = LATENT_NORMS[lane]
    attention = SPARSE_ATTENTION | {f"self_attention.{q_norm}": [40], f"self_attention.{kv_norm}": [24]}
    assert tensors(keys, "decoder.layers.0.") == attention | DENSE
    assert tensors(keys, "decoder.layers.3.") == attention | EXPERTS
    block = {f"transformer_layer.{name}": shape for name, shape in (attention | EXPERTS).items()}
    assert tensors(keys, "mtp.layers.0.") == block | {
        "enorm.weight": [64],
        "hnorm.weight": [64],
        "eh_proj.weight": [64, 128],
        "final_layernorm.weight": [64],
    }
    rest = {key for key in tensors(keys) if ".layers." not in key}
    assert rest == {
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    }


def test_models_of_equal_layers_are_saved_stacked(runs: Runs, lane: str) -> None:
    attention = {
        "self_attention.linear_qkv.layer_norm_weight": [2, 64],
        "self_attention.linear_qkv.weight": [2, (6 + 2 + 2) * 20, 64],
        "self_attention.linear_proj.weight": [2, 64, 6 * 20],
        "self_attention.q_layernorm.weight": [2, 20],
        "self_attention.k_layernorm.weight": [2, 20],
    }
    dense = tensors(runs.reference(lane)["qwen3"]["keys"])
    mlp = {name: [2, *shape] for name, shape in DENSE.items()}
    assert tensors(dense, "decoder.layers.") == attention | mlp
    assert dense["embedding.word_embeddings.weight"] == [mcore_models.VOCAB + mcore_jobs.PADDING, 64]
    assert "output_layer.weight" not in dense
    sparse = tensors(runs.reference(lane)["qwen3_moe"]["keys"], "decoder.layers.")
    assert sparse["mlp.experts.experts.linear_fc1.weight"] == [2, 8, 2 * 40, 64]
    assert sparse["pre_mlp_layernorm.weight"] == [2, 64]


def test_query_groups_with_bias_have_the_names_of_trainers(runs: Runs, lane: str) -> None:
    layer = tensors(runs.reference(lane)["glm4_moe"]["keys"], "decoder.layers.1.")
    assert layer == EXPERTS | {
        "self_attention.linear_qkv.layer_norm_weight": [64],
        "self_attention.linear_qkv.weight": [(6 + 2 + 2) * 16, 64],
        "self_attention.linear_qkv.bias": [(6 + 2 + 2) * 16],
        "self_attention.linear_proj.weight": [64, 6 * 16],
        "self_attention.q_layernorm.weight": [16],
        "self_attention.k_layernorm.weight": [16],
    }


def test_extra_state_is_saved_where_transformer_engine_has_it(runs: Runs, lane: str) -> None:
    keys = runs.reference(lane)["glm_moe_dsa"]["keys"]
    prefix = "decoder.layers.1."
    modules = {
        key.removeprefix(prefix).partition("._extra_state")[0]
        for key in keys
        if key.startswith(prefix) and "_extra_state" in key
    }
    with_weights = {name.rpartition(".")[0] for name in tensors(keys, prefix)}
    assert modules == with_weights - {"mlp.router"}


@pytest.mark.parametrize("form", ["singleton", "distributed False", "distributed True"])
def test_forms_that_trainers_save_load_bit_identical(runs: Runs, lane: str, form: str) -> None:
    found = runs.probe(lane)["forms"][form]
    assert found["equal"]
    assert found["missing"] == []
    assert all(key.startswith("optimizer.") for key in found["unexpected"])
    assert bool(found["unexpected"]) == (form != "singleton")
    split = "decoder.layers.1.mlp.experts.experts.3.linear_fc1.weight_w" in found["keys"]
    assert split == (form == "singleton")


def test_absent_extra_state_is_reported_and_forgiven(runs: Runs, lane: str) -> None:
    found = runs.probe(lane)["forms"]["bare"]
    assert found["equal"]
    assert "decoder.layers.0.self_attention.linear_qkv._extra_state" in str(found["missing"])
    assert all("_extra_state" in key for key in found["missing"])


def test_per_layer_keys_load_into_a_stacked_model_and_not_the_other_way(runs: Runs, lane: str) -> None:
    found = runs.probe(lane)["forms"]
    assert found["per-layer into stacked"] == {"missing": [], "unexpected": []}
    assert "the model asks for decoder.layers.0." in found["stacked into per-layer"]


def test_refusals_say_what_and_where(runs: Runs, lane: str) -> None:
    found = runs.probe(lane)["refusals"]
    assert "decoder.final_layernorm.weight is (64,), the model asks for (72,)" in found["narrow"]
    assert "the model asks for decoder.layers.4.mlp.router.weight" in found["shallow"]
    assert found["nowhere"].startswith("StorageError")
    assert "no .metadata" in found["nowhere"]
    assert found["nested"].startswith("UsageError")
    assert runs.probe(lane)["outside"].startswith("UsageError")
    if lane == "0.16.1":
        assert "common.pt" in found["no common state"]
        assert "index sharing needs megatron-core >= 0.19" in found["shared"]
    else:
        assert found["no common state"] is None
        assert found["shared"] is None


def test_only_needed_steps_are_applied_and_all_are_undone(runs: Runs, lane: str) -> None:
    found = runs.probe(lane)
    old = ["dsa in the block spec", "no Hadamard step", "router without TE"] if lane == "0.16.1" else []
    steps = [step for step in found["steps"] if "triton" not in step]
    assert steps == ["no compiler", "no CUDA device", "torch backend", *old]
    assert found["restored"]


def test_importing_verify_imports_neither_torch_nor_megatron() -> None:
    code = "import sys, glmconv.verify; sys.exit(len({'torch', 'megatron'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=mcore_run.ROOT, check=False).returncode == 0
