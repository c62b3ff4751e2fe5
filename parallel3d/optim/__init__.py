"""Global gradient norm and clipping, the optimizer over owned shards, learning-rate curves."""
