"""Make Hugging Face checkpoints for tests, the demo and the bench.

Three sorts: small complete models with random weights (transformers builds them), full-size models
as headers on sparse files, and gigabytes of random data in a big model's proportions. Example:
``python scripts/make_checkpoint.py --model glm-5.2 --out DIR``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from checkpoint_configs import MODELS, SIZES, raw_config
from checkpoint_headers import FULL_MODELS, make_headers_only, make_proportioned

__all__ = ["main", "make_checkpoint", "make_headers_only", "make_proportioned", "parse_size"]

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def make_checkpoint(
    model: str,
    out: Path,
    *,
    size: str = "tiny",
    seed: int = 0,
    shard_size: str = "200KB",
    dtype: str = "bfloat16",
    router_bias_dtype: str | None = None,
    router_weight_dtype: str | None = None,
    keep_tied_head: bool = False,
) -> Path:
    """Write a small but complete checkpoint of ``model`` into ``out`` and return ``out``.

    The same arguments give the same bytes. The router dtypes are torch names; without them routers
    stay as transformers saves them (GLM: weight and bias in fp32). ``keep_tied_head`` stores
    ``lm_head.weight`` beside the embedding it is tied to, as the Qwen3-0.6B release does. Raises
    ``ValueError`` for an unknown name and ``FileExistsError`` where ``out`` holds something.
    """
    import torch
    from checkpoint_models import cast_named, random_tensors, write_sharded
    from checkpoint_side_files import write_json, write_side_files

    config = raw_config(model, size, dtype)
    _make_empty(out)
    tensors = random_tensors(config, seed)
    if router_bias_dtype:
        cast_named(tensors, "mlp.gate.e_score_correction_bias", getattr(torch, router_bias_dtype))
    if router_weight_dtype:
        cast_named(tensors, "mlp.gate.weight", getattr(torch, router_weight_dtype))
    if keep_tied_head and config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    write_sharded(out, tensors, parse_size(shard_size))
    write_json(out / "config.json", config)
    write_side_files(out, config)
    return out


def parse_size(text: str) -> int:
    """Bytes of ``200KB``, ``5GB``, ``1MiB`` or a plain number. Raises ``ValueError``."""
    found = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    if not found or found[2].upper() not in UNITS:
        raise ValueError(f"not a size: {text!r}; say 200KB, 5GB or 1MiB")
    return int(found[1]) * UNITS[found[2].upper()]


def _make_empty(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty; name a new directory")


def main(
    out: Annotated[Path, typer.Option(help="Directory to write; new or empty.")],
    model: Annotated[str, typer.Option(help="One of: " + ", ".join(MODELS))] = "glm-5.2",
    size: Annotated[str, typer.Option(help="One of: " + ", ".join(SIZES))] = "tiny",
    seed: Annotated[int, typer.Option(help="Other weights for another seed.")] = 0,
    shard_size: Annotated[str, typer.Option(help="Largest shard, as 200KB.")] = "200KB",
    dtype: Annotated[str, typer.Option(help="torch dtype of the weights.")] = "bfloat16",
    router_bias_dtype: Annotated[str | None, typer.Option(help="torch dtype of router biases.")] = None,
    router_weight_dtype: Annotated[str | None, typer.Option(help="torch dtype of router weights.")] = None,
    keep_tied_head: Annotated[bool, typer.Option(help="Store a tied lm_head as well.")] = False,
    headers_only: Annotated[
        bool, typer.Option(help="Full real size, headers on sparse files. Models: " + ", ".join(FULL_MODELS))
    ] = False,
    proportioned: Annotated[
        float | None, typer.Option(help="Gigabytes of random data in GLM-5.2's proportions.")
    ] = None,
) -> None:
    """Write one checkpoint directory."""
    try:
        if headers_only:
            make_headers_only(model, out)
        elif proportioned is not None:
            make_proportioned(out, proportioned, seed=seed)
        else:
            make_checkpoint(
                model,
                out,
                size=size,
                seed=seed,
                shard_size=shard_size,
                dtype=dtype,
                router_bias_dtype=router_bias_dtype,
                router_weight_dtype=router_weight_dtype,
                keep_tied_head=keep_tied_head,
            )
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(out)


if __name__ == "__main__":
    typer.run(main)
