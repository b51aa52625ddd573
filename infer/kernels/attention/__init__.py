"""Attention over a paged KV pool, and the block pool."""
