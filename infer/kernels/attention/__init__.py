"""Attention over a paged KV pool."""
