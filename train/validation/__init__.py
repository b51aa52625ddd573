"""Held-out figures: serving replayed round by round, without the engine."""
