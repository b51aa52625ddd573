"""Conversations in, packed token rows out: reading, rendering with the target's template, packing, prompts, manifests."""
