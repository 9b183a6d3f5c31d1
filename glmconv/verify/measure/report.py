"""What ``verify`` found, as data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from glmconv.verify.measure.compare import HiddenError, RoutingParity, SelectionParity
from glmconv.verify.measure.logprobs import LogprobParity

VERIFIED, FAILED, UNPROVEN = "verified", "failed", "unproven"
EXIT_CODES = {VERIFIED: 0, FAILED: 4, UNPROVEN: 2}


@dataclass(frozen=True, slots=True)
class Bounds:
    """What has to hold. ``hidden`` is per token and layer, both sides fed the same hidden states.

    ``logprob_p99`` and ``argmax`` hold for the whole model; ``pearson``, ``selection`` and
    ``routing`` (both up to ties) for each layer; at most ``set_aside`` of the tokens of a layer may
    have chosen another way. ``times_floor``: in bf16 a figure may be so many times as far off as
    the noise floor; the others are then slack on top of it.
    """

    hidden: float
    logprob_p99: float
    argmax: float
    pearson: float
    selection: float
    routing: float
    set_aside: float
    tie: float
    times_floor: float = 0.0


@dataclass(slots=True)
class PlaceReport:
    """One stage of the model: ``embedding``, ``layer 3``, ``head``, ``mtp 0``.

    ``same_input``: both sides ran on the Hugging Face model's hidden states, so the error is made
    here; ``same_other_input``: on the Megatron model's. ``running``: each side ran on its own, so
    errors of earlier layers are in it. ``floor`` is Hugging Face in this precision against fp32.
    ``shares_index``: the layer uses an earlier layer's token selection.
    ``runtime_selection``: what the runtime selects without the alignment of its indexer's input.
    """

    name: str
    kind: str
    same_input: HiddenError
    running: HiddenError
    shares_index: bool = False
    same_other_input: HiddenError | None = None
    floor: HiddenError | None = None
    selection: SelectionParity | None = None
    running_selection: SelectionParity | None = None
    floor_selection: SelectionParity | None = None
    runtime_selection: SelectionParity | None = None
    routing: RoutingParity | None = None
    running_routing: RoutingParity | None = None
    floor_routing: RoutingParity | None = None
    hf_seconds: float = 0.0
    megatron_seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Predictions:
    """Log-probabilities of the model or of one MTP layer, and the noise floor beside them."""

    name: str
    parity: LogprobParity
    floor: LogprobParity | None = None
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class VerifyReport:
    """The outcome. ``verdict`` is ``verified``, ``failed`` or ``unproven``.

    ``relaid``: the checkpoint is of another dialect than the installed megatron-core runs and was
    laid out anew in memory. Memory is in bytes, beyond what the imports take.
    """

    hf: Path
    megatron: Path
    model_type: str
    dialect: str
    runtime_dialect: str
    relaid: bool
    precision: str
    device: str
    batch: int
    seq_len: int
    index_topk: int
    layers: tuple[int, int]
    num_layers: int
    bounds: Bounds
    places: list[PlaceReport] = field(default_factory=list)
    predictions: list[Predictions] = field(default_factory=list)
    alignments: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    peak_memory: int = 0
    peak_gpu_memory: int = 0
    reason: str = ""
    verdict: str = UNPROVEN

    @property
    def exit_code(self) -> int:
        """0 verified, 4 parity failed, 2 nothing proven."""
        return EXIT_CODES[self.verdict]

    @property
    def problems(self) -> dict[str, list[str]]:
        """What is wrong, by stage and by prediction."""
        found = {place.name: place.problems for place in self.places}
        found |= {one.name: one.problems for one in self.predictions}
        return {name: problems for name, problems in found.items() if problems}

    @property
    def whole(self) -> bool:
        """Whether every layer ran."""
        return self.layers == (0, self.num_layers)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data; what is no finite number becomes null."""
        data = _plain(asdict(self))
        return {**data, "exit_code": self.exit_code}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
