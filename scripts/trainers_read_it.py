"""Let trainers' own, unchanged code read what glmconv writes, on the CPU.

    python scripts/trainers_read_it.py --dir WORK \
        --slime SLIME_DIR MEGATRON_DIR --miles MILES_DIR MEGATRON_DIR --megatron MEGATRON_DIR [--megatron …]

SLIME_DIR and MILES_DIR are checkouts, MEGATRON_DIR one of Megatron-LM (for slime and miles: the one
that their Dockerfiles pin, slime's with docker/patch applied). For small checkpoints of every family:

* tools/convert_torch_dist_to_hf.py of slime and of miles exports what ``--dialect slime`` and
  ``--dialect miles`` wrote, and every tensor is compared with the source's;
* ``load_args_from_checkpoint`` and ``check_checkpoint_args`` of each Megatron-LM take the args of every
  dialect, and that checkout's ``dist_checkpointing.load`` reads every tensor.

Packages that these sources import and that are not here are replaced by empty ones
(``absent_packages``); the sources are neither changed nor kept. Exits 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("qwen3", "qwen3-untied", "qwen3-moe", "glm-4.5-air", "glm-4.5", "glm-5", "glm-5.2")
OF_A_CLASS = ("attention_backend", "use_dist_ckpt", "iteration")
"""Not written (``parser_defaults`` says why), or not of the parser but set while it loads."""

EXPORTER_SIZES = {"index_head_dim": 128, "qk_rope_head_dim": 64, "head_dim": 64}
"""slime's exporter swaps halves of 64 of indexers 128 wide, the released size."""


def make_source(model: str, place: Path) -> Path:
    """A small checkpoint, its indexer at the released width."""
    from checkpoint_configs import raw_config
    from checkpoint_models import random_tensors
    from safetensors.torch import save_file

    config = raw_config(model)
    if "index_head_dim" in config:
        config |= EXPORTER_SIZES
        config["qk_head_dim"] = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config, indent=1))
    save_file(random_tensors(config, 7), place / "model.safetensors", metadata={"format": "pt"})
    return place


def child(*words: object) -> tuple[int, str]:
    """This script again, in a process of its own, where stand-ins and other Megatrons may live."""
    command = [sys.executable, "-W", "ignore", __file__, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def run_tool(roots: Sequence[str], tool: str, words: Sequence[str]) -> None:
    from absent_packages import install

    install(roots)
    sys.argv = [tool, *words]
    runpy.run_path(tool, run_name="__main__")


def compare(ours: Path, source: Path) -> str:
    """What the export lacks or has otherwise; copies that a release keeps twice need not be there."""
    import torch
    from safetensors.torch import load_file

    def load(folder: Path) -> dict[str, torch.Tensor]:
        return {
            name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()
        }

    left, right = load(ours), load(source)
    twice = {n for n in right if ".shared_head.head." in n or (".layers." in n and ".embed_tokens." in n)}
    lacking = sorted(set(right) - set(left) - twice)
    extra = sorted(set(left) - set(right))
    common = sorted(set(left) & set(right))
    other = [n for n in common if not torch.equal(left[n].double(), right[n].double())]
    if lacking or extra or other:
        return f"lacks {lacking[:3]}, has {extra[:3]} beyond, {len(other)} differ: {other[:3]}"
    return f"{len(common)} of {len(common)} tensors equal"


def check_exporter(name: str, checkout: Path, megatron: Path, units: dict[str, Path], work: Path) -> bool:
    right = True
    for model, unit in units.items():
        out, source = work / f"{model}-by-{name}", work / model
        tool = checkout / "tools" / "convert_torch_dist_to_hf.py"
        words = ["--input-dir", unit / "release", "--output-dir", out, "--origin-hf-dir", source]
        code, text = child("--tool", f"{checkout},{megatron}", tool, *words)
        said = compare(out, source) if code == 0 else text.strip().splitlines()[-1]
        right &= code == 0 and said.endswith("tensors equal")
        print(f"| {name} | {model} | {said} |")
    return right


def megatron_reads(megatron: str, units: dict[str, str]) -> None:
    """In a process of its own: Megatron-LM's checks of args, then its core's load of every tensor."""
    from absent_packages import install

    install([megatron])
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.training import arguments, checkpointing, global_vars

    setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))  # noqa: B010
    setattr(torch.cuda, "synchronize", lambda *_: None)  # noqa: B010
    found: dict[str, Any] = {}
    taken = {name: _args_taken(root, arguments, checkpointing) for name, root in units.items()}
    # Megatron, too, takes the args before it joins its process group.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name, root in units.items():
        args, saved = taken[name]
        global_vars._GLOBAL_ARGS = args
        checkpointing._CHECKPOINT_VERSION = 3.0
        checkpointing.check_checkpoint_args(saved)
        asked = dist_checkpointing.load_tensors_metadata(f"{root}/release")
        loaded = dist_checkpointing.load(asked, f"{root}/release")
        tensors = [value for value in loaded.values() if isinstance(value, torch.Tensor)]
        found[name] = {
            "fields": len(vars(saved)),
            "lacking": [f for f in vars(args) if not hasattr(saved, f) and f not in OF_A_CLASS],
            "tensors": len(tensors),
            "elements": sum(tensor.numel() for tensor in tensors),
            "taken": [args.num_layers, args.hidden_size, args.num_attention_heads, args.rotary_base],
        }
    sys.stdout.write("\n" + json.dumps(found) + "\n")


def _args_taken(root: str, arguments: Any, checkpointing: Any) -> tuple[Any, Any]:
    """The args of a run started with ``--use-checkpoint-args``, and those of the checkpoint."""
    words = ["--load", root, "--use-checkpoint-args", "--no-load-optim", "--no-load-rng"]
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(words)
    args.use_dist_ckpt = True
    result = checkpointing.load_args_from_checkpoint(args)
    if not isinstance(result, tuple):
        raise SystemExit(f"{root}: Megatron found no args")
    return result


def check_megatron(megatron: Path, units: dict[str, Path], sources: dict[str, Path]) -> bool:
    named = {name: str(root) for name, root in units.items()}
    code, text = child("--reads", megatron, json.dumps(named))
    if code:
        print(f"| {megatron.name} | all | {text.strip().splitlines()[-1]} |")
        return False
    right = True
    for name, one in json.loads(text.strip().splitlines()[-1]).items():
        config = json.loads((sources[name] / "config.json").read_text())
        base = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        wanted = [config[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")]
        agrees = one["taken"] == [*wanted, base] and not one["lacking"]
        right &= agrees
        said = f"{one['fields']} fields, {one['tensors']} tensors, {one['elements']:,} elements"
        print(f"| {megatron.name} | {name} | {said}{'' if agrees else ' WRONG: ' + str(one)} |")
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dir", type=Path, help="an empty or new directory for checkpoints")
    parser.add_argument("--slime", nargs=2, type=Path, metavar=("SLIME_DIR", "MEGATRON_DIR"))
    parser.add_argument("--miles", nargs=2, type=Path, metavar=("MILES_DIR", "MEGATRON_DIR"))
    parser.add_argument("--megatron", action="append", type=Path, default=[], metavar="MEGATRON_DIR")
    parser.add_argument("--tool", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("--reads", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.tool:
        run_tool(asked.tool[0].split(","), asked.tool[1], asked.tool[2:])
        return 0
    if asked.reads:
        megatron_reads(asked.reads[0], json.loads(asked.reads[1]))
        return 0
    if asked.dir is None:
        parser.error("--dir is missing")
    sys.path.insert(0, str(ROOT))
    from glmconv.commands.convert import convert
    from glmconv.plan.planner import TargetOptions
    from glmconv.tables.rules import DIALECTS

    work = asked.dir.resolve()
    sources = {model: make_source(model, work / model) for model in MODELS}
    units: dict[str, dict[str, Path]] = {dialect: {} for dialect in DIALECTS}
    for model, source in sources.items():
        for dialect in DIALECTS:
            root = units[dialect][model] = work / f"{model}-{dialect}"
            convert(source, root, target=TargetOptions(to="megatron", dialect=dialect))
    right = True
    for name in ("slime", "miles"):
        if given := getattr(asked, name):
            right &= check_exporter(name, given[0].resolve(), given[1].resolve(), units[name], work)
    all_units = {f"{m} {d}": root for d, roots in units.items() for m, root in roots.items()}
    of = {f"{m} {d}": sources[m] for d in DIALECTS for m in MODELS}
    for megatron in asked.megatron:
        right &= check_megatron(megatron.resolve(), all_units, of)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
