"""From a source and a wish to a proven plan. Nothing is written here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from glmconv.basics.dtypes import BY_LABEL, BY_TORCH_NAME, DType
from glmconv.basics.errors import DataError, Defect, UsageError
from glmconv.plan.draft import Draft, DtypePolicy, config_changes
from glmconv.plan.filled import misfits
from glmconv.plan.ledger import Ledger, Runs, prove
from glmconv.plan.plan import Plan, plan_digest
from glmconv.plan.to_safetensors import draft_hf
from glmconv.plan.to_torch_dist import draft_torch_dist
from glmconv.plan.training_args import unsaid
from glmconv.source.source import Source, SourceOptions
from glmconv.tables.expand import Layout, hf_layout, megatron_layout, stacks_layers
from glmconv.tables.rules import BASE_DIALECT, DIALECTS

TARGETS = ("megatron", "hf", "hf-stacked")

MAX_ITERATION = 10**18
"""A tracker with more digits is not read."""


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """What to write. ``to`` None: the other kind than the source's.

    ``dialect`` (None: ``mcore``) and ``layer_keys`` (``stacked``, ``per-layer``) hold for ``megatron``, so do
    ``padded_vocab`` (rows) and ``iteration`` (None: a release). ``max_shard_size`` (bytes) holds
    for the HF layouts; without it the origin's own shards are kept where they are known.
    """

    to: str | None = None
    dialect: str | None = None
    layer_keys: str | None = None
    padded_vocab: int | None = None
    iteration: int | None = None
    max_shard_size: int | None = None
    dtype: str | None = None


@dataclass(slots=True)
class Planned:
    """A proven plan, with what the report and the manifest say about it."""

    source: Source
    options: TargetOptions
    to: str
    layout: Layout
    plan: Plan
    ledger: Ledger
    widened: dict[str, DType]
    warnings: list[Defect] = field(default_factory=list)

    @property
    def unit(self) -> str | None:
        """Name of the published directory inside DST; None where it is DST itself."""
        if self.to != "megatron":
            return None
        return "release" if self.options.iteration is None else f"iter_{self.options.iteration:07d}"


def parse_dtype(text: str) -> DType:
    """``bfloat16``, ``bf16``, ``BF16`` … Raises UsageError for what is not a plain float."""
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "f16": "float16", "f32": "float32"}
    name = text.lower().removeprefix("torch.")
    dtype = BY_TORCH_NAME.get(short.get(name, name)) or BY_LABEL.get(text)
    if dtype is None or not dtype.is_plain_float:
        raise UsageError(f"--dtype {text} is not one of bfloat16, float16, float32")
    return dtype


def make_plan(source: Source, source_options: SourceOptions, options: TargetOptions) -> Planned:
    """Plan a conversion and prove the plan.

    Raises DataError listing everything wrong with the source, UsageError for options that mean
    nothing for this target.
    """
    source.require_sound()
    to = options.to or ("hf" if source.kind == "megatron" else "megatron")
    _check_options(to, options, source)
    cast = parse_dtype(options.dtype) if options.dtype else None
    layout = _layout(source, to, options)
    policy = DtypePolicy(to == "megatron", cast, source.widened if to != "megatron" else {})
    unfit = list(misfits(source, policy))
    if unfit:
        raise DataError("filled tensors do not fit the run", where=str(source.path), defects=unfit)
    changes = config_changes(source, cast, source_options.drop_mtp)
    if to == "megatron":
        draft = draft_torch_dist(
            source,
            layout,
            policy,
            padded_vocab=options.padded_vocab,
            iteration=options.iteration or 0,
            changes=changes,
        )
    else:
        draft = draft_hf(source, layout, policy, max_shard_size=options.max_shard_size, changes=changes)
    if draft.defects:
        raise DataError("the conversion cannot be planned", where=str(source.path), defects=draft.defects)
    asked = _asked(to, layout, source_options, options)
    plan = Plan(draft.sources, draft.targets, [*source.equal, *source.blank], source.dropped, asked)
    plan.digest = plan_digest(plan)
    ledger = prove(plan, _wanted(source), _stored_bytes(source), draft.repeated)
    warnings = [*source.warnings, *draft.warnings, *_runtime_warnings(source, to, layout.name)]
    return Planned(source, options, to, layout, plan, ledger, _widened(source, draft), warnings)


def _asked(to: str, layout: Layout, source: SourceOptions, target: TargetOptions) -> dict[str, str]:
    """The options that shape the output, by their names on the command line; those left out are absent."""
    given = {
        "--dialect": layout.name if to == "megatron" else None,
        "--layer-keys": target.layer_keys,
        "--padded-vocab-size": target.padded_vocab,
        "--iteration": target.iteration,
        "--max-shard-size": target.max_shard_size,
        "--dtype": target.dtype,
        "--origin-hf-dir": source.origin_hf_dir and source.origin_hf_dir.resolve(),
        "--fill-missing-from": source.fill_missing_from and source.fill_missing_from.resolve(),
        "--allow-missing": " ".join(sorted(source.allow_missing)) or None,
        "--drop-mtp": "yes" if source.drop_mtp else None,
    }
    return {"--to": to, **{name: str(value) for name, value in given.items() if value is not None}}


def _check_options(to: str, options: TargetOptions, source: Source) -> None:
    if to not in TARGETS:
        raise UsageError(f"--to {to}: unknown layout", hint=f"one of {', '.join(TARGETS)}")
    if options.dialect is not None and options.dialect not in DIALECTS:
        raise UsageError(
            f"--dialect {options.dialect}: unknown dialect", hint=f"one of {', '.join(DIALECTS)}"
        )
    if options.layer_keys not in (None, "stacked", "per-layer"):
        raise UsageError(f"--layer-keys {options.layer_keys}: unknown", hint="stacked or per-layer")
    if to != "megatron" and options.dialect is not None:
        raise UsageError(
            f"--dialect {options.dialect}: {to} has no dialects",
            hint="leave it away; --from-dialect is that of the source",
        )
    if to != "megatron" and (options.layer_keys or options.padded_vocab or options.iteration is not None):
        raise UsageError("--layer-keys, --padded-vocab-size and --iteration are for --to megatron")
    if to == "megatron" and options.max_shard_size is not None:
        raise UsageError("--max-shard-size is for --to hf and hf-stacked")
    if options.iteration is not None and not 0 <= options.iteration < MAX_ITERATION:
        raise UsageError(f"--iteration {options.iteration}: must be from 0 to {MAX_ITERATION - 1}")
    if options.max_shard_size is not None and options.max_shard_size < 1:
        raise UsageError(f"--max-shard-size {options.max_shard_size}: must be positive")
    vocab = source.spec.vocab_size
    if options.padded_vocab is not None and options.padded_vocab < vocab:
        raise UsageError(f"--padded-vocab-size {options.padded_vocab} is below the vocabulary's {vocab}")
    if to == "hf-stacked" and not source.table.hf_stacked:
        raise UsageError(f"{source.spec.model_type} has no experts to stack", hint="use --to hf")


def _layout(source: Source, to: str, options: TargetOptions) -> Layout:
    if to != "megatron":
        return hf_layout(source.table, source.spec, stacked_experts=to == "hf-stacked")
    dialect = options.dialect or BASE_DIALECT
    stacked = stacks_layers(source.table, source.spec, dialect)
    if options.layer_keys == "stacked" and len(set(source.spec.moe_layers)) > 1:
        raise UsageError(
            "--layer-keys stacked: layers of different kinds cannot be one tensor", hint="leave it away"
        )
    if options.layer_keys is not None:
        stacked = options.layer_keys == "stacked"
    return megatron_layout(source.table, source.spec, dialect, stacked)


def _wanted(source: Source) -> Mapping[int, list[Runs]]:
    """Where the tensors to be converted lie, by source file."""
    wanted: dict[int, list[Runs]] = {}
    for located in source.tensors.values():
        size = located.dtype.itemsize
        for piece in located.pieces:
            runs = (piece.offset, piece.cols * size, piece.rows, piece.row_stride)
            wanted.setdefault(piece.file, []).append(runs)
    return wanted


def _stored_bytes(source: Source) -> int:
    """Bytes of all tensors that the source holds, and of those filled in from elsewhere."""
    total = sum(tensor.nbytes for tensor in source.stored.values())
    total += source.trainer_bytes
    for name in source.filled:
        located = source.tensors[name]
        total += sum(piece.rows * piece.cols for piece in located.pieces) * located.dtype.itemsize
    return total


def _widened(source: Source, draft: Draft) -> dict[str, DType]:
    """Tensors stored wider than their origin: the source's own record and this conversion's."""
    return {**source.widened, **draft.widened}


def _runtime_warnings(source: Source, to: str, dialect: str) -> list[Defect]:
    """What the runtime of a dialect does to a correct checkpoint (``torch_dist.md`` section 5)."""
    spec = source.spec
    if to != "megatron":
        return []
    warnings = [
        Defect(
            "runtime", f"a trainer's args cannot say: {what}", "common.pt", "set it in the trainer", "warning"
        )
        for what in unsaid(spec, dialect)
    ]
    if spec.dsa is None:
        return warnings
    if dialect == "mcore-0.18":
        warnings.append(
            Defect(
                "runtime",
                "megatron-core up to 0.18 feeds the indexer the latent before its norm, so it selects "
                "other tokens than Hugging Face whatever the weights",
                "mcore-0.18",
                "megatron-core 0.19 with --dialect mcore selects the same",
                "warning",
            )
        )
        if not all(spec.dsa.full):
            warnings.append(
                Defect(
                    "runtime",
                    "megatron-core up to 0.18 cannot share an index between layers",
                    "mcore-0.18",
                    "megatron-core 0.19 with --dialect mcore can",
                    "warning",
                )
            )
    return warnings
