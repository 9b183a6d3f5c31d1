"""The tokens that both models run on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glmconv.basics.errors import StorageError, UsageError
from glmconv.tables.spec import ModelSpec
from glmconv.verify.options import VerifyOptions

SEED = 20250


def tokens_for(options: VerifyOptions, spec: ModelSpec, hf_dir: Path) -> Tensor:
    """Token ids ``[batch, seq]``. Raises UsageError for ids that the model does not have."""
    if options.tokens is not None:
        sequences = _from_file(options.tokens)
    elif options.prompt is not None:
        sequences = [_tokenised(options.prompt, hf_dir)]
    else:
        size = (options.random or 1, options.default_length(spec))
        return torch.randint(0, spec.vocab_size, size, generator=torch.Generator().manual_seed(SEED))
    length = min(len(one) for one in sequences)
    length = min(length, options.seq_len or length)
    if length < 2:
        raise UsageError("fewer than 2 tokens are given", hint="give more, or --random 1")
    tokens = torch.tensor([one[:length] for one in sequences], dtype=torch.long)
    if int(tokens.min()) < 0 or int(tokens.max()) >= spec.vocab_size:
        raise UsageError(
            f"token id {int(tokens.max()) if int(tokens.min()) >= 0 else int(tokens.min())} is not in the "
            f"vocabulary of {spec.vocab_size}",
            hint="were the ids made by another model's tokenizer?",
        )
    if length > spec.max_positions:
        raise UsageError(
            f"{length} tokens are more than the model's {spec.max_positions}", hint="--seq-len cuts them"
        )
    return tokens


def shifted(tokens: Tensor, by: int) -> Tensor:
    """``[batch, seq]`` ids moved ``by`` positions to the front; zeros fill the end, as in megatron-core."""
    if not by:
        return tokens
    return torch.cat([tokens[:, by:], torch.zeros_like(tokens[:, :by])], dim=1)


def _from_file(path: Path) -> list[list[int]]:
    """One sequence or several: JSON (a list, or a list of lists), or ids with anything between them."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read the token ids: {error}", where=str(path)) from error
    try:
        value: Any = json.loads(text)
    except ValueError:
        value = [int(word) for word in re.findall(r"\d+", text)]
    if isinstance(value, list) and value and not isinstance(value[0], list):
        value = [value]
    flat = [one for sequence in value for one in sequence] if isinstance(value, list) else []
    if not flat or not all(isinstance(one, int) and not isinstance(one, bool) for one in flat):
        raise UsageError("holds no token ids", where=str(path), hint="a JSON list of integers")
    return [list(sequence) for sequence in value]


def _tokenised(prompt: str, hf_dir: Path) -> list[int]:
    import transformers

    auto: Any = transformers.AutoTokenizer
    try:
        ids: list[int] = auto.from_pretrained(hf_dir)(prompt)["input_ids"]
    except Exception as error:
        # transformers' tokenizers raise whatever their parsers do over a broken file.
        raise UsageError(
            f"the tokenizer cannot be loaded: {type(error).__name__}: {str(error).partition(chr(10))[0]}",
            where=str(hf_dir),
            hint="give ids with --tokens FILE, or --random 1",
        ) from error
    return ids
