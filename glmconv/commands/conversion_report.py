"""What a conversion tells: the report to its caller, the manifest beside the data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glmconv.basics.digest import digest_bytes
from glmconv.basics.errors import Defect
from glmconv.basics.version import __version__
from glmconv.engine import Outcome
from glmconv.plan.ledger import Ledger
from glmconv.plan.planner import Planned


@dataclass(slots=True)
class Report:
    """What a conversion did, or with ``dry_run`` would do. ``path`` is the published unit.

    ``filled``: tensors taken from another checkpoint, with the file each comes from. ``config``: the
    ``config.json`` that a torch_dist was understood by, where it is not the unit's own.
    ``finished_earlier``: an earlier run of the same plan had published the unit, and was killed before
    it ended. ``not_looked_at``: what a dry run leaves to the run. ``rounding``: what casts lost
    (:func:`glmconv.engine.rounding.summary`), in whichever run; empty where nothing was carried out.
    """

    source: Path
    destination: Path
    path: Path
    model_type: str
    from_layout: str
    to_layout: str
    plan_digest: str
    ledger: Ledger
    files: int
    widened: dict[str, str]
    dropped: list[tuple[str, str, int]]
    warnings: list[Defect]
    plan_seconds: float
    filled: dict[str, str] = field(default_factory=dict)
    config: Path | None = None
    outcome: Outcome | None = None
    seconds: float = 0.0
    peak_rss_anon: int = 0
    finished_earlier: bool = False
    not_looked_at: list[str] = field(default_factory=list)
    rounding: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, for ``--json``."""
        outcome = self.outcome
        return {
            "source": str(self.source),
            "destination": str(self.destination),
            "path": str(self.path),
            "model_type": self.model_type,
            "from": self.from_layout,
            "to": self.to_layout,
            "plan_digest": self.plan_digest,
            "ledger": {name: getattr(self.ledger, name) for name in Ledger.__slots__},
            "files": self.files,
            "widened": self.widened,
            "filled": self.filled,
            "config": None if self.config is None else str(self.config),
            "dropped": [{"name": n, "reason": r, "bytes": size} for n, r, size in self.dropped],
            "warnings": [str(warning) for warning in self.warnings],
            "plan_seconds": round(self.plan_seconds, 3),
            "not_looked_at": self.not_looked_at,
            "dry_run": outcome is None and not self.finished_earlier,
            "finished_earlier": self.finished_earlier,
            "seconds": round(self.seconds, 3),
            "peak_rss_anon": self.peak_rss_anon,
            "bytes": self.steps,
            "copying": outcome.copying() if outcome else {},
            "rounding": self.rounding,
        }


def make_report(planned: Planned, src: Path, dst: Path, seconds: float) -> Report:
    plan = planned.plan
    return Report(
        source=src,
        destination=dst,
        path=dst if planned.unit is None else dst / planned.unit,
        model_type=planned.source.spec.model_type,
        from_layout=_layout_name(planned.source.kind, planned.source.layout),
        to_layout=_layout_name(planned.to, planned.layout.name),
        plan_digest=plan.digest,
        ledger=planned.ledger,
        files=len(plan.targets),
        widened={name: dtype.label for name, dtype in planned.widened.items()},
        dropped=[(one.name, one.reason, one.size) for one in plan.dropped],
        warnings=planned.warnings,
        plan_seconds=seconds,
        filled=planned.source.filled,
        config=planned.source.config_from,
    )


def _layout_name(kind: str, layout: str) -> str:
    return f"megatron ({layout})" if kind == "megatron" else layout


def steps_of(outcome: Outcome) -> dict[str, int]:
    return {
        "cloned": outcome.bytes_cloned,
        "copied": outcome.bytes_copied,
        "computed": outcome.bytes_computed,
        "zero": outcome.bytes_zero,
        "literal": outcome.bytes_literal,
        "reused": outcome.bytes_reused,
    }


def rounding_warnings(told: dict[str, Any]) -> list[Defect]:
    """What casts lost, in one line; none where they lost nothing."""
    if not told.get("tensors"):
        return []
    what = (
        f"the cast made {told['to_zero']:,} values zero that were not and {told['to_subnormal']:,} "
        f"subnormal, in {told['tensors']:,} tensors; this one lost most"
    )
    worst = told["most"][0]["name"]
    return [Defect("rounding", what, worst, "a dtype with a wider range keeps them (bf16 or f32)", "warning")]


def make_manifest(planned: Planned, report: Report) -> dict[str, Any]:
    """What is left beside the data: where it came from, what was done, what each tensor hashes to."""
    source, outcome = planned.source, report.outcome
    return {
        "tool": "glmconv",
        "version": __version__,
        "model_type": source.spec.model_type,
        "layout": planned.to,
        "dialect": planned.layout.name if planned.to == "megatron" else None,
        "source": {"path": str(source.path.resolve()), "layout": report.from_layout},
        "sources": [one.named_identity for one in planned.plan.sources],
        "options": planned.plan.asked,
        "run": outcome.run if outcome else None,
        "config": None if report.config is None else str(report.config.resolve()),
        "filled": report.filled,
        "config_from_args": source.config_from_args,
        "plan_digest": report.plan_digest,
        "dtype": planned.options.dtype,
        "widened": report.widened,
        "dropped": [{"name": n, "reason": r, "bytes": size} for n, r, size in report.dropped],
        "warnings": [str(warning) for warning in report.warnings],
        "ledger": {name: getattr(report.ledger, name) for name in Ledger.__slots__},
        "bytes": report.steps,
        "rounding": report.rounding,
        "seconds": round(report.seconds, 3),
        "peak_rss_anon": report.peak_rss_anon,
        "hash": {"mode": outcome.hash_mode if outcome else "none", "name": "xxh3_128 tree, 4 MiB leaves"},
        "files": _file_hashes(planned, outcome),
    }


def _file_hashes(planned: Planned, outcome: Outcome | None) -> list[dict[str, Any]]:
    """Each file with its size, the digest of its literal bytes and those of its payloads."""
    files = []
    for target in planned.plan.targets:
        entry: dict[str, Any] = {"path": target.path, "size": target.size}
        entry["literals"] = digest_bytes(b"".join(data for _, data in sorted(target.literals)))
        entry["payloads"] = [
            [
                payload.name,
                list(payload.place),
                payload.offset,
                payload.size,
                outcome.digest(target.path, index).hex() if outcome and outcome.leaves else None,
            ]
            for index, payload in enumerate(target.payloads)
        ]
        files.append(entry)
    return files
