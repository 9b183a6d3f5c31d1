"""Write the golden lists: every tensor name, shape and dtype of the real models, in both layouts.

The Hugging Face side comes from transformers' own classes on the meta device, at full size, with
experts renamed to the hub's one-per-expert names and MTP layers added by hand. The Megatron side
comes from the hand-written reference in ``tests/support/reference.py`` run on meta tensors. Neither
looks at glmconv's tables. Run it to renew ``tests/data/golden``; the result is committed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from checkpoint_headers import DATA, FULL_MODELS
from golden_patterns import TensorInfo, compress
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

Reference = Callable[[dict[str, Tensor], dict[str, Any], str], dict[str, Tensor]]

DIALECTS = ("mcore", "mcore-0.18", "slime", "miles")
DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}
LAYER_CLASSES_WITH_MTP = ("glm_moe_dsa", "glm4_moe")

ROUTER_NOTE = (
    "dtype of mlp.gate.weight and e_score_correction_bias: transformers keeps both in fp32, the "
    "released file was not read"
)
MTP_NOTE = "MTP tensors were added by hand after facts of third parties; no released index was read"
HEAD_NOTE = (
    "the released file is 1.5 GB, which is the size with lm_head.weight stored beside the embedding "
    "it is tied to; transformers saves it without"
)
MEGATRON_NOTE = "names of Transformer Engine modules, which was not run; see the notes of the HF list"
FORK_NOTE = "names read from the dialect's source, no model of it was run"


def hf_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """Meta tensors of a whole checkpoint under hub names, MTP layers included."""
    family, layers = config["model_type"], config["num_hidden_layers"]
    mtp = config.get("num_nextn_predict_layers", 0) if family in LAYER_CLASSES_WITH_MTP else 0
    raw = dict(config, num_hidden_layers=layers + mtp)
    if "indexer_types" in config:
        raw["indexer_types"] = config["indexer_types"] + ["full"] * mtp
        raw["mlp_layer_types"] = config["mlp_layer_types"] + ["sparse"] * mtp
    hf_config = AutoConfig.for_model(**raw)
    with torch.device("meta"):
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(hf_config, dtype=torch.bfloat16)
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if name.endswith(".mlp.experts.gate_up_proj"):
            ffn = tensor.shape[1] // 2
            prefix = name.removesuffix("gate_up_proj")
            for expert in range(tensor.shape[0]):
                tensors[f"{prefix}{expert}.gate_proj.weight"] = tensor[expert, :ffn]
                tensors[f"{prefix}{expert}.up_proj.weight"] = tensor[expert, ffn:]
        elif name.endswith(".mlp.experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            for expert in range(tensor.shape[0]):
                tensors[f"{prefix}{expert}.down_proj.weight"] = tensor[expert]
        else:
            tensors[name] = tensor
    for layer in range(layers, layers + mtp):
        tensors.update(_mtp_extras(config, layer))
    return tensors


def _mtp_extras(config: dict[str, Any], layer: int) -> dict[str, Tensor]:
    hidden, vocab, prefix = config["hidden_size"], config["vocab_size"], f"model.layers.{layer}"
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.enorm.weight": (hidden,),
        f"{prefix}.hnorm.weight": (hidden,),
        f"{prefix}.eh_proj.weight": (hidden, 2 * hidden),
        f"{prefix}.shared_head.norm.weight": (hidden,),
    }
    if config["model_type"] == "glm4_moe":
        shapes[f"{prefix}.embed_tokens.weight"] = (vocab, hidden)
        shapes[f"{prefix}.shared_head.head.weight"] = (vocab, hidden)
    dtype = torch.bfloat16
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}


def golden_entry(model: str, layout: str, tensors: dict[str, Tensor], notes: list[str]) -> dict[str, Any]:
    """What one golden file holds; ``unconfirmed`` says what nobody could check."""
    infos: dict[str, TensorInfo] = {
        name: (tuple(tensor.shape), DTYPE_NAMES[tensor.dtype]) for name, tensor in tensors.items()
    }
    return {
        "model": model,
        "layout": layout,
        "count": len(tensors),
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "unconfirmed": notes,
        "tensors": compress(infos),
    }


def readable_json(entry: dict[str, Any]) -> str:
    """JSON with one tensor pattern a line."""
    lines = []
    for key, value in entry.items():
        if isinstance(value, dict):
            rows = [f"  {json.dumps(name)}: {json.dumps(info)}" for name, info in value.items()]
            lines.append(f" {json.dumps(key)}: {{\n" + ",\n".join(rows) + "\n }")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def hf_notes(config: dict[str, Any]) -> list[str]:
    """What could not be confirmed of a model's HF list."""
    if config["model_type"] in LAYER_CLASSES_WITH_MTP:
        return [ROUTER_NOTE, MTP_NOTE]
    return [HEAD_NOTE] if config["tie_word_embeddings"] else []


def load_reference() -> Reference:
    """``hf_to_megatron`` of the hand-written reference, which lives with the tests."""
    sys.path.insert(0, str(DATA.parent.parent))
    from tests.support.reference import hf_to_megatron

    return hf_to_megatron


def write_golden(out: Path, model: str, reference: Reference) -> None:
    """All lists of one model: the HF one and one for each dialect."""
    config = json.loads((DATA / "configs" / f"{model}.json").read_text())
    tensors = hf_tensors(config)
    entries = {model: golden_entry(model, "hf", tensors, hf_notes(config))}
    if config["tie_word_embeddings"]:
        entries[model]["optional"] = {
            "lm_head.weight": {"shape": [config["vocab_size"], config["hidden_size"]], "dtype": "BF16"}
        }
    for dialect in DIALECTS:
        notes = [MEGATRON_NOTE] + ([FORK_NOTE] if dialect in ("slime", "miles") else [])
        moved = reference(tensors, config, dialect)
        entries[f"{model}.{dialect}"] = golden_entry(model, dialect, moved, notes)
    for name, entry in entries.items():
        (out / f"{name}.json").write_text(readable_json(entry))


def main(
    out: Annotated[Path, typer.Option(help="Directory to write.")] = DATA / "golden",
    model: Annotated[str | None, typer.Option(help="Only this one of: " + ", ".join(FULL_MODELS))] = None,
) -> None:
    """Write the golden lists of one or all models."""
    reference = load_reference()
    out.mkdir(parents=True, exist_ok=True)
    for name in FULL_MODELS if model is None else (model,):
        write_golden(out, name, reference)
        typer.echo(name)


if __name__ == "__main__":
    typer.run(main)
