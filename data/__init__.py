"""Conversations in, token rows out: corpora, prompts to measure on, manifests, and the commands that write and show them."""
