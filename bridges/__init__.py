"""One provider a family: ``config.json`` to a validated ModelSpec, and the family's table."""
