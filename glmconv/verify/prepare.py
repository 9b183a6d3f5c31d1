"""Everything before the first layer runs: packages, device, both checkpoints, tokens, the two sides."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glmconv.basics.errors import UsageError
from glmconv.basics.memory import rss_anon
from glmconv.basics.version import __version__
from glmconv.tables.expand import megatron_layout
from glmconv.tables.spec import ModelSpec
from glmconv.verify.hf.side import HfSide
from glmconv.verify.mcore.model import runtime_dialect
from glmconv.verify.mcore.parallel import runtime
from glmconv.verify.mcore.side import MegatronSide
from glmconv.verify.mcore.weights import NativeWeights, RelaidWeights
from glmconv.verify.measure.report import VerifyReport
from glmconv.verify.measure.verdict import BOUNDS
from glmconv.verify.options import VerifyOptions
from glmconv.verify.pair import Pair, choose_device, open_pair, require_packages
from glmconv.verify.tokens import tokens_for


@dataclass(slots=True)
class Prepared:
    """Both sides, nothing loaded yet, and the report in the making.

    ``exact`` is the Hugging Face model in fp32, where the run is not in fp32. ``opened`` are the bytes
    that what is known of both checkpoints takes.
    """

    pair: Pair
    tokens: Tensor
    report: VerifyReport
    hf: HfSide
    megatron: MegatronSide
    exact: HfSide | None
    opened: int


@contextmanager
def prepare(hf: Path, megatron: Path, options: VerifyOptions | None) -> Iterator[Prepared]:
    """Open and check everything; inside the block megatron-core can be built and run."""
    options = options or VerifyOptions()
    options.check()
    versions = require_packages()
    device = choose_device(options.device)
    before = rss_anon()
    pair = open_pair(Path(hf), Path(megatron), options.dialect)
    opened = max(0, rss_anon() - before)
    _require_room(pair, options)
    tokens = tokens_for(options, pair.spec, pair.hf.path).to(device)
    with runtime(), _quiet_megatron():
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        report = _new_report(pair, options, device, tokens)
        report.versions = {"glmconv": __version__, "python": platform.python_version(), **versions}
        shared: dict[str, Any] = {"index_topk": options.index_topk, "device": device}
        weights = (
            RelaidWeights(pair.megatron, report.runtime_dialect)
            if report.relaid
            else NativeWeights(pair.unit)
        )
        yield Prepared(
            pair,
            tokens,
            report,
            HfSide(pair.hf, precision=options.precision, **shared),
            MegatronSide(pair.spec, weights, precision=options.precision, seq=tokens.shape[1], **shared),
            None if options.precision == "fp32" else HfSide(pair.hf, precision="fp32", **shared),
            opened,
        )


def _require_room(pair: Pair, options: VerifyOptions) -> None:
    """Raise UsageError where not even the largest layer fits into ``max_memory``."""
    width = {"fp32": 4, "bf16": 2}[options.precision]
    sizes: dict[str, int] = {}
    for name, one in pair.hf.tensors.items():
        # model.layers.3.mlp.… and model.layers.3.self_attn.… are one layer.
        layer = ".".join(name.split(".")[:3])
        sizes[layer] = sizes.get(layer, 0) + prod(one.tensor.shape) * width
    largest = max(sizes.values())
    if options.max_memory is not None and options.max_memory < largest:
        raise UsageError(
            f"--max-memory {options.max_memory / 1e6:,.0f} MB is less than one layer takes in "
            f"{options.precision}, {largest / 1e6:,.0f} MB",
            hint=f"--max-memory {2.5 * largest / 1e6:.0f}MB, and more for long texts",
        )


@contextmanager
def _quiet_megatron() -> Iterator[None]:
    """megatron-core warns with every model that it builds, about plans of its own."""
    logger = logging.getLogger("megatron.core")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _new_report(pair: Pair, options: VerifyOptions, device: str, tokens: Tensor) -> VerifyReport:
    dialect, native = pair.megatron.layout, runtime_dialect()
    spec = pair.spec
    report = VerifyReport(
        hf=pair.hf.path,
        megatron=pair.unit,
        model_type=spec.model_type,
        dialect=dialect,
        runtime_dialect=native,
        relaid=not runs_natively(pair, native),
        precision=options.precision,
        device=_device_name(device),
        batch=tokens.shape[0],
        seq_len=tokens.shape[1],
        index_topk=options.top_k(spec),
        layers=_layers(pair, options),
        num_layers=spec.num_layers,
        bounds=BOUNDS[options.precision],
    )
    report.warnings += pair.warnings
    if report.relaid:
        report.warnings.append(
            f"the checkpoint is of dialect {dialect}; the tables laid its tensors out anew, in memory, as "
            f"{native}: what ran is megatron-core, not the runtime of the trainer that uses {dialect}"
        )
    if dialect == "mcore-0.18" and native == "mcore" and spec.dsa is not None:
        report.warnings.append(
            "megatron-core up to 0.18, which this dialect is for, feeds its indexer the latent before its "
            "norm and selects other tokens than Hugging Face; verify with that version says how many"
        )
    if report.index_topk and report.seq_len <= report.index_topk:
        report.warnings.append("no token has more tokens before it than are selected: nothing will be proven")
    return report


def runs_natively(pair: Pair, native: str) -> bool:
    """Whether the installed megatron-core reads the checkpoint as it is.

    Dialects that lay a model out alike are one: a model without an indexer has the same names in
    all of them.
    """
    source = pair.megatron
    if source.layout == native:
        return True
    other = megatron_layout(source.table, source.spec, native, source.stacked)
    return other.parts == megatron_layout(source.table, source.spec, source.layout, source.stacked).parts


def _layers(pair: Pair, options: VerifyOptions) -> tuple[int, int]:
    spec = pair.spec
    start, stop = options.layers or (0, -1)
    stop = spec.num_layers if stop == -1 else stop
    if start >= spec.num_layers or stop > spec.num_layers:
        raise UsageError(f"--layers {start}:{stop}: the model has {spec.num_layers} layers")
    while spec.dsa is not None and not spec.has_indexer(start):
        start -= 1
    return start, stop


def _device_name(device: str) -> str:
    return device if device == "cpu" else f"cuda ({torch.cuda.get_device_name()})"


def kind_of(spec: ModelSpec, number: int) -> str:
    """``dense`` or ``MoE``, and what the layer does about an indexer."""
    words = ["MoE" if spec.is_moe(number) else "dense"]
    if spec.dsa is not None:
        words.append("indexer" if spec.has_indexer(number) else "shares index")
    return ", ".join(words)
