"""Sources in a quantised form: recognised before any work, by the format's name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glmconv.basics.errors import DataError
from glmconv.formats.stored import StoredTensor

MAX_LISTED = 8
QUANTISATION_FIELDS = ("quantization_config", "compression_config")


def refuse_quantised(config: Mapping[str, Any], stored: Mapping[str, StoredTensor], where: Path) -> None:
    """Refuse sources in a quantised form before any work, by the format's name. Raises DataError."""
    block = next((config[f] for f in QUANTISATION_FIELDS if config.get(f) is not None), None)
    if block is not None:
        told = block if isinstance(block, dict) else {"quant_method": block}
        method = told.get("quant_method", "unnamed")
        form = told.get("fmt") or told.get("format") or ""
        raise DataError(
            f"the checkpoint is quantised ({' '.join(f'{method} {form}'.split())})",
            where=str(where / "config.json"),
            hint="use the BF16 release; quantised sources are not handled yet",
        )
    odd = [t.name for t in stored.values() if not t.dtype.is_plain_float]
    scales = [name for name in stored if name.endswith(("_scale_inv", "_scale", ".scale", "weight_packed"))]
    if odd or scales:
        names = ", ".join((odd + scales)[:MAX_LISTED])
        raise DataError(
            f"{len(odd) + len(scales)} tensors are quantised or not floating point: {names}",
            where=str(where),
            hint="use the BF16 release; quantised sources are not handled yet",
        )
