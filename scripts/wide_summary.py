"""The figures of one verification at full width, beside their bars, and what the whole model would take."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

from glmconv.tables.expand import hf_layout, view2d
from glmconv.tables.registry import get_bridge

WIDTHS = {"fp32": 4, "bf16": 2}
SLACK = 12e9
"""GPU memory that a verification may take beyond one layer of each side."""


def layer_bytes(config: dict[str, Any], itemsize: int) -> float:
    """Bytes of the largest decoder layer."""
    bridge = get_bridge(config["model_type"])
    sizes: dict[str, int] = {}
    for tensor in hf_layout(bridge.table, bridge.spec(config, {})).tensors():
        rows, cols = view2d(tensor.shape)
        layer = ".".join(tensor.name.split(".")[:3])
        sizes[layer] = sizes.get(layer, 0) + rows * cols * itemsize
    return float(max(size for name, size in sizes.items() if name.startswith("model.layers.")))


def extrapolated(report: dict[str, Any], full: dict[str, Any]) -> float:
    """Seconds for all layers of the released model, from the mean of each kind measured here."""
    spec = get_bridge(full["model_type"]).spec(full, {})
    seconds: dict[str, list[float]] = {}
    for place in report["places"]:
        if place["name"].startswith("layer"):
            kind = place["kind"].partition(",")[0]
            seconds.setdefault(kind, []).append(place["hf_seconds"] + place["megatron_seconds"])
    kinds = ["MoE" if spec.is_moe(layer) else "dense" for layer in range(spec.num_layers)]
    return sum(mean(seconds[kind]) for kind in kinds)


def main(
    report: Annotated[Path, typer.Argument(help="What glmconv verify --json printed.")],
    config: Annotated[Path, typer.Option(help="config.json of the checkpoint that was verified.")],
    full: Annotated[Path, typer.Option(help="config.json of the released model.")],
) -> None:
    """Print the figures, one a line."""
    found = json.loads(report.read_text())
    short, whole = json.loads(config.read_text()), json.loads(full.read_text())
    typer.echo(f"{found['precision']}: {found['verdict']}: {found['reason']}")
    typer.echo(
        f"  {found['batch']} x {found['seq_len']} tokens, top-k {found['index_topk']}, "
        f"hidden {short['hidden_size']}, {short['n_routed_experts']} experts, "
        f"{short['num_attention_heads']} heads, {found['device']}"
    )
    for one in found["predictions"]:
        for name, parity in (("parity", one["parity"]), ("noise floor", one["floor"])):
            if parity is not None:
                typer.echo(
                    f"  {one['name']} {name}: max {parity['max_abs']:.3g}, p99 {parity['p99_abs']:.3g}, "
                    f"mean {parity['mean_abs']:.3g}, argmax {parity['argmax_agreement']:.3%}, "
                    f"KL {parity['kl_hf_megatron']:.2g} / {parity['kl_megatron_hf']:.2g}"
                )
    for place in found["places"]:
        error, selection, routing = place["same_input"], place["selection"], place["routing"]
        words = [f"same input max {error['max']} p99 {error['p99']} set aside {error['set_aside']:.2%}"]
        if selection:
            words.append(f"indexer r {selection['pearson']} top-k {selection['with_ties']:.4%}")
        if routing:
            words.append(f"experts {routing['with_ties']:.4%}")
        words.append(f"HF {place['hf_seconds']:.1f} s, Megatron {place['megatron_seconds']:.1f} s")
        typer.echo(f"  {place['name']} ({place['kind']}): {'; '.join(words)}")
    layer = layer_bytes(short, WIDTHS[found["precision"]])
    typer.echo(
        f"  peak GPU memory {found['peak_gpu_memory'] / 1e9:.1f} GB; one layer of each side and 12 GB: "
        f"{(2 * layer + SLACK) / 1e9:.1f} GB; host memory beyond imports {found['peak_memory'] / 1e9:.1f} GB"
    )
    layers = extrapolated(found, whole)
    typer.echo(
        f"  {found['seconds']:.0f} s in all; {whole['num_hidden_layers']} layers: about {layers / 60:.0f} min"
    )


if __name__ == "__main__":
    typer.run(main)
