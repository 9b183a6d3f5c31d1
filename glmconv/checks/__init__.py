"""``check``: what is wrong with a checkpoint of either layout, without a model and without torch."""
