"""What a check looks at and what it found, as plain typed data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from glmconv.basics.errors import Defect
from glmconv.source.source import SourceOptions


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What to check beyond structure, router biases and duplicates, which are always checked.

    ``hashes`` re-reads every byte and compares with the manifest; ``values`` scans every tensor for
    NaN, infinities, zeros and repeated experts. ``pipeline_stages`` (with the layers of the first
    and the last stage, where a launcher sets them) checks index sharing. ``indexer`` reports the
    sparse-attention indexer, compared with the HF checkpoint ``against`` where given.
    """

    source: SourceOptions = field(default_factory=SourceOptions)
    hashes: bool = False
    values: bool = False
    pipeline_stages: int | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    indexer: bool = False
    against: Path | None = None
    workers: int = 2


@dataclass(slots=True)
class LockedTensor:
    """A tensor that must stay in a wide dtype (a router bias): ``distinct`` of ``size`` values differ."""

    name: str
    dtype: str
    size: int
    distinct: int


@dataclass(slots=True)
class ComparedPart:
    """One indexer tensor beside the reference's, in the order in which it is stored.

    ``order``: ``equal``, ``half-swapped``, ``either`` (the halves hold the same), ``neither`` or
    ``missing``. ``expected`` is right for the layout; ``hint`` says what a wrong one means.
    """

    layer: int
    part: str
    order: str
    expected: str
    hint: str = ""

    @property
    def right(self) -> bool:
        return self.order in (self.expected, "either")


@dataclass(slots=True)
class IndexerPart:
    """One tensor of the indexer over all layers: every shape and dtype that occurs."""

    part: str
    shapes: list[list[int]]
    dtypes: list[str]


@dataclass(slots=True)
class IndexerReport:
    """The sparse-attention indexer of a checkpoint. Layer numbers are those of Hugging Face.

    ``found`` and ``mtp_found`` are layers whose tensors are in the files; ``owners`` those that the
    config says compute an index; ``sources[layer]`` is the owner whose index a layer shares.
    """

    found: list[int]
    owners: list[int]
    sources: dict[int, int]
    mtp_found: list[int]
    mtp_expected: list[int]
    frequency: int | None
    offset: int | None
    parts: list[IndexerPart]
    against: str | None = None
    compared: list[ComparedPart] = field(default_factory=list)


@dataclass(slots=True)
class PipelineReport:
    """A split into pipeline stages: ``stages`` are (first layer, one past the last), 0-based.

    ``stages`` is empty where the layers do not split; ``valid_starts`` are the layers at which a
    stage may start; ``suggestion`` names launcher options that work.
    """

    count: int
    stages: list[tuple[int, int]]
    valid_starts: list[int]
    suggestion: str


@dataclass(slots=True)
class HashReport:
    """Bytes that were read again: ``payloads`` of tensors and side files, all ``files``."""

    files: int
    payloads: int
    bytes: int
    wrong: int


@dataclass(slots=True)
class CheckReport:
    """All that a check found. ``facts`` are lines for people; ``findings`` errors and warnings."""

    path: Path
    layout: str = "unknown"
    model_type: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    findings: list[Defect] = field(default_factory=list)
    locked: list[LockedTensor] = field(default_factory=list)
    indexer: IndexerReport | None = None
    pipeline: PipelineReport | None = None
    hashes: HashReport | None = None
    scanned: int | None = None
    bytes_read: int = 0
    seconds: float = 0.0

    @property
    def errors(self) -> list[Defect]:
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def warnings(self) -> list[Defect]:
        return [finding for finding in self.findings if finding.severity != "error"]

    @property
    def ok(self) -> bool:
        """Whether everything that was checked holds (warnings do not count)."""
        return not self.errors

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 1

    def note(self, kind: str, what: str, where: str = "", hint: str = "", severity: str = "error") -> None:
        """Add a finding."""
        self.findings.append(Defect(kind, what, where, hint, severity))

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, for ``--json``."""
        content = asdict(self)
        content["path"] = str(self.path)
        content["ok"] = self.ok
        content["seconds"] = round(self.seconds, 3)
        if self.indexer is not None:
            for part, shown in zip(self.indexer.compared, content["indexer"]["compared"], strict=True):
                shown["right"] = part.right
        return content
