"""What the backend tests do inside the processes that ``mcore_run`` starts.

Arguments are plain values, so that the same job runs in any lane. A *case* directory holds what
``write_cases`` put there: the reference weights and what transformers computes from them.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch

from glmconv.basics.errors import GlmconvError
from glmconv.tables.spec import ModelSpec
from glmconv.verify.mcore import compat
from glmconv.verify.mcore.forward import megatron_logits
from glmconv.verify.mcore.load import LoadedKeys, load_torch_dist, save_torch_dist
from glmconv.verify.mcore.model import build_model, runtime_dialect
from glmconv.verify.mcore.parallel import Parallel, runtime
from tests.support import mcore_models
from tests.support.mcore_reference import hf_to_megatron_state_dict, rope_channels_last
from tests.support.mcore_train import optimizer_with_state

DIALECTS = ("mcore", "mcore-0.18")
PADDING = 12


def write_cases(directory: Path, families: tuple[str, ...] = mcore_models.FAMILIES) -> None:
    """Save, for each family, tokens, transformers' log-probabilities and Megatron's weights."""
    ids = mcore_models.tokens()
    for family in families:
        model = mcore_models.tiny(family)
        truth = mcore_models.oracle(model, ids)
        case: dict[str, Any] = {"tokens": ids, "logprobs": truth.logprobs, "mtp": truth.mtp_logprobs}
        case["engine"] = mcore_models.engine_logprobs(model, ids)
        for dialect in DIALECTS:
            case[dialect] = hf_to_megatron_state_dict(
                truth.weights, model.config, dialect, num_mtp=model.spec.num_mtp
            )
        torch.save(case, directory / f"{family}.pt")


def read_case(cases: str, family: str) -> dict[str, Any]:
    """What ``write_cases`` wrote for ``family``."""
    case: dict[str, Any] = torch.load(Path(cases) / f"{family}.pt", weights_only=True)
    return case


def parity(case: dict[str, Any], model: Any) -> dict[str, float]:
    """Largest differences of fp32 log-probabilities to transformers; empty off the last stage."""
    logits = megatron_logits(model, case["tokens"], case["logprobs"].shape[-1])
    if logits is None:
        return {}
    main, *mtp = [part.log_softmax(-1).cpu() for part in logits]
    found = {"main": float((main - case["logprobs"]).abs().max())}
    if mtp:
        # The last position of an MTP layer has no next token: runtimes fill it differently.
        found["mtp"] = float((mtp[0] - case["mtp"])[:, :-1].abs().max())
    return found


def save_reference(cases: str, out: str, families: list[str]) -> dict[str, Any]:
    """Build each family with a padded vocabulary, give it the reference weights, run it, save it."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with runtime():
        for family in families:
            case, spec = read_case(cases, family), mcore_models.tiny(family).spec
            model = build_model(spec, padded_vocab_size=spec.vocab_size + PADDING)
            model.load_state_dict(_padded(case[runtime_dialect()]), strict=True)
            save_torch_dist(model, f"{out}/{family}")
            found[family] = {
                "parity": parity(case, model),
                "alignments": list(model.alignments),
                "keys": disk_keys(f"{out}/{family}"),
            }
    return found


def disk_keys(path: str) -> dict[str, list[int]]:
    """Keys and global shapes of a checkpoint, as megatron-core reads them."""
    from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

    items = load_sharded_metadata(path).values()
    return {item.key: list(getattr(item, "global_shape", ())) for item in items}


def _padded(state: dict[str, Any]) -> dict[str, Any]:
    """Zero rows at the end of embedding and head, as trainers pad the vocabulary."""
    names = ("embedding.word_embeddings.weight", "output_layer.weight")
    return state | {
        name: torch.nn.functional.pad(state[name], (0, 0, 0, PADDING)) for name in names if name in state
    }


def relay(cases: str, first: str, out: str, legs: list[tuple[list[int], list[str]]]) -> dict[str, Any]:
    """Each leg (tp, pp, ep; families) loads what the leg before saved of a family, runs it, saves it."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    found: dict[str, Any] = {}
    latest: dict[str, str] = {}
    for sizes, families in legs:
        with runtime(Parallel(*sizes)) as parallel:
            for family in families:
                case, spec = read_case(cases, family), mcore_models.tiny(family).spec
                model = build_model(spec, parallel=parallel)
                keys = load_torch_dist(model, latest.get(family, f"{first}/{family}"))
                name = "tp{}pp{}ep{}".format(*sizes)
                found[f"{name} {family}"] = _listed(keys) | {"parity": parity(case, model)}
                latest[family] = f"{out}/{name}/{family}"
                save_torch_dist(model, latest[family])
    torch.distributed.destroy_process_group()
    return found


def _listed(keys: LoadedKeys) -> dict[str, list[str]]:
    return {"missing": sorted(keys.missing), "unexpected": sorted(keys.unexpected)}


def probe(cases: str, saved: str, out: str) -> dict[str, Any]:
    """The questions that need one process: what shows an error, what else is saved, what is refused."""
    torch.set_num_threads(1)
    before = torch.cuda.current_device
    found: dict[str, Any] = {"outside": _failure(lambda: build_model(mcore_models.tiny("qwen3").spec))}
    with runtime():
        found["steps"] = list(compat.install())
        found["sensitivity"] = _sensitivity(read_case(cases, "glm_moe_dsa"))
        found["forms"] = _forms(read_case(cases, "glm4_moe"), saved, out)
        found["refusals"] = _refusals(saved, out)
    found["restored"] = torch.cuda.current_device is before and not compat.is_installed()
    return found


def _sensitivity(case: dict[str, Any]) -> dict[str, Any]:
    """Differences of the DSA model with one thing wrong, or one runtime difference left unaligned."""
    spec = mcore_models.tiny("glm_moe_dsa").spec
    right: dict[str, Any] = case[runtime_dialect()]
    swapped = {
        name: rope_channels_last(tensor, 16, 32) if _has_rope_channels(name) else tensor
        for name, tensor in right.items()
    }
    runs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "right": (right, {}),
        "indexer swapped": (swapped, {}),
        "indexer swapped, not sparse": (swapped, {"index_topk": mcore_models.TOKENS}),
        "right, not sparse": (right, {"index_topk": mcore_models.TOKENS}),
        "latent not aligned": (right, {"align_indexer_latent": False}),
        "epsilons not aligned": (right, {"align_epsilons": False}),
        "bf16": (right, {"precision": "bf16"}),
    }
    outputs, dtypes = {}, set()
    for name, (weights, options) in runs.items():
        model = build_model(spec, mtp=False, **options)
        model.load_state_dict({key: value for key, value in weights.items() if not key.startswith("mtp.")})
        logits = megatron_logits(model, case["tokens"]) or []
        outputs[name] = logits[0].log_softmax(-1).cpu()
        if name == "bf16":
            dtypes = {str(tensor.dtype) for tensor in [*model.parameters(), *model.buffers()]}
    found: dict[str, Any] = {
        name: float((output - case["logprobs"]).abs().max()) for name, output in outputs.items()
    }
    blind = outputs["indexer swapped, not sparse"] - outputs["right, not sparse"]
    served = outputs["epsilons not aligned"] - case["engine"]
    found["epsilons aligned in transformers"] = float(served.abs().max())
    return found | {"swap seen without sparsity": float(blind.abs().max()), "dtypes": sorted(dtypes)}


def _has_rope_channels(name: str) -> bool:
    return ".indexer." in name and "weights_proj" not in name


def _forms(case: dict[str, Any], saved: str, out: str) -> dict[str, Any]:
    """Other things that trainers save: singleton shards, optimizer state, per-layer keys; no extra state."""
    from megatron.core import dist_checkpointing, parallel_state

    spec = mcore_models.tiny("glm4_moe").spec
    model = build_model(spec)
    model.load_state_dict(case[runtime_dialect()])
    save_torch_dist(model, f"{out}/singleton", singleton_local_shards=True)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    bare = {
        key: value
        for key, value in model.sharded_state_dict(metadata={"dp_cp_group": group}).items()
        if not key.endswith("_extra_state")
    }
    Path(f"{out}/bare").mkdir()
    dist_checkpointing.save({"model": bare}, f"{out}/bare")
    for distributed in (False, True):
        optimizer = optimizer_with_state(model, distributed=distributed)
        save_torch_dist(model, f"{out}/distributed {distributed}", optimizer=optimizer)
    listed = build_model(mcore_models.tiny("qwen3_moe").spec, layer_keys="per-layer")
    refusal = _failure(lambda: load_torch_dist(listed, f"{saved}/qwen3_moe"))
    found: dict[str, Any] = {"stacked into per-layer": refusal}
    for parameter in listed.parameters():
        parameter.data.fill_(0.5)
    save_torch_dist(listed, f"{out}/per-layer")
    stacked = build_model(mcore_models.tiny("qwen3_moe").spec)
    found["per-layer into stacked"] = _listed(load_torch_dist(stacked, f"{out}/per-layer"))
    for name in ("singleton", "bare", "distributed False", "distributed True"):
        other = build_model(spec)
        found[name] = _listed(load_torch_dist(other, f"{out}/{name}"))
        found[name]["equal"] = all(
            value is None or torch.equal(value, other.state_dict()[key])
            for key, value in model.state_dict().items()
        )
        found[name]["keys"] = sorted(disk_keys(f"{out}/{name}"))
    return found


def _refusals(saved: str, out: str) -> dict[str, Any]:
    """Messages of the errors that a wrong config, directory or version ends in."""
    qwen3, glm4 = mcore_models.tiny("qwen3").spec, mcore_models.tiny("glm4_moe").spec
    shutil.copytree(f"{saved}/qwen3", f"{out}/no-common")
    Path(f"{out}/no-common/common.pt").unlink(missing_ok=True)

    def load(spec: ModelSpec, path: str) -> str | None:
        return _failure(lambda: load_torch_dist(build_model(spec), path))

    return {
        "narrow": load(dataclasses.replace(qwen3, hidden_size=72), f"{saved}/qwen3"),
        "shallow": load(
            dataclasses.replace(glm4, num_layers=5, moe_layers=(False, True, True, True, True)),
            f"{saved}/glm4_moe",
        ),
        "nowhere": load(qwen3, f"{out}/nowhere"),
        "no common state": load(qwen3, f"{out}/no-common"),
        "shared": _failure(lambda: build_model(mcore_models.tiny("glm_moe_dsa_shared").spec)),
        "nested": _failure(lambda: runtime().__enter__()),
    }


def _failure(attempt: Any) -> str | None:
    """The class and text of the error that ``attempt`` ends in; None where it succeeds."""
    try:
        attempt()
    except GlmconvError as error:
        return f"{type(error).__name__}: {error}"
    return None
