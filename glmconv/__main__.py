"""``python -m glmconv``."""

from __future__ import annotations

from glmconv.cli import main

if __name__ == "__main__":
    main()
