"""Which rows past the vocabulary are a trainer's padding, whatever stands in them.

Megatron-LM pads the embedding and the head to a multiple of ``--make-vocab-size-divisible-by`` times the
tensor parallel size (``megatron/training/tokenizer``, ``vocab_size_with_padding``) and initialises and
trains the padding like other rows. So rows that are not zero are padding only where the run's own
arguments say so; everywhere else they are looked at, and must be zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glmconv.basics.errors import Defect
from glmconv.source.source import Source


def accept_declared_padding(source: Source, args: Mapping[str, Any] | None) -> None:
    """Spare the padding that the run's arguments declare from being all zeros, and say it."""
    if args is None:
        return
    vocab = source.spec.vocab_size
    names = sorted({blank.name for blank in source.blank})
    declared = [name for name in names if _declares(args, vocab, source.stored[name].shape[0])]
    source.blank = [blank for blank in source.blank if blank.name not in declared]
    source.warnings += [
        Defect(
            "padding",
            f"rows past the vocabulary of {vocab:,} are dropped whatever they hold: the run's args say that "
            f"{source.stored[name].shape[0]:,} rows are the padded vocabulary",
            name,
            severity="warning",
        )
        for name in declared
    ]


def _declares(args: Mapping[str, Any], vocab: int, rows: int) -> bool:
    """Whether the arguments call ``rows`` the padded size of a vocabulary of ``vocab``."""
    if args.get("padded_vocab_size") != rows:
        return False
    if args.get("vocab_size") == vocab:
        return True
    unit, parallel = args.get("make_vocab_size_divisible_by"), args.get("tensor_model_parallel_size", 1)
    if args.get("vocab_size") is not None or type(unit) is not int or type(parallel) is not int:
        return False
    multiple = unit * parallel
    return multiple > 1 and -(-vocab // multiple) * multiple == rows
