"""Linear layers: packed, fused."""
