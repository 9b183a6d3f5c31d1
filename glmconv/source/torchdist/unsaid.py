"""What a torch_dist lacks because its run had none of it, as the run's own arguments say.

Megatron-LM, ``megatron/training/arguments.py``: without ``--untie-embeddings-and-output-weights`` there is
no ``output_layer``, the embedding is the head; without ``--moe-router-enable-expert-bias`` there is no
``expert_bias``, and experts are chosen by their scores alone, as with a bias of zeros.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import DataError, Defect, StorageError
from glmconv.formats.stored import StoredTensor
from glmconv.formats.torchdist.common import read_common
from glmconv.formats.torchdist.entries import Metadata
from glmconv.source.locate import Found, Located
from glmconv.source.source import Source
from glmconv.tables.rules import ROUTER_BIAS, UNTIED, Table

TIE_FIELD = "tie_word_embeddings"


def run_args(unit: Path, metadata: Metadata) -> dict[str, Any] | None:
    """The arguments that a unit's common state holds, or None where it has none that can be read."""
    try:
        args = read_common(unit, metadata).get("args")
    except (DataError, StorageError):
        return None
    return vars(args) if isinstance(args, Namespace) else None


def tied_by_its_run(
    table: Table,
    config: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    args: Mapping[str, Any] | None,
) -> bool:
    """Whether a run was tied and ``config`` says it was not.

    Both must agree: the arguments say tied, and no head is stored.
    """
    heads = [rule.stored for rule in table.rules if UNTIED in rule.when]
    says = None if args is None else args.get("untie_embeddings_and_output_weights")
    return not config.get(TIE_FIELD) and says is False and not any(head in stored for head in heads)


def note_tied(source: Source) -> None:
    """Say which of the two was believed, and what is written."""
    source.changes[TIE_FIELD] = True
    source.warnings.append(
        Defect(
            "tied",
            "the checkpoint is tied (its args say untie_embeddings_and_output_weights False, and it holds no "
            f"output_layer), config.json says that it is not: the head is the trained embedding, and the "
            f"config that is written says {TIE_FIELD} true",
            str(source.path),
            severity="warning",
        )
    )


def zero_router_biases(source: Source, found: Found, args: Mapping[str, Any] | None) -> None:
    """Zeros for the router biases of a run that had none: none is stored, and the arguments ask for none."""
    rules = [rule for rule in source.table.rules if ROUTER_BIAS in rule.when]
    ends = tuple(hf.name.rpartition("}")[2] for rule in rules for hf in rule.via.slots().values())
    absent = [tensor for tensor in found.missing if tensor.name.endswith(ends)]
    held = any(name.endswith(ends) for name in found.tensors)
    if not absent or held or args is None or args.get("moe_router_enable_expert_bias"):
        return
    for tensor in absent:
        found.tensors[tensor.name] = Located(tensor, tensor.lock or DType.F32, (), zeros=True)
    found.missing = [tensor for tensor in found.missing if tensor.name not in found.tensors]
    source.warnings.append(
        Defect(
            "zeros",
            "the run had no router bias (its args do not say moe_router_enable_expert_bias, and it holds no "
            f"expert_bias): zeros are written for {len(absent)} layers",
            str(source.path),
            severity="warning",
        )
    )
