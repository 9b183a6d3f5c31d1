"""Everything here judges by real models, real readers or many processes: `-m "not slow"` leaves it out."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    # Importing these costs seconds, and each worker would import them.
    return True if config.option.markexpr == "not slow" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slow)
