"""Drafters and the targets they are made for: what training writes and serving reads."""
