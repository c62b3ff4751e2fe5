"""Flat buffers of a unit's parameters and gradients, and what of them is sharded over ``dp``."""
