"""Every byte of the output fixed before the first moves: moves, drafts, ledger."""
