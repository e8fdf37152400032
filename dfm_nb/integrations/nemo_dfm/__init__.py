"""NeMo DFM's DiT: its network, and weights that were trained there."""
