"""A Megatron torch_dist unit as a source: its dialect, its run's statements, its spellings."""
