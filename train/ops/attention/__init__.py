"""Attention of the unroll, with gradients that keep no scores, and of held-out validation."""
