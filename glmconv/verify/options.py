"""What ``verify`` is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from glmconv.basics.errors import UsageError
from glmconv.tables.spec import ModelSpec

DEVICES = ("auto", "cpu", "cuda")
DEFAULT_SEQ = 128


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """How to run the two models.

    One of ``tokens`` (a file of ids), ``prompt`` (text, for the tokenizer of the HF directory) and
    ``random`` (a number of sequences of random ids) says what runs; without any, one random
    sequence. ``seq_len`` cuts or sets the length; ``index_topk`` lowers an indexer's selection on
    both sides. ``layers`` (start, stop) runs these layers alone. ``max_memory`` are bytes beyond
    what the imports take, on the CPU. ``dialect`` is for a torch_dist that does not tell.
    """

    device: str = "auto"
    precision: str = "fp32"
    tokens: Path | None = None
    prompt: str | None = None
    random: int | None = None
    seq_len: int | None = None
    index_topk: int | None = None
    layers: tuple[int, int] | None = None
    max_memory: int | None = None
    dialect: str | None = None

    def check(self) -> None:
        """Raise UsageError for what cannot mean anything."""
        if self.device not in DEVICES:
            raise UsageError(f"--device {self.device}: unknown", hint=f"one of {', '.join(DEVICES)}")
        if self.precision not in ("fp32", "bf16"):
            raise UsageError(f"--precision {self.precision}: unknown", hint="fp32 or bf16")
        if sum(one is not None for one in (self.tokens, self.prompt, self.random)) > 1:
            raise UsageError("--tokens, --prompt and --random exclude each other")
        for name in ("random", "seq_len", "index_topk", "max_memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, is {value}")

    def default_length(self, spec: ModelSpec) -> int:
        """Tokens of a random sequence: for an indexer twice what it selects, so that it must choose."""
        wanted = self.seq_len or (2 * self.top_k(spec) if spec.dsa else DEFAULT_SEQ)
        return min(wanted, spec.max_positions)

    def top_k(self, spec: ModelSpec) -> int:
        """Tokens that an indexer selects; 0 without one. Raises UsageError where it cannot be lowered."""
        if spec.dsa is None:
            if self.index_topk is not None:
                raise UsageError(
                    "--index-topk is for models with an indexer", where=spec.model_type, hint="leave it away"
                )
            return 0
        if self.index_topk is not None and self.index_topk > spec.dsa.top_k:
            raise UsageError(f"--index-topk {self.index_topk} is above the model's {spec.dsa.top_k}")
        return self.index_topk or spec.dsa.top_k


def parse_layers(text: str) -> tuple[int, int]:
    """``A:B`` (B excluded), ``A:``, ``:B`` or one number; an open end is -1. Raises UsageError."""
    first, colon, last = text.partition(":")
    try:
        start = int(first) if first else 0
        stop = (int(last) if last else -1) if colon else start + 1
    except ValueError:
        start, stop = -1, -1
    if start < 0 or (stop != -1 and stop <= start):
        raise UsageError(f"--layers {text}: not a range", hint="write A:B, for instance 0:4")
    return start, stop
