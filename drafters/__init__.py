"""Drafters and their targets: the model and checkpoint that training writes and serving reads."""
