"""``check``: what is wrong with a checkpoint of either layout, without a model and without torch."""

from __future__ import annotations

from glmconv.checks.findings import CheckOptions, CheckReport
from glmconv.commands.check import check

__all__ = ["CheckOptions", "CheckReport", "check"]
