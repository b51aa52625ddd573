"""Conversations to packed token rows: reading, rendering with the chat template, packing."""
