"""What the conversion tests do inside the processes of ``mcore_run``: load, compare, run, save.

A *case* directory holds one ``.pt`` a model: tokens, what transformers computes, the reference
weights under Megatron's in-memory names, and the raw config.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from glmconv.tables.registry import get_bridge
from glmconv.tables.spec import ModelSpec
from glmconv.verify.mcore.forward import megatron_logits
from glmconv.verify.mcore.load import load_torch_dist, save_torch_dist
from glmconv.verify.mcore.model import build_model, runtime_dialect
from glmconv.verify.mcore.parallel import Parallel, runtime
from tests.support.checkpoints import load_config, load_tensors
from tests.support.mcore_reference import hf_to_megatron_state_dict
from tests.support.mcore_train import optimizer_with_state
from tests.support.reference import hub_to_stacked
from tests.support.truth import truth_of

PADDING = 16


def write_case(hf: Path, out: Path) -> None:
    """Everything that the jobs compare with, for the HF checkpoint ``hf``."""
    config, truth = load_config(hf), truth_of(hf)
    weights = hub_to_stacked({name: tensor.float() for name, tensor in load_tensors(hf).items()})
    case: dict[str, Any] = {"tokens": truth.tokens, "logprobs": truth.logprobs, "mtp": truth.mtp_logprobs}
    mtp = config.get("num_nextn_predict_layers") or 0
    for dialect in ("mcore", "mcore-0.18"):
        case[dialect] = hf_to_megatron_state_dict(weights, config, dialect, num_mtp=mtp)
    torch.save({**case, "config": config}, out)


def _case(cases: str, model: str) -> tuple[dict[str, Any], ModelSpec]:
    case: dict[str, Any] = torch.load(Path(cases) / f"{model}.pt", weights_only=True)
    return case, get_bridge(case["config"]["model_type"]).spec(case["config"], {})


def _parity(case: dict[str, Any], model: Any) -> dict[str, float]:
    """Largest differences of fp32 log-probabilities to transformers; empty off the last stage."""
    logits = megatron_logits(model, case["tokens"], case["logprobs"].shape[-1])
    if logits is None:
        return {}
    main, *mtp = [part.log_softmax(-1) for part in logits]
    found = {"main": float((main - case["logprobs"]).abs().max())}
    if mtp:
        # The last position of an MTP layer has no next token: runtimes fill it differently.
        found["mtp"] = float((mtp[0] - case["mtp"])[:, :-1].abs().max())
    return found


def _differing(model: Any, expected: dict[str, Any]) -> list[str]:
    """Names of the model's state that are absent from the reference or not equal to it."""
    state = {k: v for k, v in model.state_dict().items() if v is not None and not k.endswith("_extra_state")}
    return sorted(
        name
        for name in state.keys() | expected.keys()
        if name not in state or name not in expected or not torch.equal(state[name], expected[name])
    )


def load_converted(cases: str, units: dict[str, str], parallel: list[int]) -> dict[str, Any]:
    """Load each converted unit into the real model; what is missing, unexpected, different."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    single = parallel == [1, 1, 1]
    with runtime(Parallel(*parallel)) as layout:
        for model_name, unit in units.items():
            case, spec = _case(cases, model_name)
            model = build_model(spec, parallel=layout)
            keys = load_torch_dist(model, unit)
            found[model_name] = {
                "missing": sorted(keys.missing),
                "unexpected": sorted(keys.unexpected),
                "parity": _parity(case, model),
                "differing": _differing(model, case[runtime_dialect()]) if single else [],
            }
    return found


def save_as_trainers_do(cases: str, models: list[str], out: str) -> dict[str, Any]:
    """Fill each model from the reference and save it in the ways of one process."""
    torch.set_num_threads(1)
    with runtime():
        for name in models:
            case, spec = _case(cases, name)
            weights = case[runtime_dialect()]
            model = build_model(spec)
            model.load_state_dict(weights)
            save_torch_dist(model, f"{out}/{name}/plain")
            save_torch_dist(model, f"{out}/{name}/singleton", singleton_local_shards=True)
            for distributed in (False, True):
                optimizer = optimizer_with_state(model, distributed=distributed)
                save_torch_dist(model, f"{out}/{name}/optimizer-{distributed}", optimizer=optimizer)
            # The optimizer's step may have changed the parameters: build the padded one anew.
            padded = build_model(spec, padded_vocab_size=spec.vocab_size + PADDING)
            padded.load_state_dict(_padded(weights))
            save_torch_dist(padded, f"{out}/{name}/padded")
    return {}


def _padded(state: dict[str, Any]) -> dict[str, Any]:
    names = ("embedding.word_embeddings.weight", "output_layer.weight")
    return state | {
        name: torch.nn.functional.pad(state[name], (0, 0, 0, PADDING)) for name in names if name in state
    }


def resave(cases: str, models: list[str], first: str, out: str, parallel: list[int]) -> dict[str, Any]:
    """Load what one process saved into a parallel layout and save it from there."""
    torch.set_num_threads(1)
    with runtime(Parallel(*parallel)) as layout:
        for name in models:
            _, spec = _case(cases, name)
            model = build_model(spec, parallel=layout)
            load_torch_dist(model, f"{first}/{name}/plain")
            save_torch_dist(model, f"{out}/{name}/tp{parallel[0]}pp{parallel[1]}ep{parallel[2]}")
    return {}
